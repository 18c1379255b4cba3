"""Measure a served verifier cell by cell, each method beside its own `none` reference.

Rounds are added until the answer is precise enough or `bench.rounds` is reached; finished cells are
kept until the stage ends well, so that an interrupted stage goes on where it was.
"""

import asyncio
import logging
from typing import Any

from tqdm import tqdm

from specmill.cells import measure_cell
from specmill.fleet import Fleet, Refused
from specmill.lossless import find_divergences
from specmill.pairs import pair_up
from specmill.params_bench import Bench
from specmill.plan import Cell, Run, units
from specmill.recording import CellCache, Recording
from specmill.rows import PLACE
from specmill.samples import ALL
from specmill.section import DoesNotFit
from specmill.summary import summarise

logger = logging.getLogger(__name__)

_LEAST_ROUNDS = 2
"""One round says nothing of what another would."""


def measure(
    phases: list[list[Run]],
    rounds: list[list[Cell]],
    bench: Bench,
    fleet: Fleet,
    cache: CellCache,
) -> Recording:
    """Measure every phase, round by round, and compare the outputs.

    A K that the engine does not start with is left out of its phase.

    Raises:
        DoesNotFit: when the engine starts with no K, though it has served the reference.
    """
    recording = Recording()
    for phase in phases:
        cells = _measure_served(phase, rounds, bench, fleet, cache, recording.refused)
        recording.cells += cells
        recording.divergences += _compare(phase[0], cells, rounds, fleet)
    if not recording.cells:
        raise DoesNotFit(next(iter(recording.refused.values())))
    recording.servers = fleet.facts
    return recording


def _measure_served(
    phase: list[Run],
    rounds: list[list[Cell]],
    bench: Bench,
    fleet: Fleet,
    cache: CellCache,
    refused: dict[str, str],
) -> list[dict[str, Any]]:
    """Measure what the engine starts with; what it does not is added to `refused`."""
    while len(phase) > 1:
        try:
            return _measure_phase(phase, rounds, bench, fleet, cache)
        except Refused as reason:
            refused[str(reason.k)] = str(reason)
            phase = [run for run in phase if run.role == "reference" or run.k != reason.k]
    return []


def _measure_phase(
    phase: list[Run], rounds: list[list[Cell]], bench: Bench, fleet: Fleet, cache: CellCache
) -> list[dict[str, Any]]:
    beside = bench.reference == "beside"
    measured: list[dict[str, Any]] = []
    for number, cells in enumerate(rounds):
        for unit in tqdm(
            list(units(phase, cells, beside)), desc=f"round {number + 1} of up to {len(rounds)}"
        ):
            records = cache.get(unit)
            if records is None:
                records = _measure_unit(unit, phase, bench, fleet)
                cache.put_servers(fleet.facts)  # before what these servers measured
                cache.put(unit, records)
            measured += records
        if number + 1 >= _LEAST_ROUNDS and precise_enough(measured, bench):
            break
    return measured


def _measure_unit(
    unit: list[tuple[Run, Cell]], phase: list[Run], bench: Bench, fleet: Fleet
) -> list[dict[str, Any]]:
    beside = bench.reference == "beside"
    fleet.keep(phase if beside else [run for run, _ in unit])
    records = []
    for run, cell in unit:
        name, server = fleet.server(run)
        measuring = measure_cell(server, fleet.timeout_s, run, cell, name, beside, bench.max_tokens)
        records.append(asyncio.run(measuring))
    return records


def precise_enough(cells: list[dict[str, Any]], bench: Bench) -> bool:
    """Whether the interval over all prompt types is narrow enough at every load, context and K."""
    for row in summarise(Recording(cells), bench):
        if row["category"] == ALL:
            if row["speedup_low"] is None:
                return False
            if row["speedup_high"] - row["speedup_low"] > bench.precision:
                return False
    return True


def _compare(
    reference: Run, measured: list[dict[str, Any]], rounds: list[list[Cell]], fleet: Fleet
) -> list[dict[str, Any]]:
    """Where outputs differ, asked of the reference, which is started if need be."""
    pairs = [pair for pair in pair_up(measured) if not pair.is_identical]
    if not pairs:
        return []
    sent = {(cell.round, cell.number): cell for cells in rounds for cell in cells}
    fleet.keep([reference])
    _, server = fleet.server(reference)
    return asyncio.run(find_divergences(pairs, sent, server, fleet.timeout_s))


def not_served(reason: DoesNotFit, k: int, bench: Bench) -> dict[str, Any]:
    """What a result is when its method cannot serve this verifier: the reason, and no figures."""
    return {
        "num_speculative_tokens": k,
        "not_served": str(reason),
        "rows": empty_rows(k, bench),
        "engine": {},
    }


def empty_rows(k: int, bench: Bench) -> list[dict[str, Any]]:
    """Rows of a K without figures."""
    loads: list[tuple[int | None, float | None]] = [(c, None) for c in bench.concurrency]
    loads += [(None, rate) for rate in bench.rates]
    return [
        # DVC plots a list only when its rows have the field
        dict(zip(PLACE, (k, *load, context, ALL), strict=True)) | {"output_tokens_per_s": None}
        for load in loads
        for context in bench.context
    ]
