"""Engines that compute hidden states: one inside the process, and servers over HTTP."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from specmill import engines
from specmill.engines import work_here
from specmill.extract_engines import extraction_settings
from specmill.params import Runtime
from specmill.params_parallel import Parallel
from specmill.samples import Sample
from specmill.server import Server
from specmill.shards import FP8, Piece, StateSpec
from specmill.staging import Work
from tests.fakes import sample
from tests.staging_fakes import (
    DEADLINE_S,
    SAMPLES,
    SPEC,
    FakeEngine,
    FakeServer,
    Workplace,
    at,
    contents_of,
    kept_in,
    numbered,
    states_of,
    wait_until,
)

NAMES = [f"sample {one.sample_key[:12]} (3 tokens)" for one in SAMPLES]

VERIFIER = {"max_model_len": 64, "dtype": "float32"}


@pytest.fixture(scope="module", autouse=True)
def _vllm_is_imported() -> None:
    """It takes seconds, which no deadline below is to include."""
    from vllm import SamplingParams
    from vllm.v1.engine.exceptions import EngineDeadError

    assert SamplingParams
    assert EngineDeadError


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECMILL_API_KEY", raising=False)


def promptly(function: Callable[[], Any]) -> Any:
    """What a function returns or raises; fails when it hangs."""
    outcome: Future[Any] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 - handed over
            outcome.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return outcome.result(DEADLINE_S)


def here(engine: FakeEngine) -> Callable[[Work], None]:
    """Work done by an engine of this process, which is shut down at the end."""

    def run(work: Work) -> None:
        try:
            work_here(engine, work)
        finally:
            engine.shut_down()

    return run


def keys(samples: list[Sample]) -> set[str]:
    return {one.sample_key for one in samples}


class SlowWriter:
    """Stands for a ShardWriter on a slow disk."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def add(self, piece: Piece, *, staged: bool) -> None:
        time.sleep(0.002)
        self.num_tokens += piece.row.num_tokens


def test_an_engine_of_this_process_computes_every_sample(place: Workplace) -> None:
    samples = numbered(60)
    engine = place.engine(delay_s=0.003)
    assert place.extract(here(engine), samples) == sum(len(one.input_ids) for one in samples)
    assert engine.asked == [one.sample_key for one in samples]
    assert place.store.contents() == contents_of(samples)
    found = kept_in(place.folder / "store")
    for one in samples:
        ids, states = found[one.sample_key]
        assert ids == one.input_ids.tolist()
        assert states.equal(states_of(ids))
    assert place.staged() == []


def test_an_engine_is_never_more_than_a_window_ahead_of_slow_filing(place: Workplace) -> None:
    samples, writer, engine = numbered(80), SlowWriter(), place.engine()
    ahead: list[int] = []
    engine.before_step = lambda _: ahead.append(engine.num_asked_tokens - writer.num_tokens)
    work = Work(samples, SPEC, writer, place.staging, 40)  # type: ignore[arg-type]
    promptly(lambda: work_here(engine, work))
    work.close()
    # 39 tokens under way, and one sample of at most 9 besides
    assert 9 < max(ahead) <= 48
    assert writer.num_tokens == engine.num_asked_tokens == work.num_tokens
    engine.shut_down()


