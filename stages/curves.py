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
from typing import Any

from specmill import compat, paths
from specmill.curve_drafts import CurveDrafts
from specmill.curve_engines import plan_engines, plan_groups, steering_flags
from specmill.curve_kinds import curve_kinds
from specmill.curve_waves import curve_fleet, deal_prompts, describe, mean_length, measure_curves
from specmill.curves import by_name, curve_points, plot_rows
from specmill.files import digest, read_json, write_json
from specmill.fleet import server_starter
from specmill.layers import aux_layer_ids
from specmill.params_parallel import Parallel
from specmill.revision import code_state
from specmill.samples import digest_of, read_samples
from specmill.stage import Stage, open_stage
from specmill.verifier import model_path

logger = logging.getLogger("specmill.stages.curves")


def main() -> None:
    """Run the stage."""
    with (
        open_stage("curves", ["curves", "parallel"], measures=True) as stage,
        tempfile.TemporaryDirectory() as scratch,
    ):
        chosen, bench, runtime = stage.params.curves, stage.params.bench, stage.params.runtime
        # a step is of one copy of the engine
        parallel = stage.params.parallel.model_copy(update={"data_parallel_size": 1})
        vocab_size = stage.params.vocab.draft_vocab_size
        verifier, model = read_json(paths.IDENTITY), model_path(paths.VERIFIER)
        max_model_len = verifier["max_model_len"]
        aux_ids = aux_layer_ids(stage.params.extract.aux_layer_ids, verifier["num_layers"])
        samples = read_samples(paths.PREPARED / "bench.parquet")
        prompts = deal_prompts(samples, chosen, max_model_len)
        rows, _ = curve_kinds(stage.params)
        kinds = {kind.name: kind for kind in rows.values()}
        most = max(chosen.tokens)
        drafts = CurveDrafts(model, paths.VERIFIER_HEAD, verifier, aux_ids, vocab_size, most)
        engines, refused = plan_engines(
            kinds.values(), drafts, chosen.tokens, verifier, compat.device(), Path(scratch)
        )
        groups = plan_groups(engines, bench.reference)
        logger.info("%s", describe(groups, chosen))
        inputs = {
            "verifier": verifier,
            "hardware": read_json(paths.HARDWARE),
            "prompts": digest_of(samples),
            "curves": chosen.model_dump(),
            "drafts": [aux_ids, vocab_size, [kind.geometry for kind in kinds.values()]],
            "engine": [bench.reference, bench.enforce_eager, parallel.model_dump()],
            "memory": [runtime.cpu_kv_cache_gib, runtime.gpu_memory_utilization],
        }
        kept = paths.CACHE / "curves" / digest(inputs)
        logs, steered = paths.ROOT / "logs", steering_flags(engines)
        start = server_starter("curves", model, verifier, bench, parallel, runtime, logs, steered)
        with curve_fleet(start, prompts, bench, runtime.request_timeout_s) as fleet:
            measured = measure_curves(groups, fleet, prompts, chosen, max_model_len, kept)
        points = curve_points(measured.waves)
        facts = measured.engines
        write_json(paths.REPORTS / "plots" / "curves.json", plot_rows(points))
        stage.write_metrics(
            paths.CURVES,
            {
                "points": points,
                "refused": measured.refused,
                "missing": refused | measured.missing,
                "prompt_tokens": mean_length(prompts),
                "engines": facts,
                "startup_s": {name: ran["startup_s"] for name, ran in facts.items()},
                "provenance": _provenance(stage, parallel),
            },
        )
        stage.tracker.log_metrics(by_name(points))  # MLflow does not know rows
        shutil.rmtree(kept)


def _provenance(stage: Stage, parallel: Parallel) -> dict[str, Any]:
    return code_state() | {
        "versions": compat.engine_versions(),
        "reference": stage.params.bench.reference,
        "parallel": parallel.model_dump(),
        "waited_s": stage.waited_s,
    }


if __name__ == "__main__":
    main()
