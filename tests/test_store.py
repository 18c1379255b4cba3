import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specmill.compaction import compact
from specmill.files import read_json
from specmill.manifest import MANIFEST, Manifest
from specmill.shards import Piece, StateSpec, read_shard
from specmill.store import INDEX, HiddenStateStore
from specmill.writer import ShardWriter
from tests.stored import BF16, FP8, TOKEN, add, expected, flip, piece, sample_key, shards
from tests.workspace import ROOT

A, B, C, D, E = ([number, number + 1] for number in (10, 20, 30, 40, 50))
"""Samples of 2 tokens, 40 bytes each in both specs."""


def keys(*samples: list[int]) -> list[str]:
    return [sample_key(ids) for ids in samples]


def filled(folder: Path, *groups: list[list[int]], spec: StateSpec = BF16) -> HiddenStateStore:
    """A store with a shard for each group of samples."""
    store = HiddenStateStore(folder)
    for samples in groups:
        add(store, spec, samples)
    return store


def write(writer: ShardWriter, folder: Path, *samples: list[int], spec: StateSpec = BF16) -> None:
    for ids in samples:
        writer.add(piece(folder, spec, ids))


# what is in it


def test_a_store_and_the_same_store_opened_again_hold_what_was_added(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A, B], [C])
    for one in (store, HiddenStateStore(tmp_path / "store")):
        assert one.contents() == expected(BF16, [A, B, C])
        assert [one.holds(BF16, key) for key in keys(A, B, C, D)] == [True, True, True, False]
        assert one.check(one.shards) == []
    with pytest.raises(KeyError, match=sample_key(D)):
        store.pieces(BF16, keys(A, D))