def test_servers_are_never_more_than_a_window_ahead_of_slow_filing(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, writer = numbered(80), SlowWriter()
    lengths = {one.sample_key: len(one.input_ids) for one in samples}
    ahead: list[int] = []
    with place.server().serve() as server:
        work = Work(samples, SPEC, writer, place.staging, 40)  # type: ignore[arg-type]
        take = work.take

        def watched(url: str) -> Sample | None:
            # what is handed out here is asked for before the next is
            asked = sum(lengths[key] for key in list(server.asked))
            ahead.append(asked - writer.num_tokens)
            return take(url)

        monkeypatch.setattr(work, "take", watched)
        promptly(lambda: at(server.url)(work))
        work.close()
    assert 9 < max(ahead) <= 48
    assert writer.num_tokens == work.num_tokens


def dead(_: int) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    raise EngineDeadError()


def test_an_engine_that_dies_keeps_what_it_had_finished(place: Workplace) -> None:
    engine = place.engine()
    engine.before_step = lambda number: dead(number) if number == 2 else None
    with pytest.raises(RuntimeError, match=r"the engine died .* run the same command again"):
        promptly(lambda: place.extract(here(engine)))
    assert place.kept() == keys(SAMPLES[:4])  # two samples a step
    second = place.engine()
    assert place.extract(here(second)) == 3
    assert second.asked == [SAMPLES[4].sample_key]
    assert place.store.contents() == contents_of(SAMPLES)


def test_an_engine_whose_core_was_killed_while_it_was_waited_for_has_died(
    place: Workplace,
) -> None:
    engine = place.engine()

    def killed(number: int) -> None:
        if number == 1:
            engine.engine_core.resources.engine_dead = True
            time.sleep(10 * DEADLINE_S)  # as vLLM's `step` does then, for ever

    engine.before_step = killed
    with pytest.raises(RuntimeError, match=r"the engine died .*core process is gone"):
        promptly(lambda: place.extract(here(engine)))
    assert place.kept() == keys(SAMPLES[:2])


def test_an_engine_that_dies_before_it_has_written_what_it_announced_has_died(
    place: Workplace,
) -> None:
    engine = place.engine()
    engine.how = dict.fromkeys(keys(SAMPLES), "nothing")
    engine.before_step = lambda number: dead(number) if number == 1 else None
    with pytest.raises(RuntimeError, match="the engine died"):
        promptly(lambda: place.extract(here(engine)))
    assert place.extract(here(place.engine())) == 15
    assert place.store.contents() == contents_of(SAMPLES)


def test_an_engine_that_dies_when_it_is_asked_has_died(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = place.engine()
    monkeypatch.setattr(engine, "add_request", lambda *_: dead(0))
    with pytest.raises(RuntimeError, match="the engine died"):
        promptly(lambda: place.extract(here(engine)))


def test_what_an_engine_finds_wrong_with_a_request_is_raised(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("longer than the maximum model length")

    engine = place.engine()
    monkeypatch.setattr(engine, "add_request", refuse)
    with pytest.raises(ValueError, match="longer than the maximum model length"):
        promptly(lambda: place.extract(here(engine)))


WRONG = [
    ("other ids", "the engine computed other token ids than were sent"),
    ("NaN", "hidden states hold NaN or infinity"),
    ("other shape", "hidden states are (3, 1, 3), expected (3, 2, 3)"),
    ("nothing", "the engine wrote nothing to "),
]


@pytest.mark.parametrize(("how", "message"), WRONG)
def test_wrong_states_of_an_engine_are_refused_by_sample_and_the_others_are_kept(
    place: Workplace, how: str, message: str
) -> None:
    engine = place.engine()
    engine.how = {SAMPLES[3].sample_key: how}
    with pytest.raises(ValueError, match=r"sample ") as raised:
        promptly(lambda: place.extract(here(engine)))
    assert str(raised.value).startswith(f"{NAMES[3]}: {message}")
    assert keys(SAMPLES[:3]) <= place.kept()
    assert SAMPLES[3].sample_key not in place.kept()
    engine = place.engine()
    assert place.extract(here(engine)) >= 3
    assert not engine.staging.journal.asked_when_finished()
    # what was computed of other ids are states of these ids
    others = [sample([32], [31, 30])] if how == "other ids" else []
    assert place.store.contents() == contents_of([*SAMPLES, *others])


def wait_forever(end: threading.Event) -> None:
    end.wait()


@pytest.fixture
def hanging(place: Workplace) -> Iterator[FakeEngine]:
    """An engine whose third step does not return before the test is over."""
    engine, end = place.engine(), threading.Event()
    engine.before_step = lambda number: wait_forever(end) if number == 2 else None
    yield engine
    end.set()


def test_what_goes_wrong_while_filing_is_raised_although_the_engine_hangs(
    place: Workplace, hanging: FakeEngine
) -> None:
    hanging.how = {SAMPLES[1].sample_key: "NaN"}
    hanging.before_write = lambda key: (
        wait_until(lambda: hanging.num_steps == 3) if key in hanging.how else None
    )
    with pytest.raises(ValueError, match="hold NaN or infinity"):
        promptly(lambda: place.extract(here(hanging)))
    assert place.kept() == keys([SAMPLES[0], *SAMPLES[2:4]])


def test_what_goes_wrong_while_filing_is_raised_although_the_engine_is_idle(
    place: Workplace,
) -> None:
    place.window = 3
    engine = place.engine(delay_s=0.02)
    engine.how = {SAMPLES[1].sample_key: "NaN"}
    with pytest.raises(ValueError, match="hold NaN or infinity"):
        promptly(lambda: place.extract(here(engine)))
    assert engine.asked == [one.sample_key for one in SAMPLES[:2]]


def leave(number: int, _: Any) -> None:
    raise SystemExit(128 + number)  # as specmill.stage does


@pytest.fixture(params=[(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def interrupt(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Sends this process a signal once a condition holds; what that raises in the main thread."""
    number, raised = request.param
    before = signal.signal(signal.SIGTERM, leave)

    def arm(condition: Callable[[], Any]) -> Any:
        def send() -> None:
            wait_until(condition)
            os.kill(os.getpid(), number)

        threading.Thread(target=send, daemon=True).start()
        return pytest.raises(raised)

    yield arm
    signal.signal(signal.SIGTERM, before)


def test_an_interruption_ends_a_hanging_engine_and_keeps_what_was_finished(
    place: Workplace, hanging: FakeEngine, interrupt: Callable[[Callable[[], Any]], Any]
) -> None:
    with interrupt(lambda: hanging.num_steps == 3):
        place.extract(here(hanging))
    assert place.kept() == keys(SAMPLES[:4])
    assert place.extract(here(place.engine())) == 3


def test_an_interruption_ends_work_at_servers_and_keeps_what_was_finished(
    place: Workplace, interrupt: Callable[[Callable[[], Any]], Any]
) -> None:
    with place.server().serve() as server:
        server.how = {SAMPLES[2].sample_key: "hangs", SAMPLES[3].sample_key: "holds its lock"}
        with interrupt(lambda: len(place.journal.keys("staged")) == 3):
            place.extract(at(server.url))
    # the server has ended and has written what it was writing
    with place.server().serve() as server:
        assert place.extract(at(server.url)) == 3
        assert server.asked == [SAMPLES[2].sample_key]
    assert place.store.contents() == contents_of(SAMPLES)


def test_an_interruption_while_a_hanging_server_is_waited_for_ends_at_once(
    place: Workplace,
    interrupt: Callable[[Callable[[], Any]], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with place.server().serve() as server:
        server.how = {SAMPLES[0].sample_key: "holds its lock", SAMPLES[1].sample_key: "500"}
        with interrupt(lambda: "is gone" in caplog.text):
            place.extract(at(server.url))


@pytest.mark.usefixtures("no_key")
def test_two_servers_share_the_work(place: Workplace) -> None:
    samples = numbered(60)
    with place.server().serve() as first, place.server().serve() as second:
        promptly(lambda: place.extract(at(first.url, second.url), samples))
        assert len(first.asked) >= 20
        assert len(second.asked) >= 20
        assert sorted(first.asked + second.asked) == sorted(keys(samples))
        assert first.keys == {None}
    assert place.store.contents() == contents_of(samples)
    assert place.staged() == []


def test_servers_share_even_work_that_one_window_would_hold(place: Workplace) -> None:
    with place.server().serve() as first, place.server().serve() as second:
        promptly(lambda: place.extract(at(first.url, second.url), SAMPLES[:2]))
        assert len(first.asked) == len(second.asked) == 1


@pytest.mark.parametrize("how", ["dead", "staged, then dead", "500", "hangs", "holds its lock"])
@pytest.mark.slow
def test_the_others_take_over_from_a_server_that_dies(place: Workplace, how: str) -> None:
    samples = numbered(60)
    journal = place.journal
    with place.server(seed=1).serve() as first, place.server(seed=2).serve() as second:
        first.dies_at = 10 if how == "dead" else None
        first.how = dict.fromkeys(keys(samples[10:30]), how)
        timeout_s = 3 if how in ("hangs", "holds its lock") else DEADLINE_S
        place.window = 60
        promptly(lambda: place.extract(at(first.url, second.url, timeout_s=timeout_s), samples))
        assert set(first.asked) & keys(samples[10:30])
        assert place.staged() == [] or timeout_s < DEADLINE_S
        assert place.store.contents() == contents_of(samples)
    # a server that hangs stages, in the end, what others have computed meanwhile
    assert not journal.asked_when_finished()
    place.extract(at("http://127.0.0.1:1"), samples)
    assert place.staged() == []


def test_what_a_dead_server_had_staged_without_an_answer_is_not_asked_for_again(
    place: Workplace,
) -> None:
    with place.server().serve() as first, place.server().serve() as second:
        first.how = dict.fromkeys(keys(SAMPLES), "staged, then dead")
        promptly(lambda: place.extract(at(first.url, second.url)))
        assert first.asked
        staged = place.journal.keys("staged")
        assert sorted(staged) == sorted(keys(SAMPLES))
    assert place.store.contents() == contents_of(SAMPLES)


def test_what_a_server_announced_and_died_before_it_wrote_goes_to_the_others(
    place: Workplace,
) -> None:
    with place.server().serve() as first, place.server().serve() as second:
        first.how = dict.fromkeys(keys(SAMPLES), "nothing")
        first.dies_at = 1
        place.window = 3
        promptly(lambda: place.extract(at(first.url, second.url), SAMPLES))
    assert place.store.contents() == contents_of(SAMPLES)


def test_when_every_server_is_dead_the_way_out_is_named_and_what_was_finished_is_kept(
    place: Workplace,
) -> None:
    samples = numbered(60)
    with place.server().serve() as first, place.server().serve() as second:
        first.dies_at, second.dies_at = 8, 12
        place.window = 20
        with pytest.raises(RuntimeError, match=r"specmill\.serve_states\), then run the same"):
            promptly(lambda: place.extract(at(first.url, second.url), samples))
    kept = place.kept()
    assert kept == set(place.journal.keys("staged"))
    assert 0 < len(kept) <= 20
    with place.server().serve() as third:
        place.extract(at(third.url), samples)
        assert sorted(third.asked) == sorted(keys(samples) - kept)
    assert place.store.contents() == contents_of(samples)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_server_that_is_asked_and_says_nothing_is_no_server(place: Workplace) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"names {url}, where no server answers"):
            promptly(lambda: place.extract(at(url, timeout_s=0.5)))


def test_a_server_that_is_not_there_at_the_start_is_named(place: Workplace) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with place.server().serve() as server:
        with pytest.raises(ValueError, match=f"names {url}, where no server answers"):
            promptly(lambda: place.extract(at(server.url, url)))
        assert server.asked == []


def test_a_url_that_is_none_is_named(place: Workplace) -> None:
    url = "//".join(["http:", "[::1"])
    with pytest.raises(ValueError, match="extract_endpoints names http:") as raised:
        promptly(lambda: place.extract(at(url)))
    assert url in str(raised.value)


def test_a_server_that_says_it_is_ill_is_named(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        FakeServer, "_send", lambda fake, handler, status, _: handler.send_error(503)
    )
    with (
        place.server().serve() as server,
        pytest.raises(ValueError, match=rf"names {server.url}, which is not healthy \(503\)"),
    ):
        promptly(lambda: place.extract(at(server.url)))


@pytest.mark.parametrize("status", ["400", "401", "404", "429"])
def test_a_server_that_refuses_is_named_with_the_sample_and_others_are_kept(
    place: Workplace, status: str
) -> None:
    place.window = 3
    with place.server().serve() as server:
        server.how = {SAMPLES[2].sample_key: status}
        with pytest.raises(ValueError, match="refused sample") as raised:
            promptly(lambda: place.extract(at(server.url)))
        assert str(raised.value) == (
            f"{server.url} refused {NAMES[2]} with status {status}: no thanks"
        )
    assert place.kept() == keys(SAMPLES[:2])


@pytest.mark.parametrize("how", ["no states", "no JSON"])
def test_a_server_that_hands_out_no_states_is_named_with_the_way_out(
    place: Workplace, how: str
) -> None:
    with place.server().serve() as server:
        server.how = {SAMPLES[0].sample_key: how}
        with pytest.raises(ValueError, match=r"hands no hidden states out; start it with") as found:
            promptly(lambda: place.extract(at(server.url)))
        assert server.url in str(found.value)
        assert "specmill.serve_states" in str(found.value)


@pytest.mark.parametrize("how", ["elsewhere", "dots"])
def test_a_server_that_stages_elsewhere_is_refused_and_nothing_there_is_touched(
    place: Workplace, how: str
) -> None:
    with place.server().serve() as server:
        (place.folder / "elsewhere.safetensors").write_text("somebody's")
        (place.folder / "elsewhere.safetensors.lock").write_text("somebody's")
        server.how = {SAMPLES[0].sample_key: how}
        with pytest.raises(ValueError, match="the engine stages in") as raised:
            promptly(lambda: place.extract(at(server.url)))
        assert str(raised.value).startswith(f"{NAMES[0]}: ")
        assert "--staging" in str(raised.value)
    for name in ("elsewhere.safetensors", "elsewhere.safetensors.lock"):
        assert (place.folder / name).read_text() == "somebody's"


@pytest.mark.parametrize(("how", "message"), WRONG)
def test_wrong_states_of_a_server_are_refused_by_sample_and_earlier_ones_are_kept(
    place: Workplace, how: str, message: str
) -> None:
    place.window = 3
    with place.server().serve() as server:
        server.how = {SAMPLES[2].sample_key: how}
        with pytest.raises(ValueError, match="sample ") as raised:
            promptly(lambda: place.extract(at(server.url)))
        assert str(raised.value).startswith(f"{NAMES[2]}: {message}")
    assert place.kept() == keys(SAMPLES[:2])


@pytest.mark.parametrize(
    "changed",
    [{"verifier": "another"}, {"layer_ids": (2, 5)}, {"layer_ids": (4, 2)}, {"dtype": FP8}],
)
def test_a_server_that_stages_other_states_is_refused_and_these_are_kept_as_what_they_are(
    place: Workplace, changed: dict[str, Any]
) -> None:
    other = dataclasses.replace(SPEC, **changed)
    with place.server(other).serve() as server:
        with pytest.raises(ValueError, match=r"the engine gave StateSpec") as raised:
            promptly(lambda: place.extract(at(server.url), SAMPLES[:1]))
        assert str(raised.value).startswith(f"{NAMES[0]}: ")
        for value in changed.values():
            assert repr(value) in str(raised.value)
    with place.server().serve() as server:
        assert place.extract(at(server.url), SAMPLES[:1]) == 3
    assert place.store.holds(other, SAMPLES[0].sample_key)
    assert place.store.holds(SPEC, SAMPLES[0].sample_key)
    assert place.staged() == []


def test_what_goes_wrong_while_filing_is_raised_although_a_server_hangs(place: Workplace) -> None:
    class FullDisk:
        def add(self, *_: Any, **__: Any) -> None:
            time.sleep(0.2)  # nothing else is going to happen then
            raise OSError("No space left on device")

    with place.server().serve() as server:
        server.how = {SAMPLES[0].sample_key: "hangs"}
        work = Work(SAMPLES[:2], SPEC, FullDisk(), place.staging, 40)  # type: ignore[arg-type]
        with pytest.raises(OSError, match="No space left on device"):
            promptly(lambda: at(server.url, timeout_s=10 * DEADLINE_S)(work))
        work.close()


def test_the_key_in_the_environment_is_sent_and_no_other(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not this one")
    monkeypatch.setenv("VLLM_API_KEY", "nor this one")
    monkeypatch.setenv("SPECMILL_API_KEY", "mine")
    with place.server().serve() as server:
        place.extract(at(server.url))
        assert server.keys == {"Bearer mine"}


@pytest.mark.usefixtures("no_key")
def test_no_key_is_sent_when_the_environment_has_none(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not this one")
    with place.server().serve() as server:
        place.extract(at(server.url))
        assert server.keys == {None}


def runtime(**changes: Any) -> Runtime:
    values: dict[str, Any] = {
        "cpu_kv_cache_gib": 1,
        "gpu_memory_utilization": 0.5,
        "extract_endpoints": [],
        "extract_engines": 1,
        "request_timeout_s": DEADLINE_S,
    }
    return Runtime.model_construct(**(values | changes))


def test_endpoints_do_the_work_when_there_are_any(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "local_engine", None)
    with place.server().serve() as server:
        chosen = runtime(extract_endpoints=[f"{server.url}/"])
        run = engines.engines(SPEC, Path("verifier"), place.staging, VERIFIER, Parallel(), chosen)
        assert place.extract(run) == 15
        assert len(server.asked) == 5


def test_engines_of_our_own_share_the_work_and_each_is_asked_with_its_key(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "local_engine", None)
    monkeypatch.setattr(engines, "model_path", lambda folder: folder / "model")
    up: list[tuple[Path, list[str], int]] = []
    with (
        place.server(longest_delay_s=0.01).serve() as one,
        place.server(longest_delay_s=0.01).serve() as two,
    ):

        @contextlib.contextmanager
        def own(
            model: Path, flags: list[str], count: int, each: int, _: Runtime, log: Path
        ) -> Iterator[list[Server]]:
            up.append((model, flags, count))
            yield [Server(one.url, "k1", log, 0.0), Server(two.url, "k2", log, 0.0)]

        monkeypatch.setattr(engines, "own_servers", own)
        chosen = runtime(extract_engines=2)
        run = engines.engines(SPEC, Path("verifier"), place.staging, VERIFIER, Parallel(), chosen)
        samples = numbered(40)
        place.window = 20
        assert place.extract(run, samples) == sum(len(each.input_ids) for each in samples)
        assert place.kept() == {each.sample_key for each in samples}
        assert len(one.asked) + len(two.asked) == 40
        assert min(len(one.asked), len(two.asked)) > 5
        assert (one.keys, two.keys) == ({"Bearer k1"}, {"Bearer k2"})
        assert place.extract(run, samples) == 0
    ((model, flags, count),) = up  # nothing was missing the second time: none was started
    assert (model, count) == (Path("verifier/model"), 2)
    transfer = json.loads(flags[flags.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "HiddenStatesConnector"


def test_of_all_that_a_server_is_writing_only_the_oldest_is_looked_at(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty samples written for about 0.4 s, which is 20 looks at one of them and 800 at all."""
    looks = 0
    is_written = Work.is_written

    def count(work: Work, path: str) -> bool:
        nonlocal looks
        found = is_written(work, path)
        looks += not found
        return found

    monkeypatch.setattr(Work, "is_written", count)
    samples = numbered(40)
    place.window = 10**6
    server = place.server(longest_delay_s=0.01)
    server.share_of_slow_writes = 1.0
    with server.serve():
        chosen = runtime(extract_endpoints=[server.url])
        run = engines.engines(SPEC, Path("verifier"), place.staging, VERIFIER, Parallel(), chosen)
        assert place.extract(run, samples) == sum(len(each.input_ids) for each in samples)
    assert 1 <= looks < 200


def test_an_engine_of_this_process_does_the_work_when_there_are_no_endpoints(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def local_engine(model: Path, settings: dict[str, Any], _: Runtime) -> Iterator[FakeEngine]:
        started.append({"model": model, **settings})
        yield place.engine()

    monkeypatch.setattr(engines, "local_engine", local_engine)
    monkeypatch.setattr(engines, "model_path", lambda folder: folder / "model")
    run = engines.engines(SPEC, Path("verifier"), place.staging, VERIFIER, Parallel(), runtime())
    assert started == []
    assert place.extract(run) == 15
    assert [one["model"] for one in started] == [Path("verifier/model")]
    assert (started[0]["max_model_len"], started[0]["dtype"]) == (64, "float32")


def test_the_engine_is_told_what_to_stage_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    settings = extraction_settings(SPEC, Path("staging"), VERIFIER)
    draft = settings["speculative_config"]["draft_model_config"]["hf_config"]
    assert draft == {"eagle_aux_hidden_state_layer_ids": [2, 4]}
    told = settings["kv_transfer_config"]["kv_connector_extra_config"]
    assert told["shared_storage_path"] == "/staging"
    assert StateSpec.of(told["states"]) == SPEC
    # either would leave states out
    assert not settings["enable_prefix_caching"]
    assert not settings["enable_chunked_prefill"]


@pytest.mark.parametrize(("length", "budget"), [(64, 8192), (40960, 40960)])
def test_a_step_has_room_for_the_longest_sample(length: int, budget: int) -> None:
    assert (
        extraction_settings(SPEC, Path("s"), VERIFIER | {"max_model_len": length})[
            "max_num_batched_tokens"
        ]
        == budget
    )
