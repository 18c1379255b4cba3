"""Train a head on stored hidden states and write it: what the stages train and train_sibling do."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from specmill import compat, paths
from specmill.files import digest, read_json, write_json
from specmill.head import curves, expected_length, export_head
from specmill.params import Train
from specmill.revision import code_state
from specmill.samples import Sample, check_apart, digest_of, read_samples
from specmill.stage import Stage
from specmill.training import build_draft_model, train
from specmill.transfer import StoredSamples
from specmill.view import StateView
from specmill.vocab import load_tables, tables_digest


def train_head(stage: Stage, chosen: Train, head: Path, plots: Path, metrics: Path) -> None:
    """Train, going on where an interrupted run of these inputs stopped; write the best epoch.

    Args:
        stage: The running stage.
        chosen: What to train and how.
        head: Receives the speculators checkpoint with provenance.json.
        plots: Receives held-out accuracy and loss by epoch and position.
        metrics: Receives the best epoch.

    Raises:
        ValueError: when states, samples and vocabulary do not belong together, or when training
            diverges.
    """
    verifier = read_json(paths.HEAD_IDENTITY)
    view = StateView(paths.HIDDEN_STATES)
    view.check_verifier(verifier)
    d2t, t2d = load_tables(paths.VOCAB)
    samples = [
        read_samples(paths.PREPARED / "train.parquet")[: chosen.max_samples],
        read_samples(paths.PREPARED / "heldout.parquet"),
    ]
    check_apart(*samples)
    provenance = _provenance(chosen, view, samples, tables_digest(d2t, t2d), verifier)
    checkpoints = paths.CACHE / "checkpoints" / digest(provenance)
    scratch = checkpoints.with_suffix(".samples")
    runtime = stage.params.runtime

    def stored(split: list[Sample]) -> StoredSamples:
        return StoredSamples(
            split,
            view,
            scratch,
            chosen.tokens_per_step,
            getattr(torch, verifier["dtype"]),
            runtime.extract_endpoints,
            runtime.request_timeout_s,
        )

    training, heldout = map(stored, samples)
    aux_ids = list(view.spec.layer_ids[:-1])
    model = build_draft_model(paths.VERIFIER_HEAD, aux_ids, d2t, t2d, chosen)
    best, epochs = train(
        model, training, heldout, chosen, checkpoints, stage.log_epoch, runtime.data_workers
    )
    export_head(best, head, verifier["name"], provenance | code_state())
    write_json(plots, curves(epochs))
    stage.write_metrics(
        metrics,
        {
            "best_epoch": int(best.name),
            "num_epochs": len(epochs),
            "num_samples": len(training),
            "expected_length": round(expected_length(epochs[int(best.name)]), 4),
            **epochs[int(best.name)],
        },
    )
    shutil.rmtree(checkpoints)
    shutil.rmtree(scratch)


def _provenance(
    chosen: Train,
    view: StateView,
    samples: list[list[Sample]],
    vocabulary: str,
    verifier: dict[str, Any],
) -> dict[str, Any]:
    """All that a head follows from."""
    return {
        "method": chosen.type,
        "params": chosen.model_dump(),
        "states": asdict(view.spec),
        "data": digest([digest_of(split) for split in samples]),
        "vocabulary": vocabulary,
        "verifier": verifier,
        "versions": compat.engine_versions(),
    }