@pytest.mark.parametrize(
    "changed",
    [{"verifier": "other"}, {"layer_ids": (2, 5)}, {"hidden_size": 8}, {"dtype": FP8.dtype}],
)
def test_another_verifier_or_layer_set_or_width_or_dtype_never_mixes(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    other = replace(BF16, **changed)
    store = filled(tmp_path / "store", [A, B])
    assert not store.holds(other, sample_key(A))
    with pytest.raises(KeyError):
        store.write_view(tmp_path / "view", other, keys(A), 1000)
    add(store, other, [A])
    for one in (store, HiddenStateStore(tmp_path / "store")):
        assert one.contents() == expected(BF16, [A, B]) | expected(other, [A])
        assert not one.holds(other, sample_key(B))
    assert [shard.spec for shard in store.shards.values()] == [BF16, other]


def test_stores_are_equal_when_keys_and_checksums_are_however_samples_are_grouped(
    tmp_path: Path,
) -> None:
    one = filled(tmp_path / "one", [A, B, C])
    two = filled(tmp_path / "two", [C], [B, A])
    assert one.contents() == two.contents()
    assert set(one.shards).isdisjoint(two.shards)
    assert one.contents() != filled(tmp_path / "three", [A, B]).contents()
    assert one.contents() != filled(tmp_path / "four", [A, B, C], spec=FP8).contents()


def test_the_files_are_shards_and_one_small_index_whatever_the_number_of_samples(
    tmp_path: Path,
) -> None:
    store = filled(tmp_path / "store", [[number] for number in range(100)])
    (name,) = store.shards
    assert sorted(os.listdir(store.folder)) == sorted([".lock", INDEX, name])
    # two hashes of 64 digits a sample, and a few characters
    assert (store.folder / INDEX).stat().st_size < 100 * 150 + 400


def test_an_empty_store_holds_nothing_and_has_no_files(tmp_path: Path) -> None:
    store = HiddenStateStore(tmp_path / "store")
    with store.writer(BF16, 1000):
        pass
    assert store.contents() == {}
    assert store.drop_damaged(BF16, keys(A)) == 0
    assert compact(store, 1000) == (0, 0)
    assert os.listdir(store.folder) == []


# filling


def test_the_writer_closes_a_shard_when_it_is_full_and_the_rest_at_the_end(tmp_path: Path) -> None:
    store = HiddenStateStore(tmp_path / "store")
    with store.writer(BF16, 2 * 2 * TOKEN) as writer:
        write(writer, tmp_path / "made", A, B, C, D, E)
    groups = [[row.sample_key for row in shard.rows] for shard in store.shards.values()]
    assert groups == [keys(A, B), keys(C, D), keys(E)]
    assert shards(store.folder) == sorted(store.shards)


def test_finished_samples_are_kept_when_the_block_raises(tmp_path: Path) -> None:
    store = HiddenStateStore(tmp_path / "store")

    def interrupted() -> None:
        with store.writer(BF16, 10**6) as writer:
            write(writer, tmp_path / "made", A, B)
            raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        interrupted()
    assert HiddenStateStore(tmp_path / "store").contents() == expected(BF16, [A, B])


def failing(_: list[Piece]) -> None:
    raise OSError("No space left on device")


def test_a_failure_in_the_background_is_raised_by_the_next_shard(tmp_path: Path) -> None:
    writer = ShardWriter(failing, BF16, shard_bytes=1)
    write(writer, tmp_path, A)
    with pytest.raises(OSError, match="No space left"):
        write(writer, tmp_path, B)
    with pytest.raises(OSError, match="No space left"):
        writer.close()


def test_a_failure_in_the_background_is_raised_at_the_end_of_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HiddenStateStore(tmp_path / "store")
    monkeypatch.setattr(store, "add", lambda _, pieces: failing(pieces))

    def fill() -> None:
        with store.writer(BF16, 1) as writer:
            write(writer, tmp_path, A)

    with pytest.raises(OSError, match="No space left"):
        fill()


def test_staged_files_are_deleted_once_their_shard_is_safe_and_other_sources_never(
    tmp_path: Path,
) -> None:
    staged, kept = piece(tmp_path, BF16, A), piece(tmp_path, BF16, B)
    may_end, seen = threading.Event(), []

    def slow(pieces: list[Piece]) -> None:
        may_end.wait()
        seen.append([one.file.is_file() for one in pieces])

    writer = ShardWriter(slow, BF16, shard_bytes=4 * TOKEN)
    writer.add(staged, staged=True)
    writer.add(kept)
    assert staged.file.is_file()
    may_end.set()
    writer.close()
    assert seen == [[True, True]]
    assert not staged.file.exists()
    assert kept.file.is_file()


def test_staged_files_outlive_a_shard_that_could_not_be_written(tmp_path: Path) -> None:
    staged = piece(tmp_path, BF16, A)
    writer = ShardWriter(failing, BF16, shard_bytes=1)
    writer.add(staged, staged=True)
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    assert staged.file.is_file()


def test_shards_are_written_one_at_a_time(tmp_path: Path) -> None:
    may_end, running, most = threading.Event(), [], []

    def slow(pieces: list[Piece]) -> None:
        running.append(pieces)
        most.append(len(running))
        may_end.wait()
        running.remove(pieces)

    writer = ShardWriter(slow, BF16, shard_bytes=1)
    write(writer, tmp_path, A)
    threading.Timer(0.01, may_end.set).start()
    write(writer, tmp_path, B, C)  # waits for the timer
    writer.close()
    assert most == [1, 1, 1]


# growing, shrinking, reordering


def extracted(store: HiddenStateStore, samples: list[list[int]]) -> list[str]:
    """What the extract stage does; the names of the shards that are new."""
    before = set(shards(store.folder))
    missing = [ids for ids in samples if not store.holds(BF16, sample_key(ids))]
    with store.writer(BF16, 4 * TOKEN) as writer:
        write(writer, store.folder.parent / "made", *missing)
    view = store.folder.parent / "view"
    shutil.rmtree(view, ignore_errors=True)  # DVC does
    store.write_view(view, BF16, keys(*samples), 4 * TOKEN)
    return sorted(set(shards(store.folder)) - before)


def test_a_dataset_that_grows_adds_only_new_shards(tmp_path: Path) -> None:
    store = HiddenStateStore(tmp_path / "store")
    assert len(extracted(store, [A, B, C])) == 2
    old = {name: os.stat(store.folder / name) for name in shards(store.folder)}
    (new,) = extracted(store, [D, A, B, C, E])
    assert [row.sample_key for row in store.shards[new].rows] == keys(D, E)
    for name, stat in old.items():
        now = os.stat(store.folder / name)
        assert (now.st_ino, now.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    assert shards(tmp_path / "view") == sorted([new, *old])


def test_a_dataset_that_shrinks_or_is_reordered_adds_no_shard(tmp_path: Path) -> None:
    store = HiddenStateStore(tmp_path / "store")
    extracted(store, [A, B, C, D])
    assert extracted(store, [D, B, A, C]) == []
    assert list(Manifest(tmp_path / "view").places) == keys(D, B, A, C)
    assert extracted(store, [C, A, B]) == []  # half of the shard of C and D is used
    assert len(shards(tmp_path / "view")) == 2
    assert extracted(store, [A, B]) == []
    assert len(shards(tmp_path / "view")) == 1
    assert extracted(store, [A, B, C, D]) == []


def test_a_view_that_uses_less_than_half_of_a_shard_gets_a_shard_of_its_own_once(
    tmp_path: Path,
) -> None:
    store = filled(tmp_path / "store", [A, B, C])
    (new,) = extracted(store, [C])
    assert [row.sample_key for row in store.shards[new].rows] == keys(C)
    assert shards(tmp_path / "view") == [new]
    assert extracted(store, [C]) == []
    # all of the first shard again: as if there had been no copy
    assert extracted(store, [A, B, C]) == []
    assert shards(tmp_path / "view") == [next(iter(store.shards))]
    assert store.contents() == expected(BF16, [A, B, C])


def test_half_is_counted_in_tokens(tmp_path: Path) -> None:
    long = [1, 2, 3, 4, 5]
    store = filled(tmp_path / "store", [A, B, long])  # 2 + 2 + 5 tokens
    assert extracted(store, [long]) == []
    assert len(extracted(store, [A, B])) == 1


# views


def test_a_view_holds_hard_links_to_the_shards_it_needs_and_no_others(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A], [B], [C])
    store.write_view(tmp_path / "view", BF16, keys(C, A), 1000)
    a, _, c = store.shards
    assert shards(tmp_path / "view") == sorted([a, c])
    for name in (a, c):
        assert (tmp_path / "view" / name).samefile(store.folder / name)
    assert sorted(os.listdir(tmp_path / "view")) == sorted([MANIFEST, a, c])


def test_the_manifest_says_what_and_where_in_dataset_order(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A, B], [C])
    store.write_view(tmp_path / "view", BF16, keys(C, B, A), 1000)
    first, second = store.shards
    names = sorted([first, second])
    header = len(store.shards[first].header)
    checksums = expected(BF16, [A, B, C])
    assert read_json(tmp_path / "view" / MANIFEST) == {
        "format": 2,
        "verifier": "fingerprint",
        "layer_ids": [2, 4],
        "hidden_size": 4,
        "dtype": "bfloat16",
        "online": False,
        "shards": names,
        "samples": [
            [key, 2, checksums[BF16.store_key(key)], names.index(name), offset]
            for key, name, offset in zip(
                keys(C, B, A),
                [second, first, first],
                [len(store.shards[second].header), header + 2 * TOKEN, header],
                strict=True,
            )
        ],
    }


