"""vLLM KV connector that hands hidden states out, on a GPU and without one.

Loaded by vLLM inside its engine through `kv_connector_module_path`. vLLM's own example connector
does the work on a GPU; on a CPU it dies at the first finished request, because it allocates
pinned memory and CUDA events unconditionally, so the copy is done here without them.
"""

import fcntl
import os
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class _Done:
    """Stands for a CUDA event when the copy has already happened."""

    def query(self) -> bool:
        """True: nothing is in flight."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes `hidden_states` [num_tokens, num_layers, hidden_size] and `token_ids` per request."""

    def _submit_async_write(self, pending: Any) -> None:
        if self._kv_cache is None or self._kv_cache.is_cuda:
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        offsets = torch.arange(self._block_size, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + offsets).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {
            # indexing copied the states, so the engine may reuse its blocks
            "hidden_states": states.contiguous(),  # [num_tokens, num_layers, hidden_size]
            "token_ids": pending.token_ids.clone(),  # int64 [num_tokens]
        }
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        done = _Done()
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
