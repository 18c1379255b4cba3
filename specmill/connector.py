"""vLLM KV connector that hands hidden states out: a staged shard per request, whole or none.

Loaded by vLLM inside its engine through `kv_connector_module_path`. vLLM's example connector keeps
the books (which request, which blocks, which lock); ours is what happens to the states:

- What a step has finished is copied to the host at once, through a buffer of fixed size. The
  example copies request by request and gathers each whole one on the device first (vllm#49310); on
  a machine without a GPU it dies, because it allocates pinned memory and CUDA events.
- Threads check them, turn them into what is kept (fp8 if asked for), take the checksum and write
  the file under another name before it gets its own. Whoever waits for the request's lock finds the
  file, or `<file>.error` with the reason why there is none.
"""

import ctypes
import fcntl
import hashlib
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)

from specmill.shards import StateSpec
from specmill.states import stage

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_BUFFER_BYTES = 64 * 2**20  # on the device; more does not make copies faster
_FILE_NAME = re.compile(r"\w[\w.-]{0,199}", re.ASCII)


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
        # vLLM's processes outlive a parent that was killed outright, and keep its memory
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self._buffer: torch.Tensor | None = None
        self._spec = StateSpec.of(self._kv_transfer_config.get_from_extra_config("states", None))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Name files by requests; of a name that is none of a file, by its digest.

        A client chooses the name of its request (X-Request-Id), and the example makes a path of it:
        `x/../../../` would leave the staging folder.
        """
        metadata = super().build_connector_meta(scheduler_output)
        for name in metadata.new_req_filenames:
            if not _FILE_NAME.fullmatch(name):
                named = f"{hashlib.sha256(name.encode()).hexdigest()}.safetensors"
                path = os.path.join(self._storage_path, named)
                metadata.new_req_filenames[name] = self._request_filenames[name] = path
        return metadata

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        """Hand the requests that this step has finished over to be staged, all at once."""
        if self.has_connector_metadata() and self._is_tp_rank_zero:
            metadata = self._get_connector_metadata()
            self._stage(metadata.pending_saves)
            metadata.pending_saves = []  # what the example would copy request by request
        return super().get_finished(finished_req_ids)

    def _stage(self, requests: list[Any]) -> None:
        if not requests:
            return
        size = self._block_size
        # a request that lost its blocks before it was aborted has none: too few states are refused
        blocks = [one.block_ids[: -(-len(one.token_ids) // size)] for one in requests]
        host, done = self._copy([block for ids in blocks for block in ids])
        start = 0
        for one, ids in zip(requests, blocks, strict=True):
            states = host[start : start + len(ids)].flatten(0, 1)[: len(one.token_ids)]
            start += len(ids)
            lock = self._lock_fds.pop(one.req_id, None)
            if lock is None:
                lock = os.open(one.filename + ".lock", os.O_CREAT | os.O_WRONLY, 0o644)
                fcntl.flock(lock, fcntl.LOCK_EX)
            future = self._executor.submit(
                _write, Path(one.filename), self._spec, one.token_ids, states, done, lock
            )
            self._req_copy_events[one.req_id] = done
            self._req_futures[one.req_id] = future
            future.add_done_callback(partial(self._on_write_done, one.req_id))

    def _copy(self, block_ids: list[int]) -> tuple[torch.Tensor, Any]:
        """Blocks of the cache on the host, and the event of their copy.

        Returns:
            States [num_blocks, block_size, num_layers, hidden_size].
        """
        assert self._kv_cache is not None
        cache = self._kv_cache
        # 0.32 shows a block as [layers, tokens], 0.26 as [tokens, layers]
        assert cache.shape[1] != cache.shape[2], f"ambiguous cache of shape {tuple(cache.shape)}"
        if cache.shape[2] == self._block_size:
            cache = cache.transpose(1, 2)
        if not cache.is_cuda:
            return torch.index_select(cache, 0, torch.tensor(block_ids, dtype=torch.long)), _Done()
        host = torch.empty((len(block_ids), *cache.shape[1:]), dtype=cache.dtype, pin_memory=True)
        indices = torch.tensor(block_ids, dtype=torch.long, pin_memory=True)
        if self._buffer is None:
            blocks = max(1, _BUFFER_BYTES // cache[0].nbytes)
            self._buffer = torch.empty((blocks, *cache.shape[1:]), dtype=cache.dtype, device="cuda")
        stream = self._get_copy_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            places = indices.to(cache.device, non_blocking=True)
            # the stream does one thing after the other, so one buffer serves them all
            for first in range(0, len(block_ids), len(self._buffer)):
                some = places[first : first + len(self._buffer)]
                gathered = self._buffer[: len(some)]
                torch.index_select(cache, 0, some, out=gathered)
                host[first : first + len(some)].copy_(gathered, non_blocking=True)
        done = torch.cuda.Event()
        done.record(stream)
        return host, done


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
