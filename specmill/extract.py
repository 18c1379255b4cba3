"""Run samples through the verifier and keep the hidden states it had on the way."""

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from specmill.samples import Sample
from specmill.shard_writing import abandoned
from specmill.shards import StateSpec
from specmill.staging import Work, adopt
from specmill.store import HiddenStateStore

logger = logging.getLogger(__name__)

NO_EXTRACT = "SPECMILL_NO_EXTRACT"
"""Set to 1 where extraction would be a mistake, such as a rented node that pulls hidden states."""


def extract_missing(
    samples: list[Sample],
    spec: StateSpec,
    store: HiddenStateStore,
    run_engines: Callable[[Work], None],
    *,
    shard_bytes: int,
    staging: Path,
    window: int,
) -> int:
    """Extract what the store lacks, and count the tokens.

    Engines are started only if something is missing.

    Args:
        samples: Every sample of the dataset.
        spec: Verifier, layers and dtype of the states.
        store: Receives checked samples, shard by shard; they survive an interruption.
        run_engines: Does the work (specmill.engines).
        shard_bytes: Size at which a shard is closed.
        staging: Folder on the store's file system for what engines hand over.
        window: Tokens under way at an engine: asked for and not yet filed.

    Raises:
        ValueError: when the disk is too small for the states, when a sample's states are not those
            of its ids (names the sample), or when extraction is forbidden here.
    """
    for name in abandoned(store.folder):
        (store.folder / name).unlink(missing_ok=True)
    if kept := adopt(staging, store, shard_bytes):
        logger.info("%d samples that an earlier run had staged are kept", kept)
    missing = _lacking(samples, spec, store)
    if not missing:
        return 0
    num_tokens = sum(len(sample.input_ids) for sample in missing)
    size = f"{num_tokens:,} tokens, {num_tokens * spec.bytes_per_token / 1e9:.2f} GB"
    logger.info("%d of %d samples are to be extracted: %s", len(missing), len(samples), size)
    _check_allowed()
    check_disk(spec, num_tokens, store.folder)
    with store.writer(spec, shard_bytes) as writer:
        work = Work(missing, spec, writer, staging, window)
        started = time.monotonic()
        try:
            run_engines(work)
        finally:
            work.close()
    adopt(staging, store, shard_bytes, wait=False)  # what servers given up on have staged besides
    seconds = time.monotonic() - started
    logger.info("%.0f tokens/s, the engine's start included", num_tokens / seconds)
    return num_tokens


def _check_allowed() -> None:
    if os.environ.get(NO_EXTRACT, "0") not in ("", "0"):
        raise ValueError(
            f"{NO_EXTRACT} forbids extraction here; `dvc pull extract` fetches what was "
            "extracted elsewhere, and `dvc exp run -s train` trains alone (docs/rented-node.md)"
        )


def _lacking(samples: list[Sample], spec: StateSpec, store: HiddenStateStore) -> list[Sample]:
    """Samples whose states the store has not, or not whole; each once."""
    store.drop_damaged(spec, [sample.sample_key for sample in samples])
    lacking = (sample for sample in samples if not store.holds(spec, sample.sample_key))
    return list({sample.sample_key: sample for sample in lacking}.values())


def check_disk(spec: StateSpec, num_tokens: int, folder: Path) -> None:
    """Refuse an extraction that the disk cannot hold, before an engine is started.

    Raises:
        ValueError: with the estimate, what is free, and the way out.
    """
    needed, free = num_tokens * spec.bytes_per_token, shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"hidden states of {num_tokens:,} tokens x {len(spec.layer_ids)} layers x "
            f"{spec.hidden_size} in {spec.dtype} take {needed / 1e9:.1f} GB, and {folder} has "
            f"{free / 1e9:.1f} GB free; lower prepare.limit or prepare.max_tokens, set "
            "extract.dtype to fp8_e4m3 (half the bytes) or extract.mode to online (nothing is "
            "kept), or put .cache on a larger disk"
        )
    if 2 * needed > free:
        logger.warning(
            "DVC copies data/hidden_states into its cache where the file system cannot share "
            "blocks, and a second copy will not fit; `dvc config --local cache.type "
            "reflink,hardlink` avoids it"
        )
