"""Predict every method's speed-up from replayed acceptance and measured step times.

Nothing of a bench is read, so that the prediction is made before the measurement.

Reads    reports/replay/NAME.json       acceptance without serving
         reports/curves.json            step times without training
Plots    reports/plots/predicted.json   predicted speed-up by K and load
Metrics  reports/predicted.json         every cell with interval and break-even, the best K, what a
                                        better head would bring
Params   bench, methods, spec; which kind a row is: train, siblings, medusa, draft_models

Run      dvc repro predict
"""

from specmill import paths
from specmill.curve_kinds import curve_kinds, kinds_by_row
from specmill.files import read_json, write_json
from specmill.predicted import plot_rows, predict
from specmill.stage import open_stage


def main() -> None:
    """Run the stage."""
    with open_stage("predict", ["bench", "methods", "spec"]) as stage:
        replay = paths.REPORTS / "replay"
        replays = {name: read_json(replay / f"{name}.json") for name in stage.params.methods}
        curves = read_json(paths.CURVES)
        kinds = kinds_by_row(*curve_kinds(stage.params), curves["missing"])
        predicted = predict(curves, kinds, replays, stage.params.spec, stage.params.bench)
        write_json(paths.REPORTS / "plots" / "predicted.json", plot_rows(predicted))
        stage.write_metrics(paths.REPORTS / "predicted.json", predicted)


if __name__ == "__main__":
    main()
