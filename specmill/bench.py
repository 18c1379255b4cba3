"""Measure a served verifier cell by cell, each method beside its own `none` reference.

A cell is one category at one concurrency: a closed loop over prompts that no other cell uses, so
that no prefix is cached when it is sent. A speculating method starts its own reference server
first (order none, method; a second round mirrors it), with the same flags and prompts, and all its
ratios are to that reference. Finished cells are kept until the stage ends well.
"""

import asyncio
import json
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specmill import compat
from specmill.acceptance import subtract
from specmill.client import Client, TimedAnswer, run_closed_loop
from specmill.files import digest, read_json, write_json
from specmill.params import Bench, Runtime
from specmill.samples import Sample
from specmill.server import Server, serve


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


class CellCache:
    """Finished cells of an interrupted stage, keyed by everything that shapes them."""

    def __init__(self, folder: Path, inputs: dict[str, Any]):
        self._folder = folder
        self._inputs = inputs

    def _path(self, run: Run, cell: Cell | None) -> Path:
        parts = {
            "inputs": self._inputs,
            "run": asdict(run),
            "cell": cell
            and [cell.category, cell.concurrency, [sample.sample_key for sample in cell.prompts]],
        }
        return self._folder / f"{digest(parts)}.json"

    def get(self, run: Run, cell: Cell | None) -> dict[str, Any] | None:
        """A finished cell, or with None the engine facts of a finished run."""
        path = self._path(run, cell)
        return read_json(path) if path.is_file() else None

    def put(self, run: Run, cell: Cell | None, result: dict[str, Any]) -> None:
        """Keep a result."""
        write_json(self._path(run, cell), result)

    def clear(self, runs: list[Run], cells: list[Cell]) -> None:
        """Forget this stage's results: it ended well, and the next execution measures again."""
        for run in runs:
            for cell in (None, *cells):
                self._path(run, cell).unlink(missing_ok=True)


def server_starter(
    name: str, model: Path, verifier: dict[str, Any], bench: Bench, runtime: Runtime, logs: Path
) -> Callable[[Run], AbstractContextManager[Server]]:
    """A function that starts the server of a run, with the flags every method shares."""
    flags = ["--max-model-len", str(verifier["max_model_len"])]
    if bench.enforce_eager:
        flags.append("--enforce-eager")

    def start(run: Run) -> AbstractContextManager[Server]:
        speculation = (
            ["--speculative-config", json.dumps(run.speculative_config)]
            if run.speculative_config
            else []
        )
        return serve(
            model,
            flags + speculation,
            logs / f"bench-{name}-{run.role}-k{run.k or 0}-round{run.round}.log",
            cpu_kv_cache_gib=runtime.cpu_kv_cache_gib,
            gpu_memory_utilization=runtime.gpu_memory_utilization,
            startup_timeout_s=runtime.startup_timeout_s,
            label=f"{name} {run.role}" + (f" K={run.k}" if run.k else ""),
        )

    return start


def measure(
    runs: list[Run],
    cells: list[Cell],
    bench: Bench,
    start_server: Callable[[Run], AbstractContextManager[Server]],
    cache: CellCache,
    timeout_s: float,
) -> list[dict[str, Any]]:
    """Measure every cell of every run.

    Returns:
        One record per run: `role`, `k`, `round`, `engine` (facts) and `cells`, each with its
        counters and one record per request.
    """
    records = []
    for run in runs:
        missing = [cell for cell in cells if cache.get(run, cell) is None]
        if missing or cache.get(run, None) is None:
            with start_server(run) as server:
                asyncio.run(_measure_cells(run, missing, bench, server, cache, timeout_s))
                facts = compat.engine_facts(server.log.read_text(errors="replace"))
                cache.put(run, None, facts | {"startup_s": round(server.startup_s, 1)})
        records.append(
            {
                "role": run.role,
                "k": run.k,
                "round": run.round,
                "engine": cache.get(run, None),
                "cells": [cache.get(run, cell) for cell in cells],
            }
        )
    return records


async def _measure_cells(
    run: Run, cells: list[Cell], bench: Bench, server: Server, cache: CellCache, timeout_s: float
) -> None:
    sampling = {"temperature": 0.0, "max_tokens": bench.max_tokens}
    label = run.role if run.k is None else f"{run.role} K={run.k}"
    async with Client(server, timeout_s) as client:
        for concurrency in sorted({cell.concurrency for cell in cells}):
            # without their first token these prompts share no prefix with a measured one
            warm = [sample.prompt_token_ids[1:] for sample in cells[0].prompts]
            await run_closed_loop(
                [warm[i % len(warm)] for i in range(bench.warmup_waves * concurrency)],
                lambda ids: client.complete_timed(ids, sampling),
                concurrency,
            )
        for cell in tqdm(cells, desc=f"cells ({label})"):
            before = await client.counters()
            answers = await run_closed_loop(
                cell.prompts,
                lambda sample: client.complete_timed(sample.prompt_token_ids, sampling),
                cell.concurrency,
            )
            counts = subtract(await client.counters(), before)
            cache.put(run, cell, _cell_record(cell, answers, counts))


EXECUTION = secrets.token_hex(4)
"""Tells this execution of a stage from an earlier one whose cells it goes on from."""


def _cell_record(cell: Cell, answers: list[TimedAnswer], counts: dict[str, int]) -> dict[str, Any]:
    start = min(answer.sent_at for answer in answers)
    return {
        "category": cell.category,
        "concurrency": cell.concurrency,
        "fresh_prompts": cell.fresh,
        "execution": EXECUTION,
        "wall_s": max(answer.chunk_times[-1] for answer in answers) - start,
        "counters": counts,
        "requests": [
            {
                "sample_key": sample.sample_key,
                "num_prompt_tokens": len(sample.prompt_token_ids),
                "output_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                "sent_s": round(answer.sent_at - start, 6),
                "chunk_s": [round(at - start, 6) for at in answer.chunk_times],
                "chunk_tokens": answer.chunk_sizes,
            }
            for sample, answer in zip(cell.prompts, answers, strict=True)
        ],
    }


def engine_rows(records: list[dict[str, Any]]) -> dict[str, Any]:
    """How the engine of every run ran, by role, K and round."""
    return {
        f"{record['role']}_k{record['k'] or 0}_round{record['round']}": record["engine"]
        for record in records
    }


def write_raw(path: Path, method: str, records: list[dict[str, Any]]) -> None:
    """Write one JSON line per request: method, K, role, round, cell, times and output ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        for record in records:
            for cell in record["cells"]:
                for request in cell["requests"]:
                    line = {
                        "method": method,
                        **{name: record[name] for name in ("role", "k", "round")},
                        **{name: cell[name] for name in ("category", "concurrency")},
                        **request,
                    }
                    out.write(json.dumps(line) + "\n")
