"""How much work params.yaml asks for: conversations, turns and tokens, before any is answered.

Answers are as long as they may be and every round of a bench is run, so the figures are upper
bounds. Of a local dataset the conversations are counted, those to train on and those to measure
with apart; where one is on the Hub, which is not downloaded here, as many as params.yaml allows are
taken, with contexts as long as the verifier's.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil

from specmill.conversations import Conversation
from specmill.params import Params
from specmill.params_data import Dataset
from specmill.prepare import pick_conversations
from specmill.prompts import pick_bench
from specmill.sources import read_conversations

Count = Callable[[str], int]
"""Tokens of a text."""


@dataclass(frozen=True)
class Turns:
    """Questions to be answered one after the other in their conversations."""

    number: int
    read_tokens: int
    """Of all their prompts, earlier turns included."""
    row_tokens: int
    """Of all rows of the samples: each prompt with its answer."""
    answer_tokens: int

    def __add__(self, other: "Turns") -> "Turns":
        return Turns(
            self.number + other.number,
            self.read_tokens + other.read_tokens,
            self.row_tokens + other.row_tokens,
            self.answer_tokens + other.answer_tokens,
        )


@dataclass(frozen=True)
class Workload:
    """What there is to answer, to keep and to measure."""

    training: Turns
    heldout: Turns
    bench: Turns
    num_categories: int
    """Prompt types of the bench."""
    bench_prompt_tokens: int
    """Of one bench prompt, on average."""

    @property
    def all(self) -> Turns:
        """Whatever is kept with its hidden states."""
        return self.training + self.heldout + self.bench


def workload(params: Params, count: Count) -> Workload:
    """Count what params.yaml asks for.

    Raises:
        ValueError: when a dataset cannot be read or is too small, or nothing says how much of one
            on the Hub is used.
    """
    chosen, longest = params.prepare, params.verifier.max_model_len
    if _is_on_hub(chosen.bench):
        number = len(chosen.bench) * chosen.bench_per_category
        bench, num_categories = _bound(number, longest, chosen.max_tokens), len(chosen.bench)
    else:
        readings = [read_conversations(one, chosen.max_rows) for one in chosen.bench]
        measured = pick_bench(readings, chosen.bench_per_category, chosen.seed)
        bench = _turns(measured, count, chosen.max_tokens, longest)
        num_categories = len({one.category for one in measured})
    if _is_on_hub((*chosen.dataset, *chosen.bench)):
        most = chosen.limit or chosen.max_rows
        if most is None:
            raise ValueError("prepare.limit and prepare.max_rows are both null: set one")
        training, heldout = (
            _bound(many, longest, chosen.max_tokens) for many in (most, chosen.heldout)
        )
    else:
        picked = pick_conversations(chosen)
        training, heldout = (
            _turns(found, count, chosen.max_tokens, longest)
            for found in (picked.training, picked.heldout)
        )
    mean = ceil(bench.read_tokens / bench.number)
    return Workload(training, heldout, bench, num_categories, mean)


def _is_on_hub(datasets: Iterable[Dataset]) -> bool:
    return any(one.source.startswith("hub:") for one in datasets)


def _bound(number: int, longest: int, answer: int) -> Turns:
    return Turns(number, number * (longest - answer), number * longest, number * answer)


def _turns(found: Iterable[Conversation], count: Count, answer: int, longest: int) -> Turns:
    number = read = rows = 0
    for conversation in found:
        before = 0
        for exchange in conversation.exchanges:
            before += sum(count(str(message["content"])) for message in exchange.messages)
            number += 1
            read += min(before, longest)
            before += answer
            rows += min(before, longest)
    return Turns(number, read, rows, number * answer)


@dataclass(frozen=True)
class BenchCell:
    """Cells of one kind of load, over all rounds."""

    in_flight: int
    waves: int
    """Times that so many requests are answered together."""
    seconds: float
    """Of an open loop, whose length is set; 0 of a closed one."""


def bench_cells(params: Params, num_categories: int) -> list[BenchCell]:
    """What a bench sends to one server at most (specmill/plan.py says how cells are made)."""
    bench, found = params.bench, []
    for concurrency in bench.concurrency:
        waves = bench.requests if concurrency == 1 else ceil(bench.requests / concurrency)
        times = bench.rounds * len(bench.context) * num_categories
        found.append(BenchCell(concurrency, waves * times, 0.0))
    for _ in bench.rates:
        seconds = bench.rounds * len(bench.context) * bench.requests * bench.seconds
        found.append(BenchCell(0, 0, seconds))
    return found


def bench_starts(params: Params, lengths: int) -> int:
    """Engine starts of one bench stage (as `specmill.pace.describe` counts them).

    Args:
        params: Of params.yaml.
        lengths: Number of K that it measures; 1 without speculation.
    """
    if params.bench.reference == "beside":
        return 1 + lengths
    return 1 + lengths * params.bench.rounds + params.bench.rounds % 2