def test_equal_views_of_equal_stores_are_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        store = filled(tmp_path / name / "store", [A, B], [C])
        store.write_view(tmp_path / name / "view", BF16, keys(B, C), 1000)
    manifests = [(tmp_path / name / "view" / MANIFEST).read_bytes() for name in ("one", "two")]
    assert manifests[0] == manifests[1]
    assert shards(tmp_path / "one" / "view") == shards(tmp_path / "two" / "view")


def test_a_sample_that_is_twice_in_the_dataset_is_copied_once(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A, B, C, D])
    store.write_view(tmp_path / "view", BF16, keys(A, A), 1000)
    (name,) = shards(tmp_path / "view")
    assert [row.sample_key for row in read_shard(tmp_path / "view" / name).rows] == keys(A)
    assert list(Manifest(tmp_path / "view").places) == keys(A)


def test_a_view_is_written_again_over_itself_and_leaves_nothing_behind(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A, B])
    for _ in range(2):
        store.write_view(tmp_path / "view", BF16, keys(A, B), 1000)
    assert sorted(os.listdir(tmp_path / "view")) == sorted([MANIFEST, *store.shards])


def test_a_view_across_file_systems_holds_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("Invalid cross-device link")

    store = filled(tmp_path / "store", [A])
    monkeypatch.setattr(os, "link", refuse)
    store.write_view(tmp_path / "view", BF16, keys(A), 1000)
    (name,) = shards(tmp_path / "view")
    assert not (tmp_path / "view" / name).samefile(store.folder / name)
    assert (tmp_path / "view" / name).read_bytes() == (store.folder / name).read_bytes()
    assert sorted(os.listdir(tmp_path / "view")) == sorted([MANIFEST, name])


