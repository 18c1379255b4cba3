"""Put the benches side by side: table, plot, summary, MLflow.

Reads    reports/bench/NAME.json, reports/hardware.json, models/verifier/identity.json
Writes   reports/comparison.md          prompt type, baseline, method, change
         reports/acceptance.svg, reports/speedup.svg
                                        the plots as pictures
Plots    reports/plots/acceptance.json  acceptance by position
         reports/plots/speedup.json     speed-up by prompt type
Metrics  reports/summary.json           headline figures by method and concurrency
Params   methods

Run      dvc repro report
"""

from specmill import paths
from specmill.files import read_json, write_atomically, write_json
from specmill.pictures import plot_acceptance, plot_speedup
from specmill.report import (
    acceptance_rows,
    comparison,
    speedup_rows,
    summary_metrics,
)
from specmill.stage import open_stage
from specmill.sync import sync_results


def main() -> None:
    """Run the stage."""
    with open_stage("report", ["methods"]) as stage:
        results = {name: read_json(paths.BENCH / f"{name}.json") for name in stage.params.methods}
        table = comparison(results, read_json(paths.HARDWARE), read_json(paths.IDENTITY))
        write_atomically(paths.REPORTS / "comparison.md", table.encode())
        acceptance, speedup = acceptance_rows(results), speedup_rows(results)
        write_json(paths.REPORTS / "plots" / "acceptance.json", acceptance)
        write_json(paths.REPORTS / "plots" / "speedup.json", speedup)
        plot_acceptance(acceptance, paths.REPORTS / "acceptance.svg")
        plot_speedup(speedup, paths.REPORTS / "speedup.svg")
        stage.write_metrics(paths.REPORTS / "summary.json", summary_metrics(results))
        sync_results(stage.params.runtime)


if __name__ == "__main__":
    main()
