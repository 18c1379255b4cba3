"""Measure step time T(K, batch) of every kind of draft on the true engine, with nothing trained.

Reads    data/prepared/bench.parquet    prompts, as token ids
         models/verifier, data/verifier_head, reports/hardware.json
         reports/curve_kinds.json       stands for what params.yaml says of the kinds
Plots    reports/plots/curves.json      step time by kind, K and batch
Metrics  reports/curves.json            the same with its spread and its ratio to `none`; why a kind
                                        is missing; engine facts
Params   curves, extract.aux_layer_ids, vocab; how engines run: bench, parallel

Run      dvc repro curves
"""

import logging
import shutil
import tempfile
from pathlib import Path

from specmill import compat, paths
from specmill.curve_stage import one_copy, plan
from specmill.curve_waves import curve_fleet, deal_prompts, describe, mean_length, measure_curves
from specmill.curves import by_name, curve_points, plot_rows
from specmill.files import read_json, write_json
from specmill.revision import code_state
from specmill.samples import read_samples
from specmill.stage import open_stage

logger = logging.getLogger("specmill.stages.curves")


def main() -> None:
    """Run the stage."""
    with (
        open_stage("curves", ["curves", "parallel"], measures=True) as stage,
        tempfile.TemporaryDirectory() as scratch,
    ):
        chosen, bench, runtime = stage.params.curves, stage.params.bench, stage.params.runtime
        verifier, samples = (
            read_json(paths.IDENTITY),
            read_samples(paths.PREPARED / "bench.parquet"),
        )
        max_model_len = verifier["max_model_len"]
        prompts = deal_prompts(samples, chosen, max_model_len)
        planned = plan(stage.params, verifier, samples, Path(scratch))
        logger.info("%s", describe(planned.groups, chosen))
        with curve_fleet(planned.start, prompts, bench, runtime.request_timeout_s) as fleet:
            measured = measure_curves(
                planned.groups, fleet, prompts, chosen, max_model_len, planned.kept
            )
        points, facts = curve_points(measured.waves), measured.engines
        write_json(paths.REPORTS / "plots" / "curves.json", plot_rows(points))
        curves = {
            "points": points,
            "refused": measured.refused,
            "missing": planned.refused | measured.missing,
            "prompt_tokens": mean_length(prompts),
            "engines": facts,
            "startup_s": {name: ran["startup_s"] for name, ran in facts.items()},
            "provenance": code_state()
            | {
                "versions": compat.engine_versions(),
                "reference": bench.reference,
                "parallel": one_copy(stage.params).model_dump(),
                "waited_s": stage.waited_s,
            },
        }
        stage.write_metrics(paths.CURVES, curves)
        stage.tracker.log_metrics(by_name(points))  # MLflow does not know rows
        shutil.rmtree(planned.kept)


if __name__ == "__main__":
    main()
