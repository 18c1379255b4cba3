"""What a bench measures: cells of prompts, the servers they are sent to, and in which order.

    phase    servers that are compared with each other: a reference and one K, or every K
    round    every cell once, with prompts of its own, to every server of the phase
    cell     one load, context and category; the unit whose ratio is taken

beside:   c1 none, c1 K | c2 K, c2 none | c3 none, c3 K ...    both servers up, order alternating
bracket:  none c1 c2 ..., K c1 c2 ... | K ..., none ... | ...  one server up, rounds mirrored

Beside, each category's own order alternates too, from cell to cell and from round to round: with an
even number of categories it would else always be the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from specmill.context import with_context
from specmill.files import digest
from specmill.params_bench import Bench
from specmill.samples import ALL, Sample


@dataclass(frozen=True)
class Run:
    """A server to measure."""

    role: str
    """`reference` or `method`; in curves, what is measured (specmill/curve_kinds.py)."""
    k: int | None
    """num_speculative_tokens; None without speculation."""
    phase: int
    speculative_config: dict[str, Any] | None

    @property
    def label(self) -> str:
        """Its name in logs and results."""
        return f"{self.role}_k{self.k or 0}"


@dataclass(frozen=True)
class Load:
    """How requests come: so many in flight, or so many per second."""

    concurrency: int | None = None
    """Closed loop: the next is sent when one has been answered."""
    rate: float | None = None
    """Open loop: mean arrivals per second of a Poisson process."""

    @property
    def label(self) -> str:
        """Its name in logs and metrics, `c8` or `r2.5`."""
        return f"r{self.rate:g}" if self.concurrency is None else f"c{self.concurrency}"


@dataclass(frozen=True)
class Cell:
    """One category under one load and context, with its prompts."""

    category: str
    load: Load
    context: int
    round: int
    number: int
    """Its place in the round, from 0."""
    prompts: tuple[Sample, ...]
    ids: tuple[list[int], ...]
    """What is sent: the prompts' token ids behind their context."""
    fresh: bool
    """False when an earlier request sent one of these prompts too: who remembers answers (suffix
    decoding) finds them again. The prefix cache does not: every request has a salt of its own."""

    @property
    def kind(self) -> tuple[Load, int, str]:
        """What it has in common with its other measurements."""
        return self.load, self.context, self.category

    @property
    def key(self) -> str:
        """Digest of what is sent and how."""
        place = [self.category, self.load.label, self.context, self.round, self.number]
        return digest([place, [list(ids) for ids in self.ids]])


def plan_phases(configs: dict[int, dict[str, Any] | None], reference: str) -> list[list[Run]]:
    """The servers of one bench stage.

    Args:
        configs: Speculative config by K, in the order measured; all None for `none`, which is
            compared with itself: what its interval says of two equal servers is what the bench
            can tell apart.
        reference: `bench.reference`.
    """
    speculating = {k: config for k, config in configs.items() if config is not None}
    measured: list[tuple[int | None, dict[str, Any] | None]] = [*speculating.items()]
    measured = measured or [(None, None)]
    groups = [[one] for one in measured] if reference == "beside" else [measured]
    return [
        [Run("reference", None, phase, None), *(Run("method", k, phase, c) for k, c in group)]
        for phase, group in enumerate(groups)
    ]


def plan_cells(samples: list[Sample], bench: Bench) -> list[list[Cell]]:
    """The cells of every round; each gets prompts of its own while there are enough.

    With one request in flight a cell is one request, so that both servers answer it within
    seconds; with more it has at least one full wave, so that its concurrency is reached. In an open
    loop it is a stream of all prompt types, long enough for a queue to form.

    Raises:
        ValueError: when there is no prompt.
    """
    if not samples:
        raise ValueError("there are no bench prompts (prepare.bench)")
    deck = _Deck(samples)
    rounds = []
    for number in range(bench.rounds):
        cells = []
        for place, (category, load, context, size) in enumerate(_round(bench, deck.categories)):
            picked, fresh = deck.draw(category, size)
            ids = tuple(with_context(one, samples, context) for one in picked)
            cells.append(Cell(category, load, context, number, place, picked, ids, fresh))
        rounds.append(cells)
    return rounds


def _round(bench: Bench, categories: list[str]) -> Iterator[tuple[str, Load, int, int]]:
    """Category, load, context and number of requests of every cell of a round."""
    for context in bench.context:
        for concurrency in bench.concurrency:
            for size in _sizes(bench.requests, concurrency):
                for category in categories:
                    yield category, Load(concurrency=concurrency), context, size
        for rate in bench.rates:
            for _ in range(bench.requests):
                yield ALL, Load(rate=rate), context, max(2, ceil(rate * bench.seconds))


class _Deck:
    """Bench prompts, dealt so that none is dealt twice while there are others."""

    def __init__(self, samples: list[Sample]):
        self._by_category: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_category.setdefault(sample.category, []).append(sample)
        self.categories = sorted(self._by_category)
        self._dealt = dict.fromkeys(self.categories, 0)

    def draw(self, category: str, size: int) -> tuple[tuple[Sample, ...], bool]:
        """Prompts of a category, of `all` in turn of every one; and whether all are fresh."""
        picked, fresh = [], True
        for i in range(size):
            kind = self.categories[i % len(self.categories)] if category == ALL else category
            prompts, dealt = self._by_category[kind], self._dealt[kind]
            picked.append(prompts[dealt % len(prompts)])
            fresh &= dealt < len(prompts)
            self._dealt[kind] += 1
        return tuple(picked), fresh


def _sizes(requests: int, concurrency: int) -> list[int]:
    """Requests of each cell of a category in one round."""
    return [1] * requests if concurrency == 1 else [max(requests, concurrency)]


def units(phase: list[Run], cells: list[Cell], beside: bool) -> Iterator[list[tuple[Run, Cell]]]:
    """One round of a phase in order; what must be measured without a pause stands together."""
    number = cells[0].round
    if beside:
        turns: dict[tuple[Load, int, str], int] = {}
        for cell in cells:
            turn = turns.get(cell.kind, cell.number + number)
            turns[cell.kind] = turn + 1
            pair = [(run, cell) for run in phase]
            yield pair[::-1] if turn % 2 else pair
    else:
        for run in phase[::-1] if number % 2 else phase:
            for cell in cells:
                yield [(run, cell)]


def warmup_prompts(samples: list[Sample], context: int, room: int) -> list[list[int]]:
    """Token ids to warm up with: recorded answers, behind the longest context.

    What follows a whole answer is in no cell's answer: a method that remembers what it answered
    (suffix) finds nothing of them there. All are cut to their last `room` tokens.
    """
    return [
        [*with_context(sample, samples, context)[:context], *sample.answer_token_ids][-room:]
        for sample in samples
        if sample.answer_token_ids
    ]


def check_room(rounds: list[list[Cell]], max_tokens: int, max_model_len: int) -> None:
    """Refuse a bench whose answers do not fit the context.

    Raises:
        ValueError: naming the parameters.
    """
    longest = max(len(ids) for cells in rounds for cell in cells for ids in cell.ids)
    if longest + max_tokens > max_model_len:
        raise ValueError(
            f"bench.max_tokens is {max_tokens} and the longest bench prompt with its context "
            f"(bench.context) has {longest} tokens, more than verifier.max_model_len "
            f"({max_model_len}) holds"
        )
