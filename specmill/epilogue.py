"""What `make repro` prints last: the comparison and where everything is.

Run      python -m specmill.epilogue
"""

import argparse
import sys

from specmill import paths

WHERE = """
Table            reports/comparison.md
Figures          reports/bench/NAME.json, reports/summary.json    (dvc metrics show)
Acceptance       reports/acceptance.svg                           (dvc plots show)
Head             models/eagle3
MLflow runs      mlflow.db                                        (mlflow ui)
Server logs      logs/

First:           source .venv/bin/activate
Then, say:       dvc exp run -S spec.tokens=2
"""


def main() -> None:
    """Print the table and the places."""
    argparse.ArgumentParser(
        prog="python -m specmill.epilogue",
        description="Print reports/comparison.md and where everything is.",
    ).parse_args()
    table = (paths.REPORTS / "comparison.md").read_text()
    sys.stdout.write(f"\n{table}\n{WHERE.lstrip()}")


if __name__ == "__main__":
    main()
