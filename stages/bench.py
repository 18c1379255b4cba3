"""Serve the verifier with one method and measure it beside its own reference.

Reads    data/prepared/bench.parquet    prompts by category, as token ids
         models/verifier, reports/hardware.json, the method's head
Writes   data/bench/NAME.jsonl          one line per request: times and output ids
Plots    reports/bench/NAME.json        rows by K, concurrency and category; engine facts; or why
                                        the method cannot serve this verifier
Params   bench, methods.NAME, and spec for a speculating method

Run      dvc repro bench@NAME           (python -m stages.bench NAME)
"""

import sys
from pathlib import Path

from specmill import paths
from specmill.bench import (
    CellCache,
    engine_rows,
    measure,
    not_served,
    server_starter,
    write_raw,
)
from specmill.files import read_json, tree_digest
from specmill.head_facts import head_facts
from specmill.methods import speculative_configs
from specmill.plan import check_room, plan_cells, plan_runs, warmup_prompts
from specmill.samples import read_samples
from specmill.section import DoesNotFit, entry
from specmill.stage import open_stage
from specmill.summary import by_name, headline_k, summarise, without_empty_lists
from specmill.verifier import model_path


def main(name: str) -> None:
    """Run the stage for the entry `name` of `methods`."""
    with open_stage(f"bench@{name}", ["bench"], measures=True) as stage:
        bench, spec, runtime = stage.params.bench, stage.params.spec, stage.params.runtime
        method = entry("methods", stage.params.methods, name)
        stage.log_section(method.section)
        verifier, head = read_json(paths.IDENTITY), Path(method.head)
        ks = list(dict.fromkeys([spec.tokens, *spec.sweep]))
        about = {"method": name, "served_by": method.method, "head": head_facts(head, verifier)}
        prompts = read_samples(paths.PREPARED / "bench.parquet")
        cells = plan_cells(prompts, bench)
        check_room(cells, bench.max_tokens, verifier["max_model_len"])
        inputs = {
            "method": method.model_dump(),
            "head": tree_digest(head),
            "verifier": verifier,
            "bench": bench.model_dump(),
            "hardware": read_json(paths.HARDWARE),
        }
        cache = CellCache(paths.CACHE / "bench_cells", inputs)
        start_server = server_starter(
            name, model_path(paths.VERIFIER), verifier, bench, runtime, paths.ROOT / "logs"
        )
        try:
            runs = plan_runs(speculative_configs(name, method, ks, verifier), bench.rounds)
            warmup = warmup_prompts(prompts, cells)
            records = measure(
                runs, cells, warmup, bench, start_server, cache, runtime.request_timeout_s
            )
        except DoesNotFit as reason:
            write_raw(paths.BENCH_RAW / f"{name}.jsonl", name, [])
            stage.write_metrics(
                paths.BENCH / f"{name}.json", about | not_served(reason, ks[0], bench.concurrency)
            )
            return
        write_raw(paths.BENCH_RAW / f"{name}.jsonl", name, records)
        rows, headline = summarise(records), headline_k(records)
        stage.write_metrics(
            paths.BENCH / f"{name}.json",
            about
            | {
                "num_speculative_tokens": headline,
                "rows": rows,
                "engine": without_empty_lists(engine_rows(records)),
            },
        )
        # by name, for MLflow does not know rows; without K, so that every method has these columns
        stage.tracker.log_metrics(by_name(rows, headline))
        cache.clear(runs, cells)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stages.bench NAME (an entry of params.yaml: methods)")
    main(sys.argv[1])
