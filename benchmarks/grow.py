"""How long the states of a dataset that grew by a few prompts take, through DVC.

Runs `dvc exp run --temp -S prepare.limit=N extract`, N a little above the present limit, in a copy
of the repository that shares its .cache, and prints what each stage took and extracted. Needs a
pipeline that has run. To be compared with what `extract` took the first time (`dvc repro -f`).

Run      python -m benchmarks.grow --percent 1
"""

import argparse
import re
import subprocess
import time

from specmill import paths
from specmill.params_file import load_params


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--percent", type=float, default=1.0)
    options = parser.parse_args()
    limit = load_params(paths.PARAMS).prepare.limit
    if limit is None:
        parser.error("prepare.limit is null: every prompt is used, there is none to add")
    more = limit + max(1, round(limit * options.percent / 100))
    command = ["dvc", "exp", "run", "--temp", "-S", f"prepare.limit={more}", "extract"]
    started = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if re.search(r"Running stage|done in|to be extracted|tokens/s", line):
                print(f"{time.monotonic() - started:6.1f} s  {line.strip()}", flush=True)
    print(f"{time.monotonic() - started:6.1f} s  prepare.limit {limit} -> {more}, all in all")
    if running.returncode:
        raise SystemExit(running.returncode)


if __name__ == "__main__":
    main()
