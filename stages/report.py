"""Put the benches side by side and decide: table, plots, summary, decision, page, MLflow.

Reads    reports/bench/NAME.json, reports/sampling/NAME.json, reports/hardware.json,
         models/verifier/identity.json; predicted.json, check.json, schedule.json, prepare.json,
         vocab.json, curves.json, routing.json, train.json and plots/train.json, predicted.json of
         reports; decisions.yaml; the last decision.json in Git
Writes   reports/comparison.md          the answer, tables by load, what stands behind them
         reports/index.html             all of it and what else is known, as one page
         reports/decision.md            every option with its status, evidence and gate
         reports/serve.sh               the command that serves what was decided
         reports/PLOT.svg               every plot as a picture
Plots    reports/plots/PLOT.json        for PLOT
             acceptance                 acceptance by position
             acceptance_by_category     the same by prompt type, at the lowest load
             speedup                    speed-up by prompt type, with intervals
             speedup_by_load            speed-up by requests in flight, or per second
             speedup_by_k               speed-up by K and load
Metrics  reports/summary.json           headline figures by method and load
         reports/decision.json          the decision record
Params   bench, parallel, methods, scheduled, imported

Run      dvc repro report
"""

from specmill import paths
from specmill.decision import decide
from specmill.decision_text import decision_text, limit_lines
from specmill.fidelity import marked
from specmill.files import read_json, write_atomically, write_json
from specmill.grounds import Grounds
from specmill.hand_options import read_decisions
from specmill.page import page
from specmill.page_evidence import gather
from specmill.palette import looks
from specmill.params_scheduled import scheduled_name
from specmill.pictures import PICTURES
from specmill.report import comparison, summary_metrics, trust_note
from specmill.revision import committed
from specmill.serve_script import serve_script
from specmill.stage import open_stage
from specmill.surface import plot_rows
from specmill.sync import sync_results


def main() -> None:
    """Run the stage."""
    with open_stage("report", ["bench", "parallel", "methods", "scheduled", "imported"]) as stage:
        rows, scheduled = stage.params.methods, stage.params.scheduled
        names = [*rows, *map(scheduled_name, scheduled), *stage.params.imported]
        results = {name: read_json(paths.BENCH / f"{name}.json") for name in names}
        for name in rows:
            results[name]["sampling"] = read_json(paths.SAMPLING / f"{name}.json")
        for name in scheduled:  # the same proposer and sampler
            results[scheduled_name(name)]["sampling"] = results[name]["sampling"]
        hardware, verifier = read_json(paths.HARDWARE), read_json(paths.IDENTITY)
        check, bench = read_json(paths.REPORTS / "check.json"), stage.params.bench
        grounds = Grounds.read(paths.REPORTS, results, rows, hardware)
        record = decide(grounds, read_decisions(paths.DECISIONS), committed(paths.DECISION))
        record["limits"] += trust_note(verifier)
        table = comparison(results, check, hardware, verifier, bench, limit_lines(record))
        write_atomically(paths.REPORTS / "comparison.md", table.encode())
        styles = looks(results)
        for name, points in plot_rows(marked(results)).items():
            write_json(paths.REPORTS / "plots" / f"{name}.json", points)
            PICTURES[name](points, paths.REPORTS / f"{name}.svg", styles)
        parallel, runtime = stage.params.parallel, stage.params.runtime
        script = serve_script(record, rows, verifier, hardware, bench, parallel, runtime)
        write_atomically(paths.REPORTS / "decision.md", decision_text(record).encode())
        write_atomically(paths.REPORTS / "serve.sh", script.encode())
        stage.write_metrics(paths.DECISION, record)
        evidence = gather(paths.REPORTS, results, hardware, verifier, bench)
        write_atomically(paths.REPORTS / "index.html", page(evidence).encode())
        stage.write_metrics(paths.REPORTS / "summary.json", summary_metrics(results))
        sync_results(stage.params.runtime)


if __name__ == "__main__":
    main()
