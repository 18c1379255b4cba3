"""Put the benches side by side: table, plots, summary, MLflow.

Reads    reports/bench/NAME.json, reports/sampling/NAME.json, reports/check.json,
         reports/hardware.json, models/verifier/identity.json
Writes   reports/comparison.md          the answer, tables by load, what stands behind them
         reports/PLOT.svg               every plot as a picture
Plots    reports/plots/PLOT.json        for PLOT
             acceptance                 acceptance by position
             acceptance_by_category     the same by prompt type, at the lowest load
             speedup                    speed-up by prompt type, with intervals
             speedup_by_load            speed-up by requests in flight, or per second
             speedup_by_k               speed-up by K and load
Metrics  reports/summary.json           headline figures by method and load
Params   methods, imported

Run      dvc repro report
"""

from specmill import paths
from specmill.fidelity import marked
from specmill.files import read_json, write_atomically, write_json
from specmill.pictures import PICTURES
from specmill.report import comparison, summary_metrics
from specmill.stage import open_stage
from specmill.surface import plot_rows
from specmill.sync import sync_results


def main() -> None:
    """Run the stage."""
    with open_stage("report", ["methods", "imported"]) as stage:
        names = [*stage.params.methods, *stage.params.imported]
        results = {name: read_json(paths.BENCH / f"{name}.json") for name in names}
        for name in stage.params.methods:
            results[name]["sampling"] = read_json(paths.SAMPLING / f"{name}.json")
        check = read_json(paths.REPORTS / "check.json")
        table = comparison(results, check, read_json(paths.HARDWARE), read_json(paths.IDENTITY))
        write_atomically(paths.REPORTS / "comparison.md", table.encode())
        for name, rows in plot_rows(marked(results, bold=False)).items():
            write_json(paths.REPORTS / "plots" / f"{name}.json", rows)
            PICTURES[name](rows, paths.REPORTS / f"{name}.svg")
        stage.write_metrics(paths.REPORTS / "summary.json", summary_metrics(results))
        sync_results(stage.params.runtime)


if __name__ == "__main__":
    main()
