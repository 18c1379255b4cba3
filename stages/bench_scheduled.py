"""Serve a row with K by the number of requests in flight and measure it beside its own reference.

Reads    reports/schedule.json          K by requests in flight
         data/prepared/bench.parquet    prompts by category, as token ids
         models/verifier, reports/hardware.json, the row's head
Writes   data/bench/NAME_scheduled/     as bench@NAME
Plots    reports/bench/NAME_scheduled.json  as bench@NAME, with `schedule`; K is the largest drafted
Params   bench, parallel, methods.NAME, scheduled.NAME

Run      dvc repro bench_scheduled@NAME     (python -m stages.bench_scheduled NAME)
"""

import sys
from functools import partial

from specmill import paths
from specmill.bench_stage import measure_row
from specmill.files import read_json
from specmill.params_scheduled import scheduled_name
from specmill.scheduled import scheduled_configs
from specmill.section import entry
from specmill.stage import open_stage


def main(row: str) -> None:
    """Run the stage for the entry `row` of `scheduled`, which is one of `methods` too."""
    with open_stage(
        f"bench_scheduled@{row}", ["bench", "parallel", "scheduled"], measures=True
    ) as stage:
        entry("scheduled", stage.params.scheduled, row)
        method = entry("methods", stage.params.methods, row)
        found = read_json(paths.REPORTS / "schedule.json")
        configure = partial(scheduled_configs, row, method, found)
        about = {"schedule": found.get(row, {}).get("ranges")}
        measure_row(stage, scheduled_name(row), method, configure, headline=0, about=about)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stages.bench_scheduled NAME (an entry of scheduled)")
    main(sys.argv[1])
