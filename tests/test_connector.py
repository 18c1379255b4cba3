"""What runs inside vLLM: from the blocks of its cache to a staged file."""

import fcntl
import inspect
import os
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    example_hidden_states_connector as example_connector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    ExampleHiddenStatesConnectorMetadata,
    PendingSave,
)

from specmill.connector import HiddenStatesConnector, _write
from specmill.preflight_checks import look_at_connector
from specmill.shards import FP8, StateSpec, read_shard
from specmill.signatures import USES
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
    one._copy_stream = one._buffer = None
    one._accumulated_finished_req_ids = set()
    one._executor = ThreadPoolExecutor(2)
    yield one
    one._executor.shutdown()


Request = tuple[str, list[int], list[int]]
"""Name, token ids, blocks."""


def finish(
    connector: HiddenStatesConnector, folder: Path, requests: list[Request], *, lock: bool = True
) -> Any:
    """Finish requests in one step, as vLLM does, which holds their locks if `lock`."""
    saves = []
    for name, ids, blocks in requests:
        path = folder / f"{name}.safetensors"
        if lock:
            handle = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX)
            connector._lock_fds[name] = handle
        saves.append(PendingSave(name, str(path), torch.tensor(ids), blocks))
    connector.bind_connector_metadata(ExampleHiddenStatesConnectorMetadata(saves))
    return connector.get_finished({name for name, _, _ in requests})


def staged_at(path: Path) -> dict[str, torch.Tensor]:
    """What was staged at a path, by kind, once its lock is free."""
    wait_until(lambda: not is_locked(path) and path.is_file())
    return {name.split("/")[0]: tensor for name, tensor in load_file(path).items()}


def numbers() -> torch.Tensor:
    """A cache [10 blocks, tokens, layers, width] of different numbers, exact in bfloat16."""
    count = torch.arange(10 * BLOCK * 2 * 3)
    return torch.where(count < 120, count, 119 - count).reshape(10, BLOCK, 2, 3).bfloat16()