def test_a_shard_from_elsewhere_is_linked_or_refused_before_it_gets_a_name(tmp_path: Path) -> None:
    (name,) = filled(tmp_path / "other", [A, B]).shards
    store = HiddenStateStore(tmp_path / "store")
    flip(tmp_path / "other" / name, 20)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        store.link(tmp_path / "other" / name)
    assert shards(store.folder) == []
    flip(tmp_path / "other" / name, 20)
    store.link(tmp_path / "other" / name)
    assert (store.folder / name).samefile(tmp_path / "other" / name)
    assert HiddenStateStore(tmp_path / "store").contents() == expected(BF16, [A, B])


# damage


def data_at(store: HiddenStateStore, sample: list[int], spec: StateSpec = BF16) -> tuple[Path, int]:
    (found,) = store.pieces(spec, [sample_key(sample)])
    return found.file, found.offset


def test_a_flipped_bit_loses_its_sample_and_the_others_of_its_shard_are_kept(
    tmp_path: Path,
) -> None:
    store = filled(tmp_path / "store", [A, B, C], [D])
    file, offset = data_at(store, B)
    flip(file, offset + 2 * TOKEN - 1)
    (damage,) = store.check(store.shards)
    assert (damage.name, damage.what) == (file.name, "samples")
    assert [row.sample_key for row in damage.rows] == keys(B)
    assert [(spec, row.sample_key) for spec, row in store.lost([damage])] == [(BF16, *keys(B))]
    assert store.drop_damaged(BF16, keys(A, B, C, D, E)) == 1
    for one in (store, HiddenStateStore(tmp_path / "store")):
        assert one.contents() == expected(BF16, [A, C, D])
        assert one.check(one.shards) == []
    assert not file.exists()
    add(store, BF16, [B])
    assert store.contents() == expected(BF16, [A, B, C, D])


def test_a_damaged_header_loses_nothing_because_the_index_knows_the_places(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A, B], [C])
    file, offset = data_at(store, A)
    for at in (0, 7, 8, offset // 2, offset - 1):  # length field, JSON, and its padding
        flip(file, at)
        store = HiddenStateStore(tmp_path / "store")
        (damage,) = store.check(store.shards)
        assert (damage.what, damage.rows) == ("header", ())
        assert store.drop_damaged(BF16, keys(A, B, C)) == 0
        assert store.check(store.shards) == []
        assert read_shard(file)
        assert HiddenStateStore(tmp_path / "store").contents() == expected(BF16, [A, B, C])


def test_a_shard_cut_within_a_sample_loses_that_and_what_follows(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A, B, C])
    file, offset = data_at(store, B)
    file.chmod(0o644)
    os.truncate(file, offset + 1)
    (damage,) = store.check(store.shards)
    assert (damage.what, [row.sample_key for row in damage.rows]) == ("header", keys(B, C))
    assert store.drop_damaged(BF16, keys(A, B, C)) == 2
    assert store.contents() == expected(BF16, [A])


def test_a_missing_shard_is_damage_until_it_is_dropped(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A, B], [C])
    (store.folder / next(iter(store.shards))).unlink()
    store = HiddenStateStore(tmp_path / "store")
    assert store.contents() == expected(BF16, [C])
    (damage,) = store.check(store.shards)
    assert (damage.what, [row.sample_key for row in damage.rows]) == ("missing", keys(A, B))
    store.drop_damaged(BF16, keys(C))
    add(store, BF16, [B, A])
    store = HiddenStateStore(tmp_path / "store")
    assert store.check(store.shards) == []
    assert store.contents() == expected(BF16, [A, B, C])


