"""What engines have staged on its way into the store."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specmill.samples import Sample
from specmill.shards import Piece
from specmill.staging import Work, adopt, being_written, is_locked
from specmill.states import stage
from tests.fakes import sample
from tests.staging_fakes import (
    DEADLINE_S,
    SAMPLES,
    SPEC,
    FakeEngine,
    Staging,
    Workplace,
    contents_of,
    kept_in,
    numbered,
    shards_in,
    states_of,
    wait_until,
)

OTHER = dataclasses.replace(SPEC, verifier="another verifier")


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    (tmp_path / "staging").mkdir()
    return Workplace(tmp_path)


def put(place: Workplace, one: Sample, name: str, **changes: Any) -> Path:
    """Stage a sample as `name`.safetensors."""
    path, ids = place.staging / f"{name}.safetensors", one.input_ids.tolist()
    stage(path, dataclasses.replace(SPEC, **changes), torch.tensor(ids), states_of(ids))
    return path


def test_staged_samples_are_adopted_under_the_spec_they_were_staged_with(
    place: Workplace,
) -> None:
    put(place, SAMPLES[0], "a")
    put(place, SAMPLES[1], "b", verifier="another verifier")
    put(place, SAMPLES[2], "c")
    assert adopt(place.staging, place.store, 10**6) == 3
    assert place.store.contents() == {
        **contents_of([SAMPLES[0], SAMPLES[2]]),
        **contents_of([SAMPLES[1]], OTHER),
    }
    assert place.staged() == []


def test_adopted_samples_fill_shards_together(place: Workplace) -> None:
    samples = numbered(50)
    for number, one in enumerate(samples):
        put(place, one, str(number))
    assert adopt(place.staging, place.store, 10**6) == 50
    assert len(shards_in(place.folder / "store")) == 1
    assert place.store.contents() == contents_of(samples)


def test_adopted_samples_fill_more_than_one_shard_when_they_are_too_much_for_one(
    place: Workplace,
) -> None:
    for number, one in enumerate(SAMPLES):
        put(place, one, str(number))
    # 3 tokens x (2 layers x 3 x 2 bytes + 4) = 48 bytes a sample
    adopt(place.staging, place.store, 96)
    assert len(shards_in(place.folder / "store")) == 3


def test_a_sample_that_is_staged_twice_is_adopted_once(place: Workplace) -> None:
    for name in ("a", "b", "c"):
        put(place, SAMPLES[0], name)
    assert adopt(place.staging, place.store, 10**6) == 1
    assert list(kept_in(place.folder / "store")) == [SAMPLES[0].sample_key]
    assert place.staged() == []


def test_what_the_store_has_already_is_not_adopted_but_deleted(place: Workplace) -> None:
    put(place, SAMPLES[0], "a")
    adopt(place.staging, place.store, 10**6)
    put(place, SAMPLES[0], "b")
    assert adopt(place.staging, place.store, 10**6) == 0
    assert len(shards_in(place.folder / "store")) == 1
    assert place.staged() == []


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_file_that_was_cut_is_deleted(
    place: Workplace, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = put(place, SAMPLES[0], "a")
    path.write_bytes(path.read_bytes()[:length])
    assert adopt(place.staging, place.store, 10**6) == 0
    assert place.staged() == []
    assert "a.safetensors is damaged" in caplog.text


def test_free_locks_and_what_failed_writes_left_are_deleted(place: Workplace) -> None:
    for name in ("a.tmp", "a.safetensors.lock", "b.error", "b.safetensors.lock", "c.tmp"):
        (place.staging / name).write_text("left")
    assert adopt(place.staging, place.store, 10**6) == 0
    assert place.staged() == []


def test_the_staging_folder_is_made_if_need_be(tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    assert adopt(place.staging, place.store, 10**6) == 0
    assert place.staged() == []


def test_adoption_waits_for_what_is_still_being_written(place: Workplace) -> None:
    writing = Staging(place.staging, place.journal)
    path, lock = writing.begin()
    assert being_written(place.staging) == [path]
    gained: list[int] = []
    adoption = threading.Thread(
        target=lambda: gained.append(adopt(place.staging, place.store, 10**6))
    )
    adoption.start()
    adoption.join(0.2)
    assert adoption.is_alive()
    assert gained == []
    writing.write(path, lock, SAMPLES[0].input_ids.tolist())
    adoption.join(DEADLINE_S)
    assert gained == [1]
    assert place.store.contents() == contents_of(SAMPLES[:1])
    assert place.staged() == []


def test_adoption_that_does_not_wait_leaves_alone_what_is_still_being_written(
    place: Workplace,
) -> None:
    writing = Staging(place.staging, place.journal)
    path, lock = writing.begin()
    path.with_suffix(".tmp").write_text("half of it")
    put(place, SAMPLES[1], "whole")
    assert adopt(place.staging, place.store, 10**6, wait=False) == 1
    assert place.staged() == [f"{path.name}.lock", path.with_suffix(".tmp").name]
    assert is_locked(path)
    writing.write(path, lock, SAMPLES[0].input_ids.tolist())
    assert not is_locked(path)
    assert adopt(place.staging, place.store, 10**6, wait=False) == 1
    assert place.store.contents() == contents_of(SAMPLES[:2])


class Writer:
    """Stands for a ShardWriter."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.num_tokens = 0
        self.before: Callable[[], None] = lambda: None

    def add(self, piece: Piece, *, staged: bool) -> None:
        self.before()
        assert staged
        self.keys.append(piece.row.sample_key)
        self.num_tokens += piece.row.num_tokens


