"""What runs inside vLLM: from the blocks of its cache to a staged file."""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    PendingSave,
)

from specmill.connector import HiddenStatesConnector, _runs, _write
from specmill.shards import FP8, StateSpec, read_shard
from specmill.staging import Work, adopt, is_locked
from specmill.store import HiddenStateStore
from tests.fakes import sample
from tests.staging_fakes import (
    DEADLINE_S,
    SAMPLES,
    SPEC,
    Staging,
    Workplace,
    contents_of,
    states_of,
    wait_until,
)

BLOCK = 4
"""Tokens in a block; 2 layers of width 3 besides, as SPEC has them."""


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    (tmp_path / "staging").mkdir()
    return Workplace(tmp_path)


@pytest.fixture
def connector() -> Iterator[HiddenStatesConnector]:
    """A worker's connector whose cache is to be set; no engine is there."""
    one = HiddenStatesConnector.__new__(HiddenStatesConnector)
    one._spec = SPEC
    one._block_size = BLOCK
    one._is_tp_rank_zero = True
    one._lock_fds = {}
    one._req_futures = {}
    one._req_copy_events = {}
    one._executor = ThreadPoolExecutor(2)
    yield one
    one._executor.shutdown()


@pytest.mark.parametrize(
    ("block_ids", "runs"),
    [
        ([], []),
        ([7], [(0, 7, 1)]),
        ([3, 4, 5], [(0, 3, 3)]),
        ([5, 4, 3], [(0, 5, 1), (1, 4, 1), (2, 3, 1)]),
        ([1, 2, 9, 10, 11, 4], [(0, 1, 2), (2, 9, 3), (5, 4, 1)]),
        ([0, 0, 1], [(0, 0, 1), (1, 0, 2)]),
    ],
)
def test_neighbouring_blocks_are_copied_as_one_run(
    block_ids: list[int], runs: list[tuple[int, int, int]]
) -> None:
    assert list(_runs(block_ids)) == runs


