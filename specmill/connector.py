"""vLLM KV connector that hands hidden states out: a staged shard per request, whole or none.

Loaded by vLLM inside its engine through `kv_connector_module_path`. vLLM's example connector keeps
the books (which request, which blocks, which lock); ours is what happens to the states:

- They are copied straight from the cache's blocks to the host, runs of neighbouring blocks at once.
  The example gathers a whole request on the device first (vllm#49310), and on a machine without a
  GPU it dies, because it allocates pinned memory and CUDA events unconditionally.
- Threads check them, turn them into what is kept (fp8 if asked for), take the checksum and write
  the file under another name before it gets its own. Whoever waits for the request's lock finds the
  file, or `<file>.error` with the reason why there is none."""

import fcntl
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)

from specmill.shards import StateSpec
from specmill.states import stage


class _Done:
    """Stands for a CUDA event where copies are done when they return."""

    def query(self) -> bool:
        """True: nothing is in flight."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Stages hidden states; `kv_connector_extra_config` has `states`, the StateSpec as JSON."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._spec = StateSpec.of(self._kv_transfer_config.get_from_extra_config("states", None))

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        states, done = self._copy(pending.block_ids, len(pending.token_ids))
        future = self._executor.submit(
            _write, Path(pending.filename), self._spec, pending.token_ids, states, done, lock
        )
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    def _copy(self, block_ids: list[int], num_tokens: int) -> tuple[torch.Tensor, Any]:
        """States [num_tokens, num_layers, hidden_size] on the host, and the event of their copy."""
        assert self._kv_cache is not None
        size, cache = self._block_size, self._kv_cache
        # 0.32 shows a block as [layers, tokens], 0.26 as [tokens, layers]
        assert cache.shape[1] != cache.shape[2], f"ambiguous cache of shape {tuple(cache.shape)}"
        if cache.shape[2] == size:
            cache = cache.transpose(1, 2)
        # a request that lost its blocks before it was aborted has none: too few states are refused
        block_ids = block_ids[: -(-num_tokens // size)]
        host = torch.empty(
            (len(block_ids), *cache.shape[1:]), dtype=cache.dtype, pin_memory=cache.is_cuda
        )
        if not cache.is_cuda:
            for at, first, count in _runs(block_ids):
                host[at : at + count].copy_(cache[first : first + count])
            return host.flatten(0, 1)[:num_tokens], _Done()
        stream = self._get_copy_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for at, first, count in _runs(block_ids):
                host[at : at + count].copy_(cache[first : first + count], non_blocking=True)
        done = torch.cuda.Event()
        done.record(stream)
        return host.flatten(0, 1)[:num_tokens], done


def _runs(block_ids: list[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbouring blocks: (place in the request, first block, number of blocks)."""
    start = 0
    for end in range(1, len(block_ids) + 1):
        if end == len(block_ids) or block_ids[end] != block_ids[end - 1] + 1:
            yield start, block_ids[start], end - start
            start = end


def _write(
    path: Path, spec: StateSpec, token_ids: torch.Tensor, states: torch.Tensor, done: Any, lock: int
) -> None:
    try:
        done.synchronize()
        stage(path, spec, token_ids, states)
    except ValueError as error:
        path.with_suffix(".error").write_text(str(error))
    finally:
        os.close(lock)  # gives the lock up