@pytest.fixture
def writer() -> Writer:
    return Writer()


@pytest.fixture
def make(place: Workplace, writer: Writer) -> Iterator[Callable[..., Work]]:
    """Makes the work on samples, of 3 tokens each unless others are given."""
    made: list[Work] = []

    def make_work(window: int = 1000, samples: list[Sample] = SAMPLES) -> Work:
        made.append(Work(samples, SPEC, writer, place.staging, window))  # type: ignore[arg-type]
        return made[-1]

    yield make_work
    for work in made:
        work.close()


def take_all(work: Work, engine: str) -> list[Sample]:
    taken = []
    while one := work.take(engine):
        taken.append(one)
    return taken


def work_keys(samples: list[Sample]) -> list[str]:
    return [one.sample_key for one in samples]


def test_an_engine_gets_samples_until_its_window_is_full(make: Callable[..., Work]) -> None:
    # 3 + 3 tokens reach neither 7 nor 8, 9 do
    assert take_all(make(7), "a") == SAMPLES[:3]
    assert take_all(make(6), "a") == SAMPLES[:2]
    assert take_all(make(1), "a") == SAMPLES[:1]


def test_every_engine_has_a_window_of_its_own(make: Callable[..., Work]) -> None:
    work = make(6)
    assert take_all(work, "a") == SAMPLES[:2]
    assert take_all(work, "b") == SAMPLES[2:4]


def test_a_sample_longer_than_the_window_is_handed_out_alone(make: Callable[..., Work]) -> None:
    long = sample([1] * 50, [2])
    work = make(6, [long, *SAMPLES])
    assert take_all(work, "a") == [long]


def test_a_window_has_room_again_only_when_a_sample_is_filed(
    make: Callable[..., Work], place: Workplace, writer: Writer
) -> None:
    is_written = threading.Event()
    writer.before = lambda: wait_until(is_written.is_set)
    work = make(6)
    take_all(work, "a")
    work.staged("a", SAMPLES[0], str(put(place, SAMPLES[0], "a")))
    assert work.take("a") is None
    is_written.set()
    wait_until(lambda: writer.keys)
    wait_until(lambda: take_all(work, "a") == [SAMPLES[2]])


def test_what_is_given_back_is_handed_out_first_and_frees_the_window(
    make: Callable[..., Work],
) -> None:
    work = make(6)
    assert take_all(work, "a") == SAMPLES[:2]
    work.give_back("a", SAMPLES[:2])
    assert set(work_keys(take_all(work, "b"))) == set(work_keys(SAMPLES[:2]))
    assert take_all(work, "a") == SAMPLES[2:4]


def test_what_is_filed_meanwhile_is_not_handed_out_again(
    make: Callable[..., Work], place: Workplace
) -> None:
    work = make()
    take_all(work, "a")
    put(place, SAMPLES[1], "a")
    work.pick_up().result(DEADLINE_S)
    work.give_back("a", SAMPLES)
    left = [SAMPLES[0], *SAMPLES[2:]]
    assert sorted(work_keys(take_all(work, "b"))) == sorted(work_keys(left))


def test_a_sample_is_filed_once_however_often_it_is_staged(
    make: Callable[..., Work], place: Workplace, writer: Writer
) -> None:
    work = make(samples=SAMPLES[:2])
    take_all(work, "a")
    work.staged("a", SAMPLES[0], str(put(place, SAMPLES[0], "a")))
    work.staged("b", SAMPLES[0], str(put(place, SAMPLES[0], "b")))
    put(place, SAMPLES[0], "c")
    work.pick_up().result(DEADLINE_S)
    work.staged("a", SAMPLES[1], str(put(place, SAMPLES[1], "d")))
    wait_until(lambda: work.is_done)
    assert writer.keys == work_keys(SAMPLES[:2])


