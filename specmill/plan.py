"""What a bench measures, in order: servers to start, and cells of prompts to send to each."""

from dataclasses import dataclass
from typing import Any

from specmill.params import Bench
from specmill.samples import Sample


@dataclass(frozen=True)
class Run:
    """One server to start and measure."""

    role: str
    """`reference` or `method`."""
    k: int | None
    """num_speculative_tokens; None without speculation."""
    round: int
    speculative_config: dict[str, Any] | None


@dataclass(frozen=True)
class Cell:
    """One category at one concurrency, with its prompts."""

    category: str
    concurrency: int
    prompts: tuple[Sample, ...]
    fresh: bool
    """False when an earlier cell sent some of these prompts too: prefixes may be cached."""


def plan_runs(configs: dict[int, dict[str, Any] | None], rounds: int) -> list[Run]:
    """The servers of one bench stage, in order.

    Args:
        configs: Speculative config by K, in the order measured; all None for `none`, which is its
            own reference.
        rounds: 1, or 2 for a mirrored second pass.
    """
    speculating = {k: config for k, config in configs.items() if config is not None}
    if not speculating:
        return [Run("method", None, index, None) for index in range(rounds)]
    first = [Run("reference", None, 0, None)]
    first += [Run("method", k, 0, config) for k, config in speculating.items()]
    if rounds == 1:
        return first
    return first + [Run(run.role, run.k, 1, run.speculative_config) for run in reversed(first)]


def plan_cells(samples: list[Sample], bench: Bench) -> list[Cell]:
    """Split the bench prompts into cells; each gets prompts of its own while there are enough.

    Every cell has at least one full wave, so that its concurrency is reached.
    """
    by_category: dict[str, list[Sample]] = {}
    for sample in samples:
        by_category.setdefault(sample.category, []).append(sample)
    cells = []
    used = 0
    for concurrency in bench.concurrency:
        wanted = max(bench.requests, concurrency)
        for category, prompts in sorted(by_category.items()):
            picked = tuple(prompts[(used + i) % len(prompts)] for i in range(wanted))
            cells.append(Cell(category, concurrency, picked, used + wanted <= len(prompts)))
        used += wanted
    return cells


def warmup_prompts(samples: list[Sample], cells: list[Cell]) -> list[list[int]]:
    """Token ids to warm up with: bench prompts that no cell sends, or else those of the first.

    A method that remembers answers (suffix) would find the cells' own there. Without their first
    token they share no prefix with a measured prompt.
    """
    sent = {prompt.sample_key for cell in cells for prompt in cell.prompts}
    spare = [sample for sample in samples if sample.sample_key not in sent]
    return [sample.prompt_token_ids[1:] for sample in spare or cells[0].prompts]


def check_room(cells: list[Cell], max_tokens: int, max_model_len: int) -> None:
    """Refuse a bench whose answers do not fit the context.

    Raises:
        ValueError: naming the parameter.
    """
    longest = max(len(prompt.prompt_token_ids) for cell in cells for prompt in cell.prompts)
    if longest + max_tokens > max_model_len:
        raise ValueError(
            f"bench.max_tokens is {max_tokens} and the longest bench prompt has {longest} tokens, "
            f"more than verifier.max_model_len ({max_model_len}) holds"
        )
