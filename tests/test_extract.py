"""Extraction of what the store lacks, through everything that may end it."""

import multiprocessing
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from specmill.extract import check_disk
from specmill.samples import Sample
from specmill.shards import FP8, StateSpec
from specmill.staging import Work
from specmill.states import restore
from tests.staging_fakes import (
    DEADLINE_S,
    SAMPLES,
    SPEC,
    FakeServer,
    Workplace,
    at,
    contents_of,
    extract_in_child,
    kept_in,
    numbered,
    serve_in_child,
    shards_in,
    states_of,
    wait_until,
)


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.fixture
def server(place: Workplace) -> Iterator[FakeServer]:
    with place.server().serve() as server:
        yield server


def no_engine(_: Work) -> None:
    pytest.fail("an engine was started")


def keys(samples: list[Sample]) -> list[str]:
    return [one.sample_key for one in samples]


def test_every_sample_gets_the_states_of_its_own_tokens(
    place: Workplace, server: FakeServer
) -> None:
    assert place.extract(at(server.url)) == 15
    found = kept_in(place.folder / "store")
    assert sorted(found) == sorted(keys(SAMPLES))
    for one in SAMPLES:
        ids, states = found[one.sample_key]
        assert ids == one.input_ids.tolist()
        assert states.equal(states_of(ids))
    assert place.staged() == []


def test_states_kept_as_fp8_come_back_within_its_precision(place: Workplace) -> None:
    spec = StateSpec("fingerprint", (2, 4), hidden_size=3, dtype=FP8)
    with place.server(spec).serve() as server:
        place.extract(at(server.url), spec=spec)
    from safetensors.torch import load_file

    (shard,) = shards_in(place.folder / "store")
    tensors = load_file(shard)
    for one in SAMPLES:
        key, sent = one.sample_key, states_of(one.input_ids.tolist())
        kept = restore(tensors[f"states/{key}"], tensors[f"scales/{key}"], sent.dtype)
        assert (kept - sent).abs().max() <= sent.abs().max() / 16


def test_shards_are_closed_at_the_size_asked_for(place: Workplace, server: FakeServer) -> None:
    place.shard_bytes = 96  # two samples: 3 tokens x (2 layers x 3 x 2 bytes + 4) = 48 bytes each
    place.extract(at(server.url))
    assert len(shards_in(place.folder / "store")) == 3


def test_only_what_the_store_lacks_is_extracted(place: Workplace, server: FakeServer) -> None:
    assert place.extract(at(server.url), SAMPLES[1:3]) == 6
    server.asked.clear()
    assert place.extract(at(server.url)) == 9
    assert sorted(server.asked) == sorted(keys([SAMPLES[0], *SAMPLES[3:]]))


def test_a_sample_that_is_listed_twice_is_extracted_once(
    place: Workplace, server: FakeServer
) -> None:
    assert place.extract(at(server.url), [*SAMPLES, *SAMPLES[::-1]]) == 15
    assert sorted(server.asked) == sorted(keys(SAMPLES))


def test_the_same_samples_of_another_verifier_are_extracted(
    place: Workplace, server: FakeServer
) -> None:
    place.extract(at(server.url))
    other = StateSpec("another", (2, 4), hidden_size=3, dtype="bfloat16")
    with place.server(other).serve() as second:
        assert place.extract(at(second.url), spec=other) == 15
    assert place.store.contents() == contents_of(SAMPLES) | contents_of(SAMPLES, other)


def test_no_engine_is_started_when_nothing_is_missing(place: Workplace, server: FakeServer) -> None:
    place.extract(at(server.url))
    assert place.extract(no_engine) == 0
    assert place.extract(no_engine, []) == 0