def test_a_sample_with_a_whole_copy_is_not_lost(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A, B], [B, C])
    file, offset = data_at(store, B)
    flip(file, offset)
    damages = store.check(store.shards)
    assert store.lost(damages) == []
    assert store.drop_damaged(BF16, keys(A, B, C)) == 0
    assert store.contents() == expected(BF16, [A, B, C])
    assert store.check(store.shards) == []


def test_a_copy_that_takes_the_place_of_a_damaged_sample_is_checked_too(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A, B], [B, C])
    for name in list(store.shards):
        shard = store.shards[name]
        (found,) = (p for p in shard.pieces(store.folder / name) if p.row.sample_key in keys(B))
        flip(found.file, found.offset)
    assert [row.sample_key for _, row in store.lost(store.check(store.shards))] == keys(B)
    assert store.drop_damaged(BF16, keys(B)) == 1
    assert store.contents() == expected(BF16, [A, C])


def test_a_file_changed_in_place_through_the_link_of_a_view_is_noticed(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A, B])
    store.write_view(tmp_path / "view", BF16, keys(A, B), 1000)
    file, offset = data_at(store, A)
    flip(tmp_path / "view" / file.name, offset)
    assert [damage.what for damage in store.check(store.shards)] == ["samples"]
    assert store.drop_damaged(BF16, keys(A, B)) == 1
    add(store, BF16, [A])
    store.write_view(tmp_path / "view", BF16, keys(A, B), 1000)
    for path in Manifest(tmp_path / "view").files(keys(A, B)):
        assert path.samefile(store.folder / path.name)
        assert read_shard(path)


def test_a_file_that_is_no_shard_is_not_used_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(tmp_path / "store", [A])
    (store.folder / "no shard.safetensors").write_bytes(b"hello")
    store = HiddenStateStore(tmp_path / "store")
    assert store.unreadable == ["no shard.safetensors"]
    assert "no shard.safetensors is damaged or no shard" in caplog.text
    assert store.contents() == expected(BF16, [A])


def corrupt(folder: Path, noise: random.Random) -> bool:
    """Do something bad to one file; whether it was the index."""
    names = shards(folder)
    is_index = noise.random() < 0.15
    path = folder / (INDEX if is_index else noise.choice(names))
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    at = noise.randrange(len(content))
    kind = noise.choice(["flip", "flip", "truncate", "append", "delete", "swap", "zero"])
    if kind == "delete":
        path.unlink()
        return is_index
    if kind == "swap" and not is_index:
        other = folder / noise.choice([name for name in names if name != path.name])
        content, swapped = bytearray(other.read_bytes()), content
        other.chmod(0o644)
        other.write_bytes(swapped)
    elif kind == "flip":
        content[at] ^= 1 << noise.randrange(8)
    elif kind == "truncate":
        del content[at:]
    elif kind == "append":
        content += noise.randbytes(1 + noise.randrange(50))
    else:
        end = min(len(content), at + 1 + noise.randrange(100))
        content[at:end] = bytes(end - at)
    path.write_bytes(content)
    return is_index


def test_200_random_corruptions_are_found_or_harmless_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # for speed
    noise = random.Random(20)
    samples = [[number] * noise.randint(1, 9) for number in range(1, 19)]
    original = HiddenStateStore(tmp_path / "original")
    for start in range(0, 18, 6):
        add(original, BF16, samples[start : start + 6])
        add(original, FP8, samples[start + 2 : start + 5])
    contents = original.contents()
    by_key = {sample_key(ids): ids for ids in samples}
    held = {spec: list(here) for spec, here in original.places.items()}
    counts = {"index": 0, "found": 0, "harmless": 0}
    for case in range(200):
        folder = tmp_path / str(case) / "store"
        shutil.copytree(original.folder, folder)
        before = {name: (folder / name).read_bytes() for name in shards(folder)}
        is_index = corrupt(folder, noise)
        store = HiddenStateStore(folder)
        damages = store.check(list(store.shards))
        lost = {(spec, row.sample_key) for spec, row in store.lost(damages)}
        if is_index or before == {name: (folder / name).read_bytes() for name in shards(folder)}:
            assert (damages, store.unreadable) == ([], []), case
            assert store.contents() == contents, case
        else:
            assert damages, case
        counts["index" if is_index else "found" if damages else "harmless"] += 1
        for spec, all_keys in held.items():
            store.drop_damaged(spec, all_keys)
        left = {(spec, key) for spec, here in store.places.items() for key in here}
        everything = {(spec, key) for spec, all_keys in held.items() for key in all_keys}
        assert everything - left == lost, case
        for spec in held:
            if mine := [
                by_key[key] for lost_spec, key in sorted(lost, key=str) if lost_spec == spec
            ]:
                add(store, spec, mine)
        mended = HiddenStateStore(folder)
        assert mended.contents() == contents, case
        assert (mended.check(list(mended.shards)), mended.unreadable) == ([], []), case
        shutil.rmtree(folder.parent)
    assert counts["index"] > 20
    assert counts["found"] > 150