def test_only_what_was_asked_for_is_picked_up(
    make: Callable[..., Work], place: Workplace, writer: Writer
) -> None:
    put(place, SAMPLES[0], "another verifier", verifier="another verifier")
    put(place, sample([99], [98]), "another sample")
    put(place, SAMPLES[1], "ours")
    (place.staging / "cut.safetensors").write_bytes(b"cut")
    work = make()
    work.pick_up().result(DEADLINE_S)
    assert writer.keys == [SAMPLES[1].sample_key]
    left = [f"{name}.safetensors" for name in ("another sample", "another verifier", "ours")]
    assert place.staged() == left


def test_what_is_deleted_while_it_is_picked_up_is_passed_over(
    make: Callable[..., Work], place: Workplace, writer: Writer
) -> None:
    # listed, and not there any more
    (place.staging / "a.safetensors").symlink_to(place.staging / "deleted")
    put(place, SAMPLES[0], "b")
    make().pick_up().result(DEADLINE_S)
    assert writer.keys == [SAMPLES[0].sample_key]


def failure(work: Work) -> BaseException:
    """What goes wrong while filing, as both ways of asking raise it."""
    found: list[BaseException] = []

    def has_failed() -> bool:
        try:
            assert not work.is_done
        except (ValueError, RuntimeError, KeyError) as error:
            found.append(error)
        return bool(found)

    wait_until(has_failed)
    with pytest.raises(type(found[0])) as raised:
        work.take("a")
    assert raised.value is found[0]
    return found[0]


NAME = f"sample {SAMPLES[0].sample_key[:12]} (3 tokens)"


def test_another_verifier_is_refused(make: Callable[..., Work], place: Workplace) -> None:
    work = make()
    path = put(place, SAMPLES[0], "a", verifier="another verifier")
    work.staged("a", SAMPLES[0], str(path))
    message = str(failure(work))
    assert message.startswith(f"{NAME}: the engine gave StateSpec(verifier='another verifier'")
    assert "asked for was StateSpec(verifier='fingerprint'" in message


def test_other_token_ids_are_refused(make: Callable[..., Work], place: Workplace) -> None:
    work = make()
    work.staged("a", SAMPLES[0], str(put(place, SAMPLES[1], "a")))
    assert str(failure(work)) == f"{NAME}: the engine computed other token ids than were sent"


def test_what_the_engine_says_about_a_failed_write_is_passed_on(
    make: Callable[..., Work], place: Workplace
) -> None:
    work = make()
    (place.staging / "a.error").write_text("hidden states hold NaN or infinity")
    work.staged("a", SAMPLES[0], str(place.staging / "a.safetensors"))
    assert str(failure(work)) == f"{NAME}: hidden states hold NaN or infinity"


def test_a_file_of_another_connector_is_refused_with_the_sample(
    make: Callable[..., Work], place: Workplace
) -> None:
    work = make()
    path = place.staging / "a.safetensors"
    path.write_bytes(b"\2\0\0\0\0\0\0\0{}")
    work.staged("a", SAMPLES[0], str(path))
    assert str(failure(work)).startswith(f"{NAME}: {path} is damaged or no shard of this version")


def test_a_file_that_is_not_there_is_asked_for_once_more_and_then_refused(
    make: Callable[..., Work], place: Workplace
) -> None:
    work, path = make(3), place.staging / "a.safetensors"
    assert take_all(work, "a") == SAMPLES[:1]
    work.staged("a", SAMPLES[0], str(path))
    wait_until(lambda: take_all(work, "a") == SAMPLES[:1])
    work.staged("a", SAMPLES[0], str(path))
    assert str(failure(work)) == f"{NAME}: the engine wrote nothing to {path}; see its log"


@pytest.mark.parametrize("told", ["elsewhere/a.safetensors", "staging/../elsewhere/a.safetensors"])
def test_a_path_outside_the_staging_folder_is_refused_and_left_alone(
    make: Callable[..., Work], place: Workplace, told: str
) -> None:
    work = make()
    elsewhere = put(place, SAMPLES[0], "a").rename(place.folder / "a.safetensors")
    (place.folder / "elsewhere").mkdir()
    elsewhere = elsewhere.rename(place.folder / "elsewhere/a.safetensors")
    (place.folder / "elsewhere/a.safetensors.lock").touch()
    work.staged("a", SAMPLES[0], f"{place.folder}/{told}")
    assert f"{NAME}: the engine stages in {elsewhere.parent}, not in {place.staging}" in str(
        failure(work)
    )
    assert sorted(path.name for path in elsewhere.parent.iterdir()) == [
        "a.safetensors",
        "a.safetensors.lock",
    ]


