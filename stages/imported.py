"""Bring a result of `vllm bench serve` or guidellm into the comparison.

Reads    the files that params.imported names; reports/imported_sources.json says their content
Plots    reports/bench/NAME.json       a row per run in the file, and where it is from
Params   imported.NAME

Run      dvc repro imported@NAME       (python -m stages.imported NAME)
"""

import sys

from specmill import paths
from specmill.imported import import_result
from specmill.section import entry
from specmill.stage import open_stage


def main(name: str) -> None:
    """Run the stage for the entry `name` of `imported`."""
    with open_stage(f"imported@{name}", ["imported"]) as stage:
        chosen = entry("imported", stage.params.imported, name)
        stage.write_metrics(paths.BENCH / f"{name}.json", import_result(name, chosen))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stages.imported NAME (an entry of params.yaml: imported)")
    main(sys.argv[1])
