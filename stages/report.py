"""Put the benches side by side: table, plot, summary, MLflow.

Reads    reports/bench/NAME.json, reports/hardware.json, models/verifier/identity.json
Writes   reports/comparison.md          prompt type, baseline, method, change
         reports/plots/acceptance       acceptance by position, one file per method
         reports/acceptance.svg         the same as a picture
Metrics  reports/summary.json           headline figures by method and concurrency
Params   methods

Run      dvc repro report
"""

from specmill import paths
from specmill.files import read_json, write_atomically, write_json
from specmill.report import (
    acceptance_curves,
    comparison,
    plot_acceptance,
    summary_metrics,
)
from specmill.stage import open_stage


def main() -> None:
    """Run the stage."""
    with open_stage("report", ["methods"]) as stage:
        results = {name: read_json(paths.BENCH / f"{name}.json") for name in stage.params.methods}
        table = comparison(results, read_json(paths.HARDWARE), read_json(paths.IDENTITY))
        write_atomically(paths.REPORTS / "comparison.md", table.encode())
        curves, concurrency = acceptance_curves(results)
        (paths.REPORTS / "plots" / "acceptance").mkdir(parents=True, exist_ok=True)
        for name, rows in curves.items():
            write_json(paths.REPORTS / "plots" / "acceptance" / f"{name}.json", rows)
        plot_acceptance(curves, concurrency, paths.REPORTS / "acceptance.svg")
        stage.write_metrics(paths.REPORTS / "summary.json", summary_metrics(results))


if __name__ == "__main__":
    main()