def test_no_engine_is_started_when_an_earlier_run_has_staged_everything(
    place: Workplace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    writing = place.server().staging
    for one in SAMPLES:
        writing.write(*writing.begin(), one.input_ids.tolist())
    assert place.extract(no_engine) == 0
    assert place.store.contents() == contents_of(SAMPLES)
    assert "5 samples that an earlier run had staged are kept" in caplog.text
    assert place.staged() == []


def test_what_a_killed_run_has_begun_to_write_is_deleted(place: Workplace) -> None:
    begun = place.store.folder / f".{'0' * 32}.tmp"
    begun.write_bytes(b"half a shard")
    assert place.extract(no_engine, []) == 0
    assert not begun.exists()


def test_a_damaged_sample_is_extracted_again(place: Workplace, server: FakeServer) -> None:
    place.extract(at(server.url))
    (shard,) = shards_in(place.folder / "store")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # the last sample's
    shard.chmod(0o644)
    shard.write_bytes(content)
    server.asked.clear()
    assert place.extract(at(server.url)) == 3
    assert len(server.asked) == 1
    assert place.store.contents() == contents_of(SAMPLES)


def test_extraction_is_refused_by_name_where_it_is_forbidden(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECMILL_NO_EXTRACT", "1")
    with pytest.raises(ValueError, match=r"SPECMILL_NO_EXTRACT forbids .*dvc pull extract"):
        place.extract(no_engine)


def test_where_extraction_is_forbidden_a_full_store_will_do(
    place: Workplace, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.extract(at(server.url))
    monkeypatch.setenv("SPECMILL_NO_EXTRACT", "1")
    assert place.extract(no_engine) == 0


def test_extraction_is_forbidden_by_1_alone(
    place: Workplace, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECMILL_NO_EXTRACT", "0")
    assert place.extract(at(server.url)) == 15


def free_space(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=num_bytes))


NEEDED = 15 * (2 * 3 * 2 + 4)  # 15 tokens: 2 layers x 3 wide x 2 bytes, and 4 of the token's id


def test_a_disk_too_small_is_found_before_an_engine_starts(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_space(monkeypatch, NEEDED - 1)
    with pytest.raises(ValueError, match=r"15 tokens x 2 layers x 3 .*lower prepare\.limit"):
        place.extract(no_engine)


def test_a_disk_that_just_holds_the_states_will_do(
    place: Workplace, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_space(monkeypatch, NEEDED)
    assert place.extract(at(server.url)) == 15


def test_a_disk_without_room_for_dvcs_copy_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free_space(monkeypatch, 2 * NEEDED - 1)
    check_disk(SPEC, 15, tmp_path)
    assert "cache.type reflink,hardlink" in caplog.text
    caplog.clear()
    check_disk(SPEC, 14, tmp_path)
    assert caplog.text == ""


def test_a_shard_that_cannot_be_written_ends_the_extraction_and_its_samples_are_kept(
    place: Workplace, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    place.shard_bytes = 48  # a shard a sample
    with monkeypatch.context() as broken:
        broken.setattr(os, "sendfile", full)
        with pytest.raises(OSError, match="No space left on device"):
            place.extract(at(server.url))
    assert shards_in(place.folder / "store") == []
    place.extract(at(server.url))
    assert not place.journal.asked_when_finished()
    assert place.store.contents() == contents_of(SAMPLES)
    assert place.staged() == []


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Makes processes that have imported everything: a start takes no second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "tests.staging_fakes"])
    return context


def scratch_files(place: Workplace) -> list[str]:
    return [path.name for path in place.folder.rglob("*.tmp")]


MANY = numbered(400)


def interrupted(
    place: Workplace,
    server: FakeServer,
    start: Callable[[], BaseProcess],
    signals: list[signal.Signals],
) -> int:
    """Send one extraction after the other a signal at a random moment; how many it ended."""
    chance, ended = random.Random(17), 0
    for number in signals:
        child = start()
        asked = len(server.asked) + chance.choice([0, 0, 1, 3, 6, 10, 15])
        server.wait_for(asked)
        time.sleep(chance.uniform(0, 0.03))
        assert child.pid
        os.kill(child.pid, number)
        child.join(DEADLINE_S)
        assert child.exitcode is not None, "it hangs"
        ended += child.exitcode != 0
        server.settle()
    assert len(place.kept()) < len(MANY)
    last = start()
    last.join(DEADLINE_S)
    assert last.exitcode == 0
    return ended


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGKILL] * 20, [signal.SIGTERM] * 5, [signal.SIGINT] * 5],
    ids=["SIGKILL", "SIGTERM", "SIGINT"],
)
@pytest.mark.slow
def test_an_extraction_that_is_ended_at_any_moment_asks_for_nothing_finished_again(
    place: Workplace, processes: ForkServerContext, signals: list[signal.Signals]
) -> None:
    place.shard_bytes, place.window = 600, 40
    with place.server(longest_delay_s=0.02).serve() as server:
        server.share_of_slow_writes = 0.05

        def start() -> BaseProcess:
            child = processes.Process(target=extract_in_child, args=(place, [server.url], 400))
            child.start()
            return child

        assert interrupted(place, server, start, signals) == len(signals)
    assert place.journal.asked_when_finished() == []
    # what was begun is waited for; only a request that no thread of the server had taken up yet
    # when its client died can be computed twice
    assert len(place.journal.keys("staged")) <= len(MANY) + len(signals)
    assert set(place.journal.keys("staged")) == set(keys(MANY))
    assert place.store.contents() == contents_of(MANY)
    assert place.staged() == []
    assert scratch_files(place) == []


def test_an_undisturbed_extraction_has_the_contents_computed_by_hand(
    place: Workplace, server: FakeServer
) -> None:
    place.shard_bytes, place.window = 600, 40
    place.extract(at(server.url), MANY)
    assert place.store.contents() == contents_of(MANY)
    assert sorted(server.asked) == sorted(keys(MANY))


def answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def kill_when(server: BaseProcess, place: Workplace, num_asked: int) -> None:
    """Kill a server once so many samples were asked for."""
    wait_until(lambda: len(place.journal.keys("asked")) >= num_asked)
    server.kill()
    server.join(DEADLINE_S)


def test_a_server_that_is_killed_ends_the_extraction_which_then_goes_on(
    place: Workplace, processes: ForkServerContext
) -> None:
    place.shard_bytes, place.window = 600, 40
    samples, chance = MANY[:150], random.Random(3)
    with place.server().serve() as one:
        port = int(one.url.rpartition(":")[2])
    for life in range(3):
        server = processes.Process(target=serve_in_child, args=(place, port, life))
        server.start()
        wait_until(lambda: answers(port))
        if life < 2:
            asked = len(place.journal.keys("asked")) + chance.randint(10, 30)
            killer = threading.Thread(target=kill_when, args=(server, place, asked))
            killer.start()
            with pytest.raises(RuntimeError, match=r"none of runtime\.extract_endpoints is left"):
                place.extract(at(f"http://127.0.0.1:{port}"), samples)
            killer.join()
        else:
            place.extract(at(f"http://127.0.0.1:{port}"), samples)
            server.kill()
            server.join(DEADLINE_S)
    assert place.journal.asked_when_finished() == []
    assert place.store.contents() == contents_of(samples)
    assert place.staged() == []
    assert scratch_files(place) == []
