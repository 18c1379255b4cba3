"""What somebody who wants the store to lose data or to lie has tried."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from specmill import store_commands
from specmill.compaction import compact
from specmill.extract import extract_missing
from specmill.manifest import Manifest
from specmill.params import Runtime
from specmill.samples import check_apart
from specmill.shards import Piece, Row
from specmill.staging import adopt
from specmill.store import HiddenStateStore
from specmill.writer import ShardWriter
from tests.fakes import sample
from tests.stored import BF16, TOKEN, add, expected, flip, sample_key

SAMPLES = [[i, i + 1, i + 2] for i in range(20)]


def keys(samples: list[list[int]]) -> list[str]:
    return [sample_key(ids) for ids in samples]


@pytest.fixture
def store(tmp_path: Path) -> HiddenStateStore:
    return HiddenStateStore(tmp_path / "store")


def command(store: HiddenStateStore, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """The exit status of `python -m specmill.store`, or its message."""
    monkeypatch.setattr("sys.argv", ["store", "--store", str(store.folder), *words])
    with pytest.raises(SystemExit) as ended:
        store_commands.main()
    return ended.value.code


def test_states_of_another_verifier_are_not_trained_on(
    store: HiddenStateStore, tmp_path: Path
) -> None:
    add(store, BF16, SAMPLES)
    store.write_view(tmp_path / "view", BF16, keys(SAMPLES), 1000)
    view = Manifest(tmp_path / "view")
    view.check_verifier({"fingerprint": "fingerprint", "name": "ours"})
    with pytest.raises(ValueError, match=r"states of verifier fingerprint, .* is of theirs"):
        view.check_verifier({"fingerprint": "another", "name": "theirs"})


def test_a_manifest_that_says_other_layers_than_its_shards_is_refused(
    store: HiddenStateStore, tmp_path: Path
) -> None:
    add(store, BF16, SAMPLES)
    store.write_view(tmp_path / "view", BF16, keys(SAMPLES), 1000)
    manifest = tmp_path / "view/manifest.json"
    manifest.write_text(manifest.read_text().replace("[2,4]", "[3,4]", 1))
    with pytest.raises(ValueError, match="other states than"):
        Manifest(tmp_path / "view").require(keys(SAMPLES))


@pytest.mark.parametrize("content", ["[]", "5", "null", '"x"'])
def test_a_manifest_that_is_no_object_is_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match="is damaged"):
        Manifest(tmp_path)


@pytest.mark.parametrize("words", [("compact", "--shard-mib", "1"), ("gc",), ("add",)])
def test_nothing_is_removed_or_added_while_an_extraction_is_at_work(
    store: HiddenStateStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    words: tuple[str, ...],
) -> None:  # fmt: skip
    add(store, BF16, SAMPLES)
    store.write_view(tmp_path / "view", BF16, keys(SAMPLES), 1000)
    if words[0] == "gc":
        words = (*words, "--yes", "--keep", str(tmp_path / "view"))
    if words[0] == "add":
        words = (*words, str(tmp_path / "view"))
    with HiddenStateStore.alone(store.folder):
        said = command(store, monkeypatch, *words)
    assert "another process holds" in said
    assert command(store, monkeypatch, *words) == 0


def damaged_copy(store: HiddenStateStore) -> None:
    """Samples 5 to 9 lie in two shards; the younger is damaged within sample 9."""
    add(store, BF16, SAMPLES[:10])
    younger = add(store, BF16, SAMPLES[5:15])
    at = len(store.shards[younger].header) + 4 * 3 * TOKEN
    flip(store.folder / younger, at + 20)


def test_compaction_keeps_the_whole_copy_of_a_damaged_sample(store: HiddenStateStore) -> None:
    damaged_copy(store)
    compact(store, 10**6)
    assert store.check(store.shards) == []
    assert store.contents() == expected(BF16, SAMPLES[:15])


def test_gc_keeps_the_whole_copy_of_a_damaged_sample(
    store: HiddenStateStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    add(store, BF16, SAMPLES[:10])
    younger = add(store, BF16, SAMPLES[5:15])
    store.write_view(tmp_path / "view", BF16, keys(SAMPLES[5:15]), 1000)
    (tmp_path / "view" / younger).unlink()
    at = len(store.shards[younger].header) + 4 * 3 * TOKEN
    flip(store.folder / younger, at + 20)
    assert command(store, monkeypatch, "gc", "--yes", "--keep", str(tmp_path / "view")) == 0
    left = HiddenStateStore(store.folder)
    assert left.check(left.shards) == []
    assert expected(BF16, SAMPLES[5:15]).items() <= left.contents().items()


def test_going_back_and_forth_between_two_datasets_adds_nothing_after_the_first_time(
    store: HiddenStateStore, tmp_path: Path
) -> None:
    add(store, BF16, SAMPLES)
    manifests: dict[int, bytes] = {}
    sizes = []
    for _ in range(5):
        for count in (20, 5):
            store.write_view(tmp_path / "view", BF16, keys(SAMPLES[:count]), 1000)
            manifest = (tmp_path / "view/manifest.json").read_bytes()
            assert manifests.setdefault(count, manifest) == manifest
        sizes.append(sum(f.stat().st_size for f in store.folder.glob("*.safetensors")))
    assert len(set(sizes)) == 1


def test_a_view_written_again_keeps_no_shard_that_it_does_not_need(
    store: HiddenStateStore, tmp_path: Path
) -> None:
    add(store, BF16, SAMPLES[:10])
    second = add(store, BF16, SAMPLES[10:])
    store.write_view(tmp_path / "view", BF16, keys(SAMPLES), 1000)
    store.write_view(tmp_path / "view", BF16, keys(SAMPLES[10:]), 1000)
    assert [f.name for f in (tmp_path / "view").glob("*.safetensors")] == [second]


def test_a_shard_behind_a_symbolic_link_is_taken_as_a_file(
    store: HiddenStateStore, tmp_path: Path
) -> None:
    name = add(store, BF16, SAMPLES)
    cache = tmp_path / "cache"
    cache.mkdir()
    shutil.move(store.folder / name, cache / name)
    (store.folder / name).symlink_to(os.path.relpath(cache / name, store.folder))
    other = HiddenStateStore(tmp_path / "other")
    other.link(store.folder / name)
    HiddenStateStore(store.folder).write_view(tmp_path / "view", BF16, keys(SAMPLES), 1000)
    shutil.rmtree(cache)
    Manifest(tmp_path / "view").require(keys(SAMPLES))
    assert other.check(other.shards) == []


def test_a_store_that_cannot_be_written_to_can_be_read(
    store: HiddenStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = add(store, BF16, SAMPLES)
    (store.folder / "index.jsonl").unlink()
    flip(store.folder / name, -10)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.chdir(store.folder.parent)
    monkeypatch.setattr("specmill.index.rewrite", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    read = HiddenStateStore(store.folder)
    assert read.contents() == expected(BF16, SAMPLES)
    assert command(store, monkeypatch, "verify") == 1


@pytest.mark.parametrize("value", ["1", "true", "yes", " 1"])
def test_extraction_is_forbidden_by_any_value_but_nothing_and_zero(
    store: HiddenStateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SPECMILL_NO_EXTRACT", value)
    with pytest.raises(ValueError, match="SPECMILL_NO_EXTRACT forbids extraction here"):
        extract_missing(
            [sample([1], [2, 3])], BF16, store, lambda _: pytest.fail("an engine was started"),
            shard_bytes=1000, staging=tmp_path / "staging", window=10,
        )  # fmt: skip


def test_what_no_engine_stages_is_left_alone_in_the_staging_folder(
    store: HiddenStateStore, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    (staging / "folder.safetensors").mkdir(parents=True)
    name = add(store, BF16, SAMPLES)
    shutil.copy(store.folder / name, staging / name)
    assert adopt(staging, store, 1000) == 0
    assert (staging / name).is_file()


def test_a_shard_is_written_before_its_header_is_too_large_to_read() -> None:
    written: list[int] = []
    writer = ShardWriter(lambda pieces: written.append(len(pieces)), BF16, 10**12)
    one = Piece(Row("key", 1, "checksum"), Path("never read"), 0)
    for _ in range(50_001):
        writer.add(one)
    writer.close()
    assert written == [50_000, 1]


RUNTIME: dict[str, Any] = {
    "cpu_kv_cache_gib": 1, "gpu_memory_utilization": 0.5, "request_concurrency": 1,
    "prepare_engines": 1,
    "extract_window": 1, "extract_engines": 1, "train_processes": 1, "data_workers": 0,
    "startup_timeout_s": 1, "request_timeout_s": 1, "tracking_uri": None, "register_head": None,
}  # fmt: skip


def test_endpoints_are_kept_without_their_last_slash() -> None:
    urls = ["http://127.0.0.1:8001/", "https://127.0.0.1", "http://127.0.0.1:80"]
    assert Runtime(**RUNTIME, extract_endpoints=urls).extract_endpoints == [
        "http://127.0.0.1:8001", "https://127.0.0.1", "http://127.0.0.1:80",
    ]  # fmt: skip


HOST = "http://127.0.0.1"


@pytest.mark.parametrize(
    "urls",
    [
        ["127.0.0.1:8001"],
        ["ftp:" + HOST[5:]],
        [HOST + ":1", HOST + ":1/"],
        *([HOST + rest] for rest in (":99999", ":-1", ":0", " b", "?x", "#f", "/v1", "\n")),
    ],
)
def test_what_is_no_server_or_twice_the_same_is_refused(urls: list[str]) -> None:
    with pytest.raises(ValueError, match="extract_endpoints"):
        Runtime(**RUNTIME, extract_endpoints=urls)


def test_held_out_samples_that_are_trained_on_are_refused() -> None:
    one, two = sample([1], [2, 3]), sample([1], [2, 4])
    check_apart([one], [two])
    with pytest.raises(ValueError, match=f"1 held-out samples .* {two.sample_key[:12]}"):
        check_apart([one, two], [two])
