"""Run samples through the verifier and keep the hidden states it had on the way.

The engine runs inside this process's children (vLLM's `LLM`), in eager mode: prefill gains
nothing from compilation that would be worth its start. Prefix caching is off because a cache hit
leaves the hidden states of the hit out (vllm#44485); chunked prefill is off for the same reason.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specmill import compat
from specmill.samples import Sample
from specmill.store import HiddenStateStore, StateSpec, check_states

logger = logging.getLogger(__name__)


def extract_missing(
    samples: list[Sample],
    spec: StateSpec,
    store: HiddenStateStore,
    model: Path,
    *,
    max_model_len: int,
    shard_bytes: int,
    batch: int,
    staging: Path,
    cpu_kv_cache_gib: int,
    gpu_memory_utilization: float,
) -> int:
    """Extract what the store lacks; the engine is started only if something is missing.

    Args:
        samples: Every sample of the dataset.
        spec: Verifier, layers and dtype of the states.
        store: Receives verified samples, shard by shard; they survive an interruption.
        model: Folder of the verifier.
        max_model_len: Context length, tokens.
        shard_bytes: Size at which a shard is closed.
        batch: Samples handed to the engine at a time.
        staging: Folder on the store's file system for the engine's per-request files.
        cpu_kv_cache_gib: KV cache of a CPU engine, GiB.
        gpu_memory_utilization: Share of GPU memory the engine may take.

    Returns:
        Number of tokens extracted now.

    Raises:
        ValueError: when the disk is too small for the states, or when a sample's states are not
            those of its ids; names the sample.
    """
    store.drop_damaged([spec.store_key(sample.sample_key) for sample in samples])
    missing = [sample for sample in samples if spec.store_key(sample.sample_key) not in store]
    if not missing:
        return 0
    check_disk(spec, sum(len(sample.input_ids) for sample in missing), store.folder)
    shutil.rmtree(staging, ignore_errors=True)  # what a killed extraction left
    staging.mkdir(parents=True)
    with (
        tempfile.TemporaryDirectory(dir=staging) as scratch,
        _engine(
            model,
            list(spec.layer_ids),
            Path(scratch),
            max_model_len,
            cpu_kv_cache_gib,
            gpu_memory_utilization,
        ) as engine,
        store.writer(shard_bytes) as writer,
        tqdm(total=sum(len(sample.input_ids) for sample in missing), unit="tok",
             desc="hidden states") as bar,
    ):  # fmt: skip
        for start in range(0, len(missing), batch):
            chunk = missing[start : start + batch]
            for sample, (token_ids, states) in zip(chunk, engine(chunk), strict=True):
                sent = sample.input_ids.tolist()
                try:
                    check_states(spec, sent, token_ids, states)
                except ValueError as error:
                    raise ValueError(f"sample {sample.sample_key[:12]}: {error}") from None
                writer.add(spec.store_key(sample.sample_key), sent, states)
                bar.update(len(sent))
    return sum(len(sample.input_ids) for sample in missing)


def state_bytes(spec: StateSpec, num_tokens: int) -> int:
    """Bytes on disk of the states of `num_tokens` tokens: tokens x layers x hidden size x bytes."""
    itemsize = getattr(torch, spec.dtype).itemsize
    return num_tokens * len(spec.layer_ids) * spec.hidden_size * int(itemsize)


def check_disk(spec: StateSpec, num_tokens: int, folder: Path) -> None:
    """Refuse an extraction that the disk cannot hold, before the engine is started.

    Raises:
        ValueError: with the estimate, what is free, and the way out.
    """
    needed, free = state_bytes(spec, num_tokens), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"hidden states of {num_tokens:,} tokens x {len(spec.layer_ids)} layers x "
            f"{spec.hidden_size} in {spec.dtype} take {needed / 1e9:.1f} GB, and {folder} has "
            f"{free / 1e9:.1f} GB free; lower prepare.limit or prepare.max_tokens, or put .cache "
            "on a larger disk"
        )
    if 2 * needed > free:
        logger.warning(
            "DVC copies data/hidden_states into its cache where the file system cannot share "
            "blocks, and a second copy will not fit; `dvc config --local cache.type "
            "reflink,hardlink` avoids it"
        )


@contextlib.contextmanager
def _engine(
    model: Path,
    layer_ids: list[int],
    scratch: Path,
    max_model_len: int,
    cpu_kv_cache_gib: int,
    gpu_memory_utilization: float,
) -> Iterator[Any]:
    """A function from samples to (token_ids, states), backed by a vLLM engine."""
    os.environ.update(compat.engine_environment(compat.device(), cpu_kv_cache_gib))
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        cleanup_hidden_states,
        load_hidden_states,
    )

    llm = LLM(
        model=str(model),
        max_model_len=max_model_len,
        max_num_batched_tokens=max(max_model_len, 8192),
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        gpu_memory_utilization=gpu_memory_utilization,
        disable_log_stats=True,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids},
            },
        },
        kv_transfer_config={
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "specmill.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(scratch.absolute())},
        },
    )

    def extract(samples: list[Sample]) -> Iterator[tuple[Any, Any]]:
        outputs = llm.generate(
            [{"prompt_token_ids": sample.input_ids.tolist()} for sample in samples],
            SamplingParams(max_tokens=1, temperature=0),
            use_tqdm=False,
        )
        for output in outputs:
            path = output.kv_transfer_params["hidden_states_path"]
            written = load_hidden_states(path)
            cleanup_hidden_states(path)
            yield written["token_ids"], written["hidden_states"]

    try:
        yield extract
    finally:
        llm.llm_engine.engine_core.shutdown()