def by_token(cache: torch.Tensor, block_ids: list[int], num_tokens: int) -> torch.Tensor:
    """States of a request, one token after the other, from a cache [blocks, tokens, layers, _]."""
    rows = [cache[block_ids[token // BLOCK], token % BLOCK] for token in range(num_tokens)]
    return torch.stack(rows)


@pytest.mark.parametrize("layers_first", [True, False])
@pytest.mark.parametrize(
    "block_ids", [[3, 4, 5], [5, 4, 3], [9, 0, 2], [6, 7, 1], [8, 3, 4], [1, 2, 3, 4, 5]]
)
@pytest.mark.parametrize("num_tokens", [1, 4, 9, 12])
def test_the_states_of_a_request_are_gathered_from_its_blocks_in_order(
    connector: HiddenStatesConnector, layers_first: bool, block_ids: list[int], num_tokens: int
) -> None:
    cache = torch.arange(10 * BLOCK * 2 * 3).reshape(10, BLOCK, 2, 3).float()
    # vLLM 0.32 shows a block as [layers, tokens, width], 0.26 as [tokens, layers, width]
    connector._kv_cache = cache.transpose(1, 2) if layers_first else cache
    states, done = connector._copy(block_ids, num_tokens)
    assert states.shape == (num_tokens, 2, 3)
    assert torch.equal(states, by_token(cache, block_ids, num_tokens))
    assert done.query()
    done.synchronize()


def test_what_was_copied_stays_when_the_engine_uses_its_blocks_again(
    connector: HiddenStatesConnector,
) -> None:
    connector._kv_cache = torch.ones(10, BLOCK, 2, 3)
    states, _ = connector._copy([2, 3], 8)
    connector._kv_cache.zero_()
    assert torch.equal(states, torch.ones(8, 2, 3))


def test_a_request_that_has_lost_its_blocks_gets_no_made_up_states(
    connector: HiddenStatesConnector,
) -> None:
    connector._kv_cache = torch.ones(10, BLOCK, 2, 3)
    assert connector._copy([], 8)[0].shape == (0, 2, 3)
    assert connector._copy([1], 8)[0].shape == (4, 2, 3)


def test_a_cache_whose_layout_cannot_be_told_is_refused(connector: HiddenStatesConnector) -> None:
    connector._kv_cache = torch.ones(10, BLOCK, BLOCK, 3)
    with pytest.raises(AssertionError, match="ambiguous cache"):
        connector._copy([1], 4)


class Done:
    """A copy that is done when it is told to be."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def synchronize(self) -> None:
        assert self.event.wait(DEADLINE_S)


def submit(
    connector: HiddenStatesConnector, path: Path, ids: list[int], blocks: list[int], lock: bool
) -> None:
    """Finish a request as vLLM does, which holds its lock if `lock`."""
    if lock:
        staging = Staging(path.parent, Workplace(path.parent.parent).journal)
        own, handle = staging.begin()
        os.rename(f"{own}.lock", f"{path}.lock")
        connector._lock_fds["request"] = handle
    connector._submit_async_write(PendingSave("request", str(path), torch.tensor(ids), blocks))


@pytest.mark.parametrize("lock", [True, False])
def test_a_finished_request_is_staged_and_its_lock_is_given_up(
    connector: HiddenStatesConnector, place: Workplace, lock: bool
) -> None:
    path, ids = place.staging / "a.safetensors", SAMPLES[0].input_ids.tolist()
    cache = torch.zeros(10, BLOCK, 2, 3, dtype=torch.bfloat16)
    cache[7, :3] = states_of(ids)
    connector._kv_cache = cache.transpose(1, 2)
    submit(connector, path, ids, [7], lock)
    wait_until(lambda: not is_locked(path))
    wait_until(path.is_file)
    wait_until(lambda: not connector._req_futures)
    assert not is_locked(path)
    assert connector._lock_fds == {}
    assert connector._req_copy_events["request"].query()
    adopt(place.staging, place.store, 10**6)
    assert place.store.contents() == contents_of(SAMPLES[:1])


def test_the_lock_is_held_until_the_copy_is_done_and_the_file_is_there(
    connector: HiddenStatesConnector, place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ids, done = place.staging / "a.safetensors", SAMPLES[0].input_ids.tolist(), Done()
    monkeypatch.setattr(connector, "_copy", lambda *_: (states_of(ids), done))
    submit(connector, path, ids, [0], lock=True)
    assert is_locked(path)
    assert not path.exists()
    done.event.set()
    wait_until(lambda: not is_locked(path))
    assert read_shard(path, named=False).rows[0].sample_key == SAMPLES[0].sample_key


def test_one_rank_alone_writes(connector: HiddenStatesConnector, place: Workplace) -> None:
    connector._is_tp_rank_zero = False
    submit(connector, place.staging / "a.safetensors", [1], [0], lock=False)
    assert place.staged() == []


def test_a_request_that_has_lost_its_blocks_leaves_the_reason_instead_of_a_file(
    connector: HiddenStatesConnector, place: Workplace
) -> None:
    path, ids = place.staging / "a.safetensors", SAMPLES[0].input_ids.tolist()
    connector._kv_cache = torch.zeros(10, BLOCK, 2, 3, dtype=torch.bfloat16)
    submit(connector, path, ids, [], lock=True)
    wait_until(lambda: not is_locked(path))
    reason = path.with_suffix(".error").read_text()
    assert reason == "hidden states are (0, 2, 3), expected (3, 2, 3)"
    assert not path.exists()


def written(place: Workplace, states: torch.Tensor, spec: StateSpec = SPEC) -> Path:
    """Where states of the first sample were written, or not; the lock is free."""
    path, lock = Staging(place.staging, place.journal).begin()
    done = Done()
    done.event.set()
    ids = torch.from_numpy(SAMPLES[0].input_ids).long()
    try:
        _write(path, spec, ids, states, done, lock)
    finally:
        assert not is_locked(path)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(lock)
    return path


def test_what_is_written_is_the_sample(place: Workplace) -> None:
    path = written(place, states_of(SAMPLES[0].input_ids.tolist()))
    store = HiddenStateStore(place.folder / "store")
    assert read_shard(path, named=False).spec == SPEC
    assert adopt(place.staging, store, 10**6) == 1
    assert store.contents() == contents_of(SAMPLES[:1])


def test_fp8_is_made_where_the_states_are(place: Workplace) -> None:
    spec = StateSpec("fingerprint", (2, 4), hidden_size=3, dtype=FP8)
    path = written(place, states_of(SAMPLES[0].input_ids.tolist()), spec)
    shard = read_shard(path, named=False)
    # 3 tokens: a scale of 4 bytes for each of 2 layers, an id of 4 bytes, 2 x 3 values of a byte
    assert shard.num_bytes - len(shard.header) == 3 * (2 * 4 + 4 + 2 * 3)


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (torch.full((3, 2, 3), float("nan")).bfloat16(), "hidden states hold NaN or infinity"),
        (torch.full((3, 2, 3), float("inf")).bfloat16(), "hidden states hold NaN or infinity"),
        (torch.ones(2, 2, 3).bfloat16(), "hidden states are (2, 2, 3), expected (3, 2, 3)"),
        (torch.ones(3, 1, 3).bfloat16(), "hidden states are (3, 1, 3), expected (3, 2, 3)"),
        (torch.ones(3, 2, 4).bfloat16(), "hidden states are (3, 2, 4), expected (3, 2, 3)"),
        (torch.ones(3, 2, 3), "hidden states are torch.float32, expected bfloat16"),
    ],
)
def test_states_that_cannot_be_right_leave_the_reason_instead_of_a_file(
    place: Workplace, states: torch.Tensor, reason: str
) -> None:
    path = written(place, states)
    assert not path.exists()
    assert path.with_suffix(".error").read_text() == reason


@pytest.fixture
def work(place: Workplace) -> Iterator[Work]:
    """Work on the first sample, which is handed out."""
    with place.store.writer(SPEC, 10**6) as writer:
        one = Work(SAMPLES[:1], SPEC, writer, place.staging, 100)
        one.take("engine")
        yield one
        one.close()


def refused(work: Work, path: Path) -> str:
    """What is said of a sample whose engine announces, again and again, what is not there."""
    found: list[str] = []

    def is_refused() -> bool:
        try:
            if work.take("engine"):
                work.staged("engine", SAMPLES[0], str(path))
        except ValueError as error:
            found.append(str(error))
        return bool(found)

    work.staged("engine", SAMPLES[0], str(path))
    wait_until(is_refused)
    return found[0]


def test_a_full_disk_leaves_no_file_and_the_sample_is_named(place: Workplace, work: Work) -> None:
    staging = Staging(place.staging, place.journal)
    path, lock = staging.begin()
    path.with_suffix(".tmp").symlink_to("/dev/full")
    done = Done()
    done.event.set()
    ids = SAMPLES[0].input_ids.tolist()
    with pytest.raises(OSError, match="No space left on device"):
        _write(path, SPEC, torch.tensor(ids), states_of(ids), done, lock)
    assert not path.exists()
    assert not is_locked(path)
    assert refused(work, path) == (
        f"sample {SAMPLES[0].sample_key[:12]} (3 tokens): the engine wrote nothing to {path}; "
        "see its log"
    )


def test_a_disk_that_fills_up_within_a_file_leaves_none_that_looks_whole(
    place: Workplace,
) -> None:
    ids = list(range(2000))
    one = sample(ids, [1])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    staging, done = Staging(place.staging, place.journal), Done()
    done.event.set()
    try:
        # 2,001 tokens x 16 bytes and a header: the limit lies within the states
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        path, lock = staging.begin()
        tokens = one.input_ids.tolist()
        with pytest.raises(OSError, match="File too large"):
            _write(path, SPEC, torch.tensor(tokens), states_of(tokens), done, lock)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not path.exists()
    assert path.with_suffix(".tmp").stat().st_size > 0
    assert adopt(place.staging, place.store, 10**6) == 0
    assert place.staged() == []


def test_a_failed_copy_gives_the_lock_up(place: Workplace) -> None:
    class Failed:
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    path, lock = Staging(place.staging, place.journal).begin()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _write(path, SPEC, torch.tensor([1]), states_of([1]), Failed(), lock)
    assert not is_locked(path)
    assert not path.exists()


def test_a_failed_write_is_told_in_the_engines_log(
    connector: HiddenStatesConnector, place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(
        "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector.logger.error",
        lambda *arguments: told.append(arguments),
    )
    path, ids = place.staging / "a.safetensors", SAMPLES[0].input_ids.tolist()
    path.with_suffix(".tmp").symlink_to("/dev/full")
    connector._kv_cache = torch.zeros(10, BLOCK, 2, 3, dtype=torch.bfloat16)
    submit(connector, path, ids, [0], lock=True)
    wait_until(lambda: told)
    assert "No space left on device" in str(told[0])
