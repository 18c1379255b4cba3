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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specmill import compat
from specmill.acceptance import subtract
from specmill.client import Client, TimedAnswer, run_closed_loop
from specmill.files import digest, read_json, write_json
from specmill.params import Bench, Runtime
from specmill.plan import Cell, Run
from specmill.samples import ALL
from specmill.section import DoesNotFit
from specmill.server import EngineRefused, Server, serve
from specmill.summary import PLACE


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
    warmup: list[list[int]],
    bench: Bench,
    start_server: Callable[[Run], AbstractContextManager[Server]],
    cache: CellCache,
    timeout_s: float,
) -> list[dict[str, Any]]:
    """Measure every cell of every run, after a warm-up with the prompts `warmup`.

    Returns:
        One record per run: `role`, `k`, `round`, `engine` (facts) and `cells`, each with its
        counters and one record per request.

    Raises:
        DoesNotFit: when the engine gives up with the method after it has served the reference.
    """
    records: list[dict[str, Any]] = []
    for run in runs:
        missing = [cell for cell in cells if cache.get(run, cell) is None]
        if missing or cache.get(run, None) is None:
            try:
                with start_server(run) as server:
                    measuring = _measure_cells(
                        run, missing, warmup, bench, server, cache, timeout_s
                    )
                    asyncio.run(measuring)
                    facts = compat.engine_facts(server.log.read_text(errors="replace"))
                    cache.put(run, None, facts | {"startup_s": round(server.startup_s, 1)})
            except EngineRefused as error:
                if run.role == "reference" or not records:
                    raise
                raise DoesNotFit(f"vLLM does not start with it: {error.reason}") from error
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
    run: Run,
    cells: list[Cell],
    warmup: list[list[int]],
    bench: Bench,
    server: Server,
    cache: CellCache,
    timeout_s: float,
) -> None:
    sampling = {"temperature": 0.0, "max_tokens": bench.max_tokens}
    label = run.role if run.k is None else f"{run.role} K={run.k}"
    async with Client(server, timeout_s) as client:
        for concurrency in sorted({cell.concurrency for cell in cells}):
            await run_closed_loop(
                [warmup[i % len(warmup)] for i in range(bench.warmup_waves * concurrency)],
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


def not_served(reason: DoesNotFit, k: int, concurrencies: list[int]) -> dict[str, Any]:
    """What a row is when its method cannot serve this verifier: the reason, and no figures."""
    return {
        "num_speculative_tokens": k,
        "not_served": str(reason),
        "rows": [
            dict(zip(PLACE, (k, concurrency, ALL), strict=True)) for concurrency in concurrencies
        ],
        "engine": {},
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
