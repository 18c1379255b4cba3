"""Serve the verifier with one method and measure it beside its own reference.

Reads    data/prepared/bench.parquet    prompts by category, as token ids
         models/verifier, reports/hardware.json, the method's head
Writes   data/bench/NAME/               requests.parquet (one row each), cells.json: all that tables
                                        are made of
Plots    reports/bench/NAME.json        rows by K, load, context and category; engine facts; or why
                                        the method cannot serve this verifier
Params   bench, methods.NAME, and spec for a speculating method

Run      dvc repro bench@NAME           (python -m stages.bench NAME)
"""

import logging
import sys
from pathlib import Path
from typing import Any

import psutil

from specmill import compat, paths
from specmill.bench import empty_rows, measure, not_served
from specmill.files import read_json, tree_digest
from specmill.fleet import Fleet, server_starter
from specmill.head_facts import head_facts
from specmill.methods import speculative_configs
from specmill.pace import Pace, describe
from specmill.plan import check_room, plan_cells, plan_phases, warmup_prompts
from specmill.recording import CellCache, Recording
from specmill.revision import code_state
from specmill.samples import read_samples
from specmill.section import DoesNotFit, entry
from specmill.stage import Stage, open_stage
from specmill.summary import by_name, same_fields, summarise, without_empty_lists
from specmill.verifier import model_path

logger = logging.getLogger("specmill.stages.bench")


def main(name: str) -> None:
    """Run the stage for the entry `name` of `methods`."""
    with open_stage(f"bench@{name}", ["bench"], measures=True) as stage:
        bench, spec, runtime = stage.params.bench, stage.params.spec, stage.params.runtime
        method = entry("methods", stage.params.methods, name)
        stage.log_section(method.section)
        verifier, head = read_json(paths.IDENTITY), Path(method.head)
        ks = list(dict.fromkeys([spec.tokens, *spec.sweep]))
        raw, result = paths.BENCH_RAW / name, paths.BENCH / f"{name}.json"
        about = {
            "method": name,
            "served_by": method.method,
            "head": head_facts(head, verifier),
            "provenance": _provenance(stage),
        }
        prompts = read_samples(paths.PREPARED / "bench.parquet")
        rounds = plan_cells(prompts, bench)
        check_room(rounds, bench.max_tokens, verifier["max_model_len"])
        inputs = {
            "method": method.model_dump(),
            "head": tree_digest(head),
            "verifier": verifier,
            "bench": bench.model_dump(),
            "hardware": read_json(paths.HARDWARE),
            # no stage depends on these, but an engine with less room may preempt requests
            "memory": [runtime.cpu_kv_cache_gib, runtime.gpu_memory_utilization],
        }
        cache = CellCache(paths.CACHE / "bench_cells", inputs)
        start = server_starter(
            name, model_path(paths.VERIFIER), verifier, bench, runtime, paths.ROOT / "logs"
        )
        pace = Pace(paths.CACHE / "bench_pace.json", verifier, inputs["hardware"])
        beside = bench.reference == "beside"
        room = verifier["max_model_len"] - bench.max_tokens
        warmup = warmup_prompts(prompts, max(bench.context), room)
        try:
            configs = speculative_configs(name, method, ks, verifier)
            phases = plan_phases(configs, bench.reference)
            logger.info("%s", describe(phases, rounds, beside, bench.max_tokens, pace))
            with Fleet(start, warmup, bench, runtime.request_timeout_s, cache.servers()) as fleet:
                recording = measure(phases, rounds, bench, fleet, cache)
        except DoesNotFit as reason:
            Recording().write(raw, name)
            stage.write_metrics(result, about | not_served(reason, ks[0], bench))
            return
        recording.write(raw, name)
        pace.remember(recording)
        rows = summarise(Recording.read(raw), bench)
        rows += [row for k in recording.refused for row in empty_rows(int(k), bench)]
        headline = ks[0] if any(configs.values()) else 0
        found = {
            "num_speculative_tokens": headline,
            "rows": same_fields(rows),
            "engine": without_empty_lists(recording.servers),
            "refused": recording.refused,
        }
        stage.write_metrics(result, about | found)
        # by name, for MLflow does not know rows; without K, so that every method has these columns
        stage.tracker.log_metrics(by_name(rows, headline))
        cache.clear()


def _provenance(stage: Stage) -> dict[str, Any]:
    return code_state() | {
        "versions": compat.engine_versions(),
        "reference": stage.params.bench.reference,
        "waited_s": stage.waited_s,
        "busy_cores_before": round(psutil.cpu_percent(1.0) / 100 * psutil.cpu_count(), 2),
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stages.bench NAME (an entry of params.yaml: methods)")
    main(sys.argv[1])
