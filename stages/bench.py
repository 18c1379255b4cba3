"""Serve the verifier with one method and measure it beside its own reference.

Reads    data/prepared/bench.parquet    prompts by category, as token ids
         models/verifier, reports/hardware.json, the method's head
Writes   data/bench/NAME.jsonl          one line per request: times and output ids
Plots    reports/bench/NAME.json        rows by K, concurrency and category; engine facts
Params   bench, methods, and spec for a speculating method

Run      dvc repro bench@NAME           (python -m stages.bench NAME)
"""

import sys
from pathlib import Path

from specmill import paths
from specmill.bench import (
    CellCache,
    check_room,
    engine_rows,
    measure,
    plan_cells,
    plan_runs,
    server_starter,
    write_raw,
)
from specmill.files import read_json, tree_digest
from specmill.methods import METHODS
from specmill.samples import read_samples
from specmill.stage import open_stage
from specmill.summary import by_name, headline_k, summarise, without_empty_lists
from specmill.verifier import model_path


def main(name: str) -> None:
    """Run the stage for the method `name`."""
    with open_stage(f"bench@{name}", ["bench"], measures=True) as stage:
        bench, spec, runtime = stage.params.bench, stage.params.spec, stage.params.runtime
        method = stage.params.method(name)
        stage.log_section(method.section)
        verifier, head = read_json(paths.IDENTITY), Path(method.head)
        ks = dict.fromkeys([spec.tokens, *spec.sweep])
        runs = plan_runs({k: METHODS[name](k, spec, head, verifier) for k in ks}, bench.rounds)
        cells = plan_cells(read_samples(paths.PREPARED / "bench.parquet"), bench)
        check_room(cells, bench.max_tokens, verifier["max_model_len"])
        inputs = {
            "method": name,
            "head": tree_digest(head),
            "verifier": verifier,
            "bench": bench.model_dump(),
            "hardware": read_json(paths.HARDWARE),
        }
        cache = CellCache(paths.CACHE / "bench_cells", inputs)
        start_server = server_starter(
            name, model_path(paths.VERIFIER), verifier, bench, runtime, paths.ROOT / "logs"
        )
        records = measure(runs, cells, bench, start_server, cache, runtime.request_timeout_s)
        write_raw(paths.BENCH_RAW / f"{name}.jsonl", name, records)
        rows, headline = summarise(records), headline_k(records)
        stage.write_metrics(
            paths.BENCH / f"{name}.json",
            {
                "method": name,
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
        sys.exit("usage: python -m stages.bench METHOD (an entry of params.yaml: methods)")
    main(sys.argv[1])
