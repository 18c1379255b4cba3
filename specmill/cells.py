"""Send one cell to a server and write down what came back, after the server has warmed up.

A cell's record holds where it belongs (`role`, `k`, `phase`, `round`, `number`, `concurrency`,
`rate`, `context`, `category`), how it was measured (`server`, `side_by_side`, `fresh_prompts`,
`execution`, `started_at`, `load_1m`), `wall_s` from the first request sent to the last chunk,
`counters` (what the engine's counters gained) and `requests`, in seconds since the first was sent.
"""

import os
import secrets
from datetime import UTC, datetime
from typing import Any

from specmill.acceptance import acceptance, subtract
from specmill.arrivals import run_open_loop
from specmill.client import Client, TimedAnswer, run_closed_loop
from specmill.plan import Cell, Load, Run
from specmill.server import Server

EXECUTION = secrets.token_hex(4)
"""Tells this execution of a stage from an earlier one whose cells it goes on from."""

_STEADY = 0.1
_MOST_WAVES = 6


async def measure_cell(
    server: Server,
    timeout_s: float,
    run: Run,
    cell: Cell,
    name: str,
    side_by_side: bool,
    max_tokens: int,
) -> dict[str, Any]:
    """Answer a cell's prompts greedily and record it.

    Every request carries a salt of its own, under which the engine's prefix cache holds nothing
    yet: neither an earlier round's or load's prompts nor a neighbour's chat template are found.

    Raises:
        ValueError: when the engine's counters of drafts are missing or contradict each other.
    """
    sampling = {"temperature": 0.0, "max_tokens": max_tokens}
    salt = f"{EXECUTION}-{run.phase}-{cell.round}-{cell.number}"
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    async with Client(server, timeout_s) as client:
        before = await client.counters()
        answers = await _answer(client, cell, sampling, salt)
        counts = subtract(await client.counters(), before)
    if run.k is not None:
        acceptance(counts, run.k)  # before the cell is kept: it would stop every further try
    start = min(answer.sent_at for answer in answers)
    return {
        "role": run.role,
        "k": run.k,
        "phase": run.phase,
        "round": cell.round,
        "number": cell.number,
        "concurrency": cell.load.concurrency,
        "rate": cell.load.rate,
        "context": cell.context,
        "category": cell.category,
        "server": name,
        "side_by_side": side_by_side,
        "fresh_prompts": cell.fresh,
        "execution": EXECUTION,
        "started_at": started_at,
        "load_1m": round(os.getloadavg()[0], 2),
        "wall_s": max(answer.chunk_times[-1] for answer in answers) - start,
        "counters": counts,
        "requests": _requests(cell, answers, start),
    }


def _requests(cell: Cell, answers: list[TimedAnswer], start: float) -> list[dict[str, Any]]:
    return [
        {
            "sample_key": sample.sample_key,
            "num_prompt_tokens": len(ids),
            "output_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "sent_s": round(answer.sent_at - start, 6),
            "chunk_s": [round(at - start, 6) for at in answer.chunk_times],
            "chunk_tokens": answer.chunk_sizes,
        }
        for sample, ids, answer in zip(cell.prompts, cell.ids, answers, strict=True)
    ]


async def _answer(
    client: Client, cell: Cell, sampling: dict[str, Any], salt: str
) -> list[TimedAnswer]:
    async def complete(index: int) -> TimedAnswer:
        salted = sampling | {"cache_salt": f"{salt}-{index}"}
        return await client.complete_timed(cell.ids[index], salted)

    indices = range(len(cell.ids))
    if cell.load.concurrency is not None:
        return await run_closed_loop(indices, complete, cell.load.concurrency)
    if cell.load.rate is None:
        raise ValueError(f"a load of neither requests in flight nor per second: {cell.load}")
    return await run_open_loop(indices, complete, cell.load.rate, seed=(cell.round, cell.number))


async def warm_up(
    client: Client, prompts: list[list[int]], concurrencies: list[int], max_tokens: int
) -> dict[str, int]:
    """Send waves of prompts at each concurrency until two in a row are equally fast.

    The first requests compile, capture graphs and fill caches. Equally fast is within 10%; after
    six waves the machine is not going to settle.

    Returns:
        Waves sent, by load label.
    """
    sampling = {"temperature": 0.0, "max_tokens": max_tokens}
    sent: dict[str, int] = {}
    for concurrency in concurrencies:
        speeds: list[float] = []
        while len(speeds) < 2 or abs(speeds[-1] / speeds[-2] - 1) > _STEADY:
            if len(speeds) == _MOST_WAVES:
                break
            first = len(speeds) * concurrency
            wave = [prompts[(first + i) % len(prompts)] for i in range(concurrency)]
            answers = await run_closed_loop(
                wave, lambda ids: client.complete_timed(ids, sampling), concurrency
            )
            start = min(answer.sent_at for answer in answers)
            end = max(answer.chunk_times[-1] for answer in answers)
            speeds.append(sum(len(answer.token_ids) for answer in answers) / (end - start))
        sent[Load(concurrency).label] = len(speeds)
    return sent
