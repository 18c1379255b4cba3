"""What `make repro` prints last: the answer and where everything is.

Run      python -m specmill.epilogue
"""

import argparse
import sys

from specmill import paths

WHERE = """
Page             reports/index.html
Tables           reports/comparison.md
Figures          reports/bench/NAME.json, reports/summary.json    (dvc metrics show)
Pictures         reports/speedup_by_load.svg and others           (dvc plots show)
Every request    data/bench/NAME/requests.parquet
Head             models/eagle3
MLflow runs      mlflow.db                                        (mlflow ui)
Server logs      logs/

First:           source .venv/bin/activate
Then, say:       dvc exp run -S spec.tokens=2
"""


def main() -> None:
    """Print the answer, which is what stands above the first section, and the places."""
    argparse.ArgumentParser(
        prog="python -m specmill.epilogue",
        description="Print the head of reports/comparison.md and where everything is.",
    ).parse_args()
    comparison = paths.REPORTS / "comparison.md"
    if not comparison.is_file():
        sys.exit(f"{comparison} is not there; `dvc repro` writes it")
    answer = comparison.read_text().partition("\n## ")[0]
    sys.stdout.write(f"\n{answer}\n{WHERE.lstrip()}")


if __name__ == "__main__":
    main()