def test_an_unknown_shard_with_a_damaged_header_costs_its_samples_and_nothing_else(
    tmp_path: Path,
) -> None:
    # index and header are both damaged, so nobody knows what was there
    store = filled(tmp_path / "store", [A], [B])
    (name, _) = store.shards
    (store.folder / INDEX).unlink()
    flip(store.folder / name, 30)
    store = HiddenStateStore(tmp_path / "store")
    assert store.unreadable == [name]
    assert store.contents() == expected(BF16, [B])
    add(store, BF16, [A])  # the same shard again
    store = HiddenStateStore(tmp_path / "store")
    assert store.unreadable == []
    assert store.contents() == expected(BF16, [A, B])


# crashes


def dies(folder: Path, code: str) -> None:
    """Run code on a store in a process of its own, which must die by SIGKILL."""
    head = """
        import os, signal, sys
        from pathlib import Path
        from specmill import index, shard_writing
        from specmill.store import HiddenStateStore
        from tests.stored import BF16, FP8, add

        def die(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        store = HiddenStateStore(Path(sys.argv[1]))
    """
    script = textwrap.dedent(head) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script, folder], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == -9, done.stderr


@pytest.mark.parametrize(
    ("when", "code", "is_kept"),
    [
        ("before the shard is renamed", "os.replace = die", False),
        ("while the shard is written", "shard_writing._copy = die", False),
        ("between the shard and its line", "index.append = die", True),
        (
            "within the line",
            """
            def cut(line):
                with open(store.folder / "index.jsonl", "ab") as handle:
                    handle.write(whole(line)[:100])
                die()

            whole, index._line = index._line, cut
            """,
            True,
        ),
    ],
)
def test_a_kill_while_a_shard_is_added_costs_at_most_that_shard(
    tmp_path: Path, when: str, code: str, is_kept: bool
) -> None:
    filled(tmp_path / "store", [A, B])
    dies(tmp_path / "store", textwrap.dedent(code) + f"\nadd(store, BF16, [{C}])")
    store = HiddenStateStore(tmp_path / "store")
    assert store.contents() == expected(BF16, [A, B, C] if is_kept else [A, B]), when
    assert (store.check(store.shards), store.unreadable) == ([], [])
    add(store, BF16, [C, D])
    store = HiddenStateStore(tmp_path / "store")
    assert store.contents() == expected(BF16, [A, B, C, D])
    assert store.check(store.shards) == []


@pytest.mark.parametrize("step", ["store.forget = die", "Path.unlink = die", "index.rewrite = die"])
def test_a_kill_while_a_damaged_shard_is_replaced_loses_only_what_was_damaged(
    tmp_path: Path, step: str
) -> None:
    store = filled(tmp_path / "store", [A, B, C])
    file, offset = data_at(store, B)
    flip(file, offset)
    dies(tmp_path / "store", f"{step}\nstore.drop_damaged(BF16, list(store.places[BF16]))")
    store = HiddenStateStore(tmp_path / "store")
    store.drop_damaged(BF16, keys(A, B, C))
    assert store.contents() == expected(BF16, [A, C])


@pytest.mark.parametrize("step", ["store.forget = die", "Path.unlink = die", "os.replace = die"])
def test_a_kill_while_the_store_is_compacted_loses_nothing(tmp_path: Path, step: str) -> None:
    filled(tmp_path / "store", [A, B], [B, C], [D])
    dies(
        tmp_path / "store",
        f"{step}\nfrom specmill.compaction import compact; compact(store, 10**6)",
    )
    store = HiddenStateStore(tmp_path / "store")
    assert store.check(store.shards) == []
    assert store.contents() == expected(BF16, [A, B, C, D])
    assert compact(store, 10**6)[1] == 1
    assert store.contents() == expected(BF16, [A, B, C, D])