def by_token(cache: torch.Tensor, block_ids: list[int], num_tokens: int) -> torch.Tensor:
    """States of a request, one token after the other, from a cache [blocks, tokens, layers, _]."""
    rows = [cache[block_ids[token // BLOCK], token % BLOCK] for token in range(num_tokens)]
    return torch.stack(rows)


# vLLM 0.32 shows a block as [layers, tokens, width], 0.26 as [tokens, layers, width]
@pytest.mark.parametrize("layers_first", [True, False])
@pytest.mark.parametrize(
    "block_ids", [[3, 4, 5], [5, 4, 3], [9, 0, 2], [6, 7, 1], [8, 3, 4], [1, 2, 3, 4, 5]]
)
@pytest.mark.parametrize("num_tokens", [1, 4, 9, 12])
def test_the_states_of_a_request_are_gathered_from_its_blocks_in_order(
    connector: HiddenStatesConnector,
    place: Workplace,
    layers_first: bool,
    block_ids: list[int],
    num_tokens: int,
) -> None:
    cache, ids = numbers(), list(range(num_tokens))
    connector._kv_cache = cache.transpose(1, 2) if layers_first else cache
    finish(connector, place.staging, [("a", ids, block_ids)])
    found = staged_at(place.staging / "a.safetensors")
    assert found["ids"].tolist() == ids
    assert torch.equal(found["states"], by_token(cache, block_ids, num_tokens))


def test_of_the_ranks_that_share_a_layer_only_the_first_one_stages(
    connector: HiddenStatesConnector, place: Workplace
) -> None:
    """Under tensor parallelism each worker keeps all states, and has a connector of its own."""
    connector._kv_cache = numbers()
    connector._is_tp_rank_zero = False
    sent, _ = finish(connector, place.staging, [("a", [1] * 5, [7, 2])], lock=False)
    connector._executor.shutdown()
    assert list(place.staging.iterdir()) == []
    assert not sent
    assert connector.get_finished_count() == 1  # the scheduler waits for no other rank


@pytest.mark.parametrize(("rank", "writes"), [(0, True), (1, False), (3, False)])
def test_which_rank_it_is_is_asked_of_vllm_once_caches_are_there(
    connector: HiddenStatesConnector, monkeypatch: pytest.MonkeyPatch, rank: int, writes: bool
) -> None:
    monkeypatch.setattr(example_connector, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(example_connector, "get_layers_from_vllm_config", lambda *_: {"h": None})
    connector._vllm_config = None
    connector.register_kv_caches({"h": numbers().transpose(1, 2)})
    assert connector._is_tp_rank_zero is writes


@pytest.mark.parametrize("layers_first", [True, False])
def test_requests_that_finish_in_one_step_get_the_states_of_their_own_blocks(
    connector: HiddenStatesConnector, place: Workplace, layers_first: bool
) -> None:
    cache = numbers()
    connector._kv_cache = cache.transpose(1, 2) if layers_first else cache
    requests: list[Request] = [
        ("a", [1] * 5, [7, 2]),
        ("b", [2] * 4, [3, 9]),  # the second is for a token that is never computed
        ("c", [3] * 9, [1, 0, 8]),
        ("d", [4], [6]),
    ]
    sent, received = finish(connector, place.staging, requests)
    assert sent == {"a", "b", "c", "d"}  # their blocks may be used again
    assert received is None
    for name, ids, blocks in requests:
        found = staged_at(place.staging / f"{name}.safetensors")
        assert found["ids"].tolist() == ids
        assert torch.equal(found["states"], by_token(cache, blocks, len(ids)))
    # the next step finishes nothing, and stages nothing
    assert finish(connector, place.staging, []) == (None, None)
    wait_until(lambda: not connector._req_futures)
    assert len(list(place.staging.glob("*.safetensors"))) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layers_first", [True, False])
def test_a_gpu_gathers_blocks_through_a_buffer_smaller_than_they_are(
    connector: HiddenStatesConnector, monkeypatch: pytest.MonkeyPatch, layers_first: bool
) -> None:
    cache = numbers()
    monkeypatch.setattr("specmill.connector._BUFFER_BYTES", 2 * cache[0].nbytes)
    connector._kv_cache = (cache.transpose(1, 2) if layers_first else cache).cuda()
    states, done = connector._copy([7, 2, 3, 9, 0])
    done.synchronize()
    assert torch.equal(states, cache[[7, 2, 3, 9, 0]])


class Done:
    """A copy that is done when it is told to be."""

    def __init__(self, *, is_done: bool = False) -> None:
        self.event = threading.Event()
        if is_done:
            self.event.set()

    def query(self) -> bool:
        return self.event.is_set()

    def synchronize(self) -> None:
        assert self.event.wait(DEADLINE_S)


def test_what_was_copied_stays_when_the_engine_uses_its_blocks_again(
    connector: HiddenStatesConnector,
) -> None:
    connector._kv_cache = torch.ones(10, BLOCK, 2, 3)
    states, _ = connector._copy([2, 3])
    connector._kv_cache.zero_()
    assert torch.equal(states, torch.ones(2, BLOCK, 2, 3))


@pytest.mark.parametrize(("blocks", "num_states"), [([], 0), ([1], 4)])
def test_a_request_that_has_lost_its_blocks_leaves_the_reason_instead_of_made_up_states(
    connector: HiddenStatesConnector, place: Workplace, blocks: list[int], num_states: int
) -> None:
    path = place.staging / "a.safetensors"
    connector._kv_cache = torch.zeros(10, BLOCK, 2, 3, dtype=torch.bfloat16)
    finish(connector, place.staging, [("a", [1] * 8, blocks)])
    wait_until(lambda: not is_locked(path))
    reason = path.with_suffix(".error").read_text()
    assert reason == f"hidden states are ({num_states}, 2, 3), expected (8, 2, 3)"
    assert not path.exists()


def test_a_request_that_has_lost_its_blocks_does_not_shift_those_of_others(
    connector: HiddenStatesConnector, place: Workplace
) -> None:
    cache = numbers()
    connector._kv_cache = cache
    finish(connector, place.staging, [("a", [1] * 8, []), ("b", [2] * 3, [5])])
    found = staged_at(place.staging / "b.safetensors")
    assert torch.equal(found["states"], by_token(cache, [5], 3))


def test_a_cache_whose_layout_cannot_be_told_is_refused(connector: HiddenStatesConnector) -> None:
    connector._kv_cache = torch.ones(10, BLOCK, BLOCK, 3)
    with pytest.raises(AssertionError, match="ambiguous cache"):
        connector._copy([1])


@pytest.mark.parametrize("lock", [True, False])
def test_a_finished_request_is_staged_and_its_lock_is_given_up(
    connector: HiddenStatesConnector, place: Workplace, lock: bool
) -> None:
    path, ids = place.staging / "a.safetensors", SAMPLES[0].input_ids.tolist()
    cache = torch.zeros(10, BLOCK, 2, 3, dtype=torch.bfloat16)
    cache[7, :3] = states_of(ids)
    connector._kv_cache = cache.transpose(1, 2)
    finish(connector, place.staging, [("a", ids, [7])], lock=lock)
    staged_at(path)
    wait_until(lambda: not connector._req_futures)
    assert connector._lock_fds == {}
    assert connector._req_copy_events == {}
    adopt(place.staging, place.store, 10**6)
    assert place.store.contents() == contents_of(SAMPLES[:1])


def test_the_lock_is_held_until_the_copy_is_done_and_the_file_is_there(
    connector: HiddenStatesConnector, place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ids, done = place.staging / "a.safetensors", SAMPLES[0].input_ids.tolist(), Done()
    blocks = torch.zeros(1, BLOCK, 2, 3, dtype=torch.bfloat16)
    blocks[0, :3] = states_of(ids)
    monkeypatch.setattr(connector, "_copy", lambda _: (blocks, done))
    assert finish(connector, place.staging, [("a", ids, [0])]) == (None, None)
    assert is_locked(path)
    assert not path.exists()
    done.event.set()
    assert torch.equal(staged_at(path)["states"], states_of(ids))
    assert finish(connector, place.staging, []) == ({"a"}, None)


def test_one_rank_alone_writes(connector: HiddenStatesConnector, place: Workplace) -> None:
    connector._is_tp_rank_zero = False
    finish(connector, place.staging, [("a", [1], [0])], lock=False)
    assert place.staged() == []


def written(place: Workplace, states: torch.Tensor, spec: StateSpec = SPEC) -> Path:
    """Where states of the first sample were written, or not; the lock is free."""
    path, lock = Staging(place.staging, place.journal).begin()
    done = Done(is_done=True)
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
    done = Done(is_done=True)
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
    staging, done = Staging(place.staging, place.journal), Done(is_done=True)
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
    finish(connector, place.staging, [("a", ids, [0])])
    wait_until(lambda: told)
    assert "No space left on device" in str(told[0])


def named(name: str, storage: Path) -> str:
    """The file that a request of this name is staged in."""
    connector = HiddenStatesConnector.__new__(HiddenStatesConnector)
    connector._storage_path, connector.allow_custom_save_path = str(storage), False
    connector._pending_saves, connector._request_filenames = {}, {}
    asked = SimpleNamespace(extra_args={"kv_transfer_params": {"hidden_states_path": "/etc/x"}})
    request = SimpleNamespace(req_id=name, sampling_params=asked)
    output = SimpleNamespace(scheduled_new_reqs=[request])
    metadata = connector.build_connector_meta(output)
    assert metadata.new_req_filenames == connector._request_filenames
    return str(metadata.new_req_filenames[name])


def test_the_name_of_a_request_decides_nothing_about_where_its_states_go(tmp_path: Path) -> None:
    # sent as X-Request-Id
    for name in ("cmpl-x/../../../home/me/.ssh/a", "cmpl-..", "cmpl-" + "a" * 300, "cmpl-a\nb-0"):
        file = Path(named(name, tmp_path))
        assert file.parent == tmp_path
        assert len(file.name) < 250
        assert "\n" not in file.name
    assert named("cmpl-0a1b-0-9f", tmp_path) == f"{tmp_path}/cmpl-0a1b-0-9f.safetensors"
    assert named("cmpl-a/b", tmp_path) != named("cmpl-a/c", tmp_path)


def test_it_takes_what_the_installed_vllm_calls_it_with_as_the_table_says() -> None:
    uses = {use.place.partition(":")[2]: use for use in USES if use.user == "connector.py"}
    made = uses["ExampleHiddenStatesConnector"].passed
    assert made
    inspect.signature(HiddenStatesConnector).bind(*made)
    ours = {name for name, one in vars(HiddenStatesConnector).items() if inspect.isfunction(one)}
    theirs = set(dir(ExampleHiddenStatesConnector)) - set(dir(object))
    overridden = {place.partition(".")[2]: use for place, use in uses.items() if use.overridden}
    assert ours & theirs - {"__init__"} == overridden.keys()
    for name, use in overridden.items():
        parameters = inspect.signature(vars(HiddenStatesConnector)[name]).parameters
        assert tuple(parameters) == ("self", *(use.passed or ()))
    # what nothing calls is for ourselves
    assert all(name.startswith("_") for name in ours - theirs)
    assert look_at_connector() == "vLLM's is as ours uses it"
