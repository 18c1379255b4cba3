"""What a stage does that measures a row of the comparison beside its reference."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from specmill import compat, paths
from specmill.bench import empty_rows, measure, not_served
from specmill.files import read_json, tree_digest
from specmill.fleet import Fleet, server_starter
from specmill.head_facts import head_facts
from specmill.pace import Pace, describe
from specmill.params import Method
from specmill.plan import check_room, plan_cells, plan_phases, warmup_prompts
from specmill.recording import CellCache, Recording
from specmill.revision import code_state
from specmill.samples import read_samples
from specmill.section import DoesNotFit
from specmill.stage import Stage
from specmill.summary import by_name, same_fields, summarise, without_empty_lists
from specmill.verifier import model_path

logger = logging.getLogger(__name__)

Configs = dict[int, dict[str, Any] | None]
"""What vLLM is told, by K, the headline first; None without speculation."""


def measure_row(
    stage: Stage,
    name: str,
    method: Method,
    configure: Callable[[dict[str, Any]], Configs],
    headline: int,
    about: dict[str, Any],
) -> None:
    """Serve a row cell by cell and write data/bench/NAME and reports/bench/NAME.json.

    Args:
        stage: The running stage, which has the machine alone.
        name: The row.
        method: How it is served.
        configure: Makes the speculative configs from the verifier's identity; may raise DoesNotFit,
            and the row then says why instead of figures.
        headline: K of the row in that case.
        about: What its JSON says besides, which shapes the measurement too.
    """
    bench, verifier, head = stage.params.bench, read_json(paths.IDENTITY), Path(method.head)
    raw, result = paths.BENCH_RAW / name, paths.BENCH / f"{name}.json"
    inputs = {"method": method.model_dump(), "head": tree_digest(head), "verifier": verifier}
    cache = _cache(stage, inputs | about)
    about = about | {
        "method": name,
        "served_by": method.method,
        "head": head_facts(head, verifier),
        "provenance": _provenance(stage),
    }
    try:
        configs = configure(verifier)
        recording = _measure(stage, name, configs, verifier, cache)
    except DoesNotFit as reason:
        Recording().write(raw, name)
        stage.write_metrics(result, about | not_served(reason, headline, bench))
        return
    recording.write(raw, name)
    rows = summarise(Recording.read(raw), bench)
    rows += [row for k in recording.refused for row in empty_rows(int(k), bench)]
    first = next(iter(configs)) if any(configs.values()) else 0
    found = {
        "num_speculative_tokens": first,
        "rows": same_fields(rows),
        "engine": without_empty_lists(recording.servers),
        "refused": recording.refused,
    }
    stage.write_metrics(result, about | found)
    # by name, for MLflow does not know rows; without K, so that every method has these columns
    stage.tracker.log_metrics(by_name(rows, first))
    cache.clear()


def _measure(
    stage: Stage, name: str, configs: Configs, verifier: dict[str, Any], cache: CellCache
) -> Recording:
    bench, runtime = stage.params.bench, stage.params.runtime
    prompts = read_samples(paths.PREPARED / "bench.parquet")
    rounds = plan_cells(prompts, bench)
    check_room(rounds, bench.max_tokens, verifier["max_model_len"])
    phases = plan_phases(configs, bench.reference)
    pace = Pace(paths.CACHE / "bench_pace.json", verifier, read_json(paths.HARDWARE))
    beside = bench.reference == "beside"
    logger.info("%s", describe(phases, rounds, beside, bench.max_tokens, pace))
    start = server_starter(
        name,
        model_path(paths.VERIFIER),
        verifier,
        bench,
        stage.params.parallel,
        runtime,
        paths.ROOT / "logs",
    )
    room = verifier["max_model_len"] - bench.max_tokens
    warmup = warmup_prompts(prompts, max(bench.context), room)
    with Fleet(start, warmup, bench, runtime.request_timeout_s, cache.servers()) as fleet:
        recording = measure(phases, rounds, bench, fleet, cache)
    pace.remember(recording)
    return recording


def _cache(stage: Stage, inputs: dict[str, Any]) -> CellCache:
    """Finished cells of an interrupted run of these inputs on this machine."""
    runtime = stage.params.runtime
    machine = {
        "bench": stage.params.bench.model_dump(),
        "parallel": stage.params.parallel.model_dump(),
        "hardware": read_json(paths.HARDWARE),
        # no stage depends on these, but an engine with less room may preempt requests
        "memory": [runtime.cpu_kv_cache_gib, runtime.gpu_memory_utilization],
    }
    return CellCache(paths.CACHE / "bench_cells", inputs | machine)


def _provenance(stage: Stage) -> dict[str, Any]:
    return code_state() | {
        "versions": compat.engine_versions(),
        "reference": stage.params.bench.reference,
        "parallel": stage.params.parallel.model_dump(),
        "waited_s": stage.waited_s,
        "busy_cores_before": round(psutil.cpu_percent(1.0) / 100 * psutil.cpu_count(), 2),
    }
