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
from typing import Any

from specmill.context import with_context
from specmill.files import digest
from specmill.params_bench import Bench
from specmill.samples import Sample


@dataclass(frozen=True)
class Run:
    """A server to measure."""

    role: str
    """`reference` or `method`."""
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
    seconds; otherwise it has at least one full wave, so that its concurrency is reached.
    """
    by_category: dict[str, list[Sample]] = {}
    for sample in samples:
        by_category.setdefault(sample.category, []).append(sample)
    loads = [Load(concurrency=c) for c in bench.concurrency] + [Load(rate=r) for r in bench.rates]
    rounds, used = [], 0
    for number in range(bench.rounds):
        cells: list[Cell] = []
        for load in loads:
            for context in bench.context:
                for size in _sizes(bench, load):
                    for category, prompts in sorted(by_category.items()):
                        picked = tuple(prompts[(used + i) % len(prompts)] for i in range(size))
                        ids = tuple(with_context(one, samples, context) for one in picked)
                        fresh = used + size <= len(prompts)
                        cells.append(
                            Cell(category, load, context, number, len(cells), picked, ids, fresh)
                        )
                    used += size
        rounds.append(cells)
    return rounds


def _sizes(bench: Bench, load: Load) -> list[int]:
    """Requests of each cell of a category in one round."""
    if load.concurrency == 1:
        return [1] * bench.requests
    return [max(bench.requests, load.concurrency or 0)]


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


def warmup_prompts(samples: list[Sample], rounds: list[list[Cell]]) -> list[list[int]]:
    """Token ids to warm up with: bench prompts that no cell sends, or else those of the first.

    A method that remembers answers (suffix) would find the cells' own there. Without their first
    token they share no prefix with a measured prompt.
    """
    sent = {prompt.sample_key for cells in rounds for cell in cells for prompt in cell.prompts}
    spare = [sample for sample in samples if sample.sample_key not in sent]
    return [sample.prompt_token_ids[1:] for sample in spare or samples[:8]]


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