def test_a_link_that_leads_out_of_the_staging_folder_is_refused(
    make: Callable[..., Work], place: Workplace
) -> None:
    work = make()
    elsewhere = put(place, SAMPLES[0], "a").rename(place.folder / "a.safetensors")
    (place.staging / "b.safetensors").symlink_to(elsewhere)
    work.staged("a", SAMPLES[0], str(place.staging / "b.safetensors"))
    assert f"the engine stages in {place.folder}, not in" in str(failure(work))
    assert elsewhere.is_file()


def test_nobody_waits_for_a_lock_outside_the_staging_folder(
    make: Callable[..., Work], place: Workplace
) -> None:
    work = make()
    elsewhere = place.folder / "elsewhere"
    elsewhere.mkdir()
    path, lock = Staging(elsewhere, place.journal).begin()
    assert work.is_written(str(path))
    inside, inner_lock = Staging(place.staging, place.journal).begin()
    assert not work.is_written(str(inside))
    Staging(place.staging, place.journal).write(inside, inner_lock, [1], "nothing")
    assert work.is_written(str(inside))
    Staging(elsewhere, place.journal).write(path, lock, [1], "nothing")


def test_the_staging_folder_may_be_named_through_a_link(
    make: Callable[..., Work], place: Workplace, writer: Writer
) -> None:
    put(place, SAMPLES[0], "a")
    (place.folder / "link").symlink_to(place.staging)
    work = make(samples=SAMPLES[:1])
    work.staged("a", SAMPLES[0], str(place.folder / "link" / "a.safetensors"))
    wait_until(lambda: work.is_done)
    work.pick_up().result(DEADLINE_S)
    assert writer.keys == work_keys(SAMPLES[:1])


@pytest.mark.parametrize("error", [KeyError("a bug"), RuntimeError("a bug"), ValueError("full")])
def test_whatever_goes_wrong_while_filing_is_raised_to_the_engines(
    make: Callable[..., Work], place: Workplace, writer: Writer, error: Exception
) -> None:
    def fail() -> None:
        raise error

    writer.before = fail
    work = make()
    work.staged("a", SAMPLES[0], str(put(place, SAMPLES[0], "a")))
    assert failure(work) is error


def test_filing_waits_for_the_engine_to_let_go_of_its_lock(
    make: Callable[..., Work], place: Workplace, writer: Writer
) -> None:
    work, writing = make(samples=SAMPLES[:1]), Staging(place.staging, place.journal)
    path, lock = writing.begin()
    work.staged("a", SAMPLES[0], str(path))
    assert not work.is_done
    writing.write(path, lock, SAMPLES[0].input_ids.tolist())
    wait_until(lambda: work.is_done)
    assert place.staged() == [path.name]  # and no lock; a ShardWriter deletes the file itself


def test_work_that_is_closed_hands_nothing_out_and_files_what_is_staged(
    make: Callable[..., Work], place: Workplace, writer: Writer
) -> None:
    work = make()
    for number, one in enumerate(SAMPLES[:3]):
        work.staged("a", one, str(put(place, one, str(number))))
    work.close()
    assert writer.keys == work_keys(SAMPLES[:3])
    assert work.take("a") is None
    assert work.is_done


def test_the_bar_counts_tokens_to_its_total(
    make: Callable[..., Work], place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    work = make()  # 5 samples of 3 tokens, 16 bytes each
    for number, one in enumerate(SAMPLES[:4]):
        work.staged("a", one, str(put(place, one, str(number))))
    put(place, SAMPLES[4], "4")
    work.pick_up().result(DEADLINE_S)
    work.close()
    last = capsys.readouterr().err.rpartition("\r")[2]
    assert "hidden states: 100%" in last
    assert "15.0/15.0" in last
    assert "0.00 of 0.00 GB" in last


def test_the_fake_engine_holds_a_requests_lock_until_it_has_written(place: Workplace) -> None:
    engine = FakeEngine(place.staging, delay_s=0.01)
    params = type("Params", (), {"max_tokens": 1})
    ids = SAMPLES[0].input_ids.tolist()
    engine.add_request(SAMPLES[0].sample_key, {"prompt_token_ids": ids}, params)
    (path,) = being_written(place.staging)
    (output,) = engine.step()
    assert output.kv_transfer_params == {"hidden_states_path": str(path)}
    wait_until(lambda: not being_written(place.staging))
    assert path.is_file()
    engine.shut_down()
