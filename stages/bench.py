"""Serve the verifier with one method and measure it beside its own reference.

Reads    data/prepared/bench.parquet    prompts by category, as token ids
         models/verifier, reports/hardware.json, the method's head
Writes   data/bench/NAME/               requests.parquet (one row each), cells.json: all that tables
                                        are made of
Plots    reports/bench/NAME.json        rows by K, load, context and category; engine facts; or why
                                        the method cannot serve this verifier
Params   bench, parallel, methods.NAME, and spec for a speculating method

Run      dvc repro bench@NAME           (python -m stages.bench NAME)
"""

import sys
from functools import partial

from specmill.bench_stage import measure_row
from specmill.methods import speculative_configs
from specmill.section import entry
from specmill.stage import open_stage


def main(name: str) -> None:
    """Run the stage for the entry `name` of `methods`."""
    with open_stage(f"bench@{name}", ["bench", "parallel"], measures=True) as stage:
        method, spec = entry("methods", stage.params.methods, name), stage.params.spec
        stage.log_section(method.section)
        ks = list(dict.fromkeys([spec.tokens, *spec.sweep]))
        configure = partial(speculative_configs, name, method, ks)
        measure_row(stage, name, method, configure, headline=ks[0], about={})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stages.bench NAME (an entry of params.yaml: methods)")
    main(sys.argv[1])