@pytest.mark.parametrize("num_bytes", [0, 1, 100, -1, -100])
def test_an_index_that_is_cut_is_made_again_from_the_shards(
    tmp_path: Path, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(tmp_path / "store", [A, B], [C])
    content = (store.folder / INDEX).read_bytes()
    (store.folder / INDEX).write_bytes(content[:num_bytes])
    assert HiddenStateStore(tmp_path / "store").contents() == expected(BF16, [A, B, C])
    caplog.clear()
    assert HiddenStateStore(tmp_path / "store").contents() == expected(BF16, [A, B, C])
    assert caplog.text == ""


def test_an_index_that_is_missing_is_made_again_from_the_shards(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A, B], [C])
    content = (store.folder / INDEX).read_text()
    (store.folder / INDEX).unlink()
    assert HiddenStateStore(tmp_path / "store").contents() == expected(BF16, [A, B, C])
    made = (store.folder / INDEX).read_text()
    assert sorted(made.splitlines()) == sorted(content.splitlines())


def test_two_processes_that_add_at_once_both_keep_everything(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from specmill.store import HiddenStateStore
        from tests.stored import BF16, FP8, add

        store = HiddenStateStore(Path(sys.argv[1]))
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(int(sys.argv[2]), int(sys.argv[2]) + 25):
            add(store, BF16, [[number]])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "store")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    start = partial(subprocess.Popen, cwd=ROOT, text=True, **pipes)
    processes = [start([*command, first]) for first in ("0", "25")]
    for process in processes:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert len((tmp_path / "store" / INDEX).read_text().splitlines()) == 50
    store = HiddenStateStore(tmp_path / "store")
    assert store.contents() == expected(BF16, [[number] for number in range(50)])
    assert (store.check(store.shards), store.unreadable) == ([], [])


# compaction


def test_compaction_merges_small_shards_drops_copies_and_keeps_contents(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A], [B], [A, B], [C], [D], [E])
    add(store, FP8, [A])
    add(store, FP8, [B])
    contents = store.contents()
    assert contents == expected(BF16, [A, B, C, D, E]) | expected(FP8, [A, B])
    assert compact(store, 10**6) == (8, 2)
    for one in (store, HiddenStateStore(tmp_path / "store")):
        assert one.contents() == contents
        assert [len(shard.rows) for shard in one.shards.values()] == [5, 2]
        assert one.check(one.shards) == []
    assert shards(store.folder) == sorted(store.shards)


def test_compaction_leaves_shards_that_are_large_and_fully_used_alone(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A, B], [C, D], [D], [E])
    size = next(iter(store.shards.values())).num_bytes
    first, *_ = store.shards
    # D counts in its younger shard, so the second one is not fully used
    assert compact(store, 2 * size) == (4, 2)
    assert first in store.shards
    assert sorted(len(shard.rows) for shard in store.shards.values()) == [2, 3]
    assert store.contents() == expected(BF16, [A, B, C, D, E])


def test_compaction_twice_changes_nothing_more(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A], [B, C], [C])
    compact(store, 10**6)
    names = shards(store.folder)
    assert compact(store, 10**6) == (1, 1)
    assert compact(HiddenStateStore(tmp_path / "store"), 10**6) == (1, 1)
    assert shards(store.folder) == names


def test_compaction_forgets_shards_that_are_gone(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A], [B], [C])
    add(store, FP8, [A])
    for name in list(store.shards)[2:]:
        (store.folder / name).unlink()
    store = HiddenStateStore(tmp_path / "store")
    assert compact(store, 10**6) == (4, 1)
    assert HiddenStateStore(tmp_path / "store").contents() == expected(BF16, [A, B])


def test_compaction_keeps_what_is_whole_of_a_cut_shard(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [A, B], [C])
    file, offset = data_at(store, B)
    file.chmod(0o644)
    os.truncate(file, offset + 1)
    compact(store, 10**6)
    assert store.contents() == expected(BF16, [A, C])
    assert HiddenStateStore(tmp_path / "store").contents() == expected(BF16, [A, C])
