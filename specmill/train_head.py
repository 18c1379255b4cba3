"""Train a head on stored hidden states and write it: what every stage that trains one does."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from specmill import compat, paths, processes
from specmill.distributed import one_after_the_first, process_group
from specmill.draft_config import check_draft, read_draft
from specmill.draft_decoder import surroundings
from specmill.files import digest, read_json, write_json
from specmill.head import curves, expected_length, export_head
from specmill.head_facts import PROVENANCE
from specmill.params import Runtime, Train
from specmill.revision import code_state
from specmill.samples import Sample, check_apart, digest_of, read_samples
from specmill.stage import Stage
from specmill.training import build_draft_model, check_vocabulary, train
from specmill.transfer import StoredSamples
from specmill.view import StateView
from specmill.vocab import load_tables, tables_digest
from specmill.warm_start import check_start, load_weights


def train_head(stage: Stage, chosen: Train, head: Path, plots: Path, metrics: Path) -> None:
    """Train on the verifier's states; write the best epoch and what every epoch reached.

    Of several processes (specmill.processes) every one trains and the first one writes.

    Args:
        stage: The running stage.
        chosen: What to train and how.
        head: Receives the speculators checkpoint with provenance.json.
        plots: Receives held-out accuracy and loss by epoch and position.
        metrics: Receives the best epoch.

    Raises:
        ValueError: as `fit_head`.
    """
    verifier, view = read_json(paths.HEAD_IDENTITY), StateView(paths.HIDDEN_STATES)
    check_model(chosen, paths.VERIFIER_HEAD, view)
    samples = read_splits(chosen)
    with process_group():
        best, epochs = fit_head(stage, chosen, samples, verifier, paths.VERIFIER_HEAD, view, head)
    if processes.rank() > 0:
        return
    write_json(plots, curves(epochs))
    stage.write_metrics(
        metrics,
        {
            "best_epoch": int(best.name),
            "num_epochs": len(epochs),
            "num_samples": len(samples[0]),
            "expected_length": round(expected_length(epochs[int(best.name)]), 4),
            **epochs[int(best.name)],
        },
    )
    drop_checkpoints(best)


def check_model(chosen: Train, verifier_head: Path, view: StateView) -> None:
    """Refuse a shape that does not fit, or a head that cannot be gone on from, before any sample
    is read.

    Args:
        chosen: What to train and how.
        verifier_head: The verifier's slice.
        view: Its hidden states.

    Raises:
        ValueError: as `check_draft` and `check_start`.
    """
    tables = load_tables(paths.VOCAB)
    around = surroundings(verifier_head, len(tables[0]), list(view.spec.layer_ids[:-1]))
    check_draft(chosen, around)
    check_start(chosen, around, verifier_head, tables_digest(*tables), paths.START)


def read_splits(chosen: Train) -> list[list[Sample]]:
    """What trains, as much of it as was chosen, and what validates.

    Raises:
        ValueError: when a sample is in both.
    """
    samples = [
        read_samples(paths.PREPARED / "train.parquet")[: chosen.max_samples],
        read_samples(paths.PREPARED / "heldout.parquet"),
    ]
    check_apart(*samples)
    return samples


def fit_head(
    stage: Stage,
    chosen: Train,
    samples: list[list[Sample]],
    verifier: dict[str, Any],
    verifier_head: Path,
    view: StateView,
    head: Path,
    **further: Any,
) -> tuple[Path, list[dict[str, float]]]:
    """Train, going on where an interrupted run of these inputs stopped; write the best epoch.

    Args:
        stage: The running stage.
        chosen: What to train and how.
        samples: What trains and what validates.
        verifier: identity.json of the model whose states `view` holds.
        verifier_head: Its slice.
        view: Its hidden states of the samples.
        head: Receives the speculators checkpoint with provenance.json.
        further: What else the head follows from; stands beside `chosen` in its provenance.

    Returns:
        The checkpoint of the best epoch, named by its number from 0, and what each epoch reached.
        The checkpoints stay, for `drop_checkpoints` when all results are written.

    Raises:
        ValueError: when states, samples and vocabulary do not belong together, or when training
            diverges.
    """
    view.check_verifier(verifier)
    provenance = _provenance(chosen, samples, verifier, view, further)
    checkpoints = paths.CACHE / "checkpoints" / digest(provenance)
    runtime = stage.params.runtime
    scratch = checkpoints.with_suffix(".samples")
    model, training, heldout = training_inputs(
        chosen, samples, verifier, verifier_head, view, scratch, runtime
    )
    best, epochs = train(
        model, training, heldout, chosen, checkpoints, stage.log_epoch, runtime.data_workers
    )
    if processes.rank() == 0:
        export_head(best, head, verifier["name"], provenance | code_state())
    return best, epochs


def _provenance(
    chosen: Train,
    samples: list[list[Sample]],
    verifier: dict[str, Any],
    view: StateView,
    further: dict[str, Any],
) -> dict[str, Any]:
    """Everything that a head follows from; its digest names the checkpoints."""
    return {
        "method": chosen.type,
        "params": chosen.model_dump() | further,
        "states": asdict(view.spec),
        "data": digest([digest_of(split) for split in samples]),
        "vocabulary": tables_digest(*load_tables(paths.VOCAB)),
        "verifier": verifier,
        "versions": compat.engine_versions(),
        "draft": read_draft(chosen.draft),
        "start": read_json(paths.START / PROVENANCE) if chosen.from_ else None,
    }


def training_inputs(
    chosen: Train,
    samples: list[list[Sample]],
    verifier: dict[str, Any],
    verifier_head: Path,
    view: StateView,
    scratch: Path,
    runtime: Runtime,
) -> tuple[Any, StoredSamples, StoredSamples]:
    """A fresh draft model, what trains it and what validates it, as `train` takes them.

    Args:
        chosen: What to train and how.
        samples: What trains and what validates.
        verifier: identity.json of the model whose states `view` holds.
        verifier_head: Its slice.
        view: Its hidden states of the samples.
        scratch: Receives the samples as speculators reads them.
        runtime: Whom to ask for states that are not kept.

    Raises:
        ValueError: when states or vocabulary do not fit.
    """

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

    with one_after_the_first():  # finds what that has written
        training, heldout = map(stored, samples)
    tables = load_tables(paths.VOCAB)
    model = build_draft_model(verifier_head, list(view.spec.layer_ids[:-1]), *tables, chosen)
    if chosen.from_:
        load_weights(model, paths.START)
        check_vocabulary(model, *tables)
    return model, training, heldout


def drop_checkpoints(best: Path) -> None:
    """Remove what a training went on from, once its results are written."""
    shutil.rmtree(best.parent)
    shutil.rmtree(best.parent.with_suffix(".samples"))
