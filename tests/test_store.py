import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specmill.files import file_digest, read_json
from specmill.store import (
    MANIFEST,
    HiddenStateStore,
    StateSpec,
    StateView,
    check_states,
    samples_in,
)

SPEC = StateSpec("fingerprint", (2, 4), hidden_size=3, dtype="bfloat16")


def states(num_tokens: int, start: float = 0.0) -> torch.Tensor:
    """[num_tokens, 2 layers, 3]: small whole numbers, which bfloat16 holds exactly."""
    count = torch.arange(num_tokens * 6) + start
    return count.reshape(num_tokens, 2, 3).to(torch.bfloat16)


def filled(folder: Path, *names: str, shard_bytes: int = 1) -> HiddenStateStore:
    """A store with one sample of 2 tokens per name (one shard each, unless shards are larger)."""
    store = HiddenStateStore(folder)
    with store.writer(shard_bytes) as writer:
        for name in names:
            writer.add(SPEC.store_key(name), [len(name), 7], states(2, ord(name[0])))
    return store


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


@pytest.fixture
def view_folder(tmp_path: Path) -> Path:
    """A view of the samples a, b and c, one shard each."""
    folder = tmp_path / "view"
    filled(tmp_path / "store", "a", "b", "c").write_view(
        folder, SPEC, [("a", 2), ("b", 2), ("c", 2)]
    )
    return folder


@pytest.mark.parametrize(
    "changed",
    [{"verifier": "other"}, {"layer_ids": (2, 5)}, {"layer_ids": (4, 2)}, {"dtype": "float32"}],
)
def test_the_store_key_changes_with_what_shapes_the_states(changed: dict[str, Any]) -> None:
    assert dataclasses.replace(SPEC, **changed).store_key("a") != SPEC.store_key("a")


def test_the_store_key_changes_with_the_sample_and_not_between_equal_specs() -> None:
    same = StateSpec("fingerprint", (2, 4), hidden_size=3, dtype="bfloat16")
    assert SPEC.store_key("a") == same.store_key("a")
    assert SPEC.store_key("a") != SPEC.store_key("b")


def test_states_of_the_ids_sent_are_accepted() -> None:
    check_states(SPEC, [5, 6], torch.tensor([5, 6]), states(2))


@pytest.mark.parametrize("echoed", [[5, 7], [6, 5], [5], [5, 6, 7]])
def test_states_of_other_ids_are_refused(echoed: list[int]) -> None:
    with pytest.raises(ValueError, match=r"other token ids than were sent"):
        check_states(SPEC, [5, 6], torch.tensor(echoed), states(2))


@pytest.mark.parametrize("shape", [(1, 2, 3), (2, 3, 3), (2, 2, 4), (2, 6)])
def test_states_of_another_shape_are_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"hidden states are \(.*\), expected \(2, 2, 3\)"):
        check_states(SPEC, [5, 6], torch.tensor([5, 6]), torch.zeros(shape, dtype=torch.bfloat16))


def test_states_of_another_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match=r"are torch\.float16, expected bfloat16"):
        check_states(SPEC, [5, 6], torch.tensor([5, 6]), states(2).half())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_states_that_are_not_finite_are_refused(value: float) -> None:
    bad = states(2)
    bad[1, 1, 2] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        check_states(SPEC, [5, 6], torch.tensor([5, 6]), bad)


def test_the_writer_closes_a_shard_when_it_is_full_and_the_rest_at_the_end(
    tmp_path: Path,
) -> None:
    # one sample of 2 tokens is 2 * 2 layers * 3 * 2 bytes = 24 bytes
    filled(tmp_path, "a", "b", "c", "d", "e", shard_bytes=48)
    found = [samples_in(tmp_path / name) for name in shards(tmp_path)]
    pairs = [{SPEC.store_key(name) for name in pair} for pair in ("ab", "cd", "e")]
    assert sorted(map(sorted, found)) == sorted(map(sorted, pairs))


def test_nothing_written_gives_no_shard(tmp_path: Path) -> None:
    filled(tmp_path)
    assert os.listdir(tmp_path) == []


def test_finished_samples_are_kept_when_the_block_raises(tmp_path: Path) -> None:
    store = HiddenStateStore(tmp_path)

    def interrupted() -> None:
        with store.writer(shard_bytes=10**6) as writer:
            writer.add(SPEC.store_key("a"), [1, 7], states(2))
            raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        interrupted()
    assert SPEC.store_key("a") in store
    assert SPEC.store_key("a") in HiddenStateStore(tmp_path)


def test_a_reopened_store_knows_its_samples(tmp_path: Path) -> None:
    filled(tmp_path, "a", "b")
    reopened = HiddenStateStore(tmp_path)
    assert SPEC.store_key("a") in reopened
    assert SPEC.store_key("b") in reopened
    assert SPEC.store_key("c") not in reopened
    assert dataclasses.replace(SPEC, dtype="float32").store_key("a") not in reopened


def test_a_shard_that_was_being_written_is_no_shard(tmp_path: Path) -> None:
    filled(tmp_path, "a")
    (tmp_path / ".123.tmp").write_bytes(b"half")
    assert SPEC.store_key("a") in HiddenStateStore(tmp_path)


def test_identical_content_gives_identical_shard_names(tmp_path: Path) -> None:
    filled(tmp_path / "one", "a", "b")
    filled(tmp_path / "two", "b", "a")
    filled(tmp_path / "three", "a", "c")
    assert shards(tmp_path / "one") == shards(tmp_path / "two")
    assert shards(tmp_path / "one") != shards(tmp_path / "three")


def test_a_shard_is_named_by_the_hash_of_its_bytes_and_cannot_be_written_to(
    tmp_path: Path,
) -> None:
    filled(tmp_path, "a")
    (path,) = tmp_path.glob("*.safetensors")
    assert path.name == f"{file_digest(path)}.safetensors"
    assert path.stat().st_mode & 0o777 == 0o444


def test_a_view_holds_hard_links_to_the_shards_it_needs_and_no_others(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", "a", "b", "c")
    store.write_view(tmp_path / "view", SPEC, [("c", 2), ("a", 2)])
    names = shards(tmp_path / "view")
    assert len(names) == 2
    for name in names:
        assert (tmp_path / "view" / name).samefile(tmp_path / "store" / name)


def test_the_manifest_lists_the_samples_in_dataset_order(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", "a", "b", "c")
    store.write_view(tmp_path / "view", SPEC, [("c", 2), ("a", 2)])
    manifest = read_json(tmp_path / "view" / MANIFEST)
    assert [row["sample_key"] for row in manifest["samples"]] == ["c", "a"]
    assert [row["num_tokens"] for row in manifest["samples"]] == [2, 2]
    for row in manifest["samples"]:
        assert row["store_key"] == SPEC.store_key(row["sample_key"])
        assert samples_in(tmp_path / "view" / row["shard"]) == [row["store_key"]]
    assert (manifest["verifier"], manifest["layer_ids"]) == ("fingerprint", [2, 4])
    assert (manifest["hidden_size"], manifest["dtype"]) == (3, "bfloat16")
    assert manifest["shards"] == {
        name: {"bytes": (tmp_path / "store" / name).stat().st_size}
        for name in shards(tmp_path / "view")
    }


def test_a_view_is_assembled_again_over_an_older_one(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", "a", "b")
    for _ in range(2):
        store.write_view(tmp_path / "view", SPEC, [("a", 2)])
    assert "a" in StateView(tmp_path / "view")


def test_a_view_across_file_systems_holds_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    filled(tmp_path / "store", "a").write_view(tmp_path / "view", SPEC, [("a", 2)])
    (name,) = shards(tmp_path / "view")
    assert not (tmp_path / "view" / name).samefile(tmp_path / "store" / name)
    assert StateView(tmp_path / "view").load("a")[0].tolist() == [1, 7]


def test_a_view_of_a_sample_that_was_not_extracted_is_an_error(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", "a")
    with pytest.raises(KeyError, match=SPEC.store_key("b")):
        store.write_view(tmp_path / "view", SPEC, [("a", 2), ("b", 2)])


def test_a_view_gives_the_ids_and_states_that_were_written(view_folder: Path) -> None:
    view = StateView(view_folder)
    assert "b" in view
    assert "d" not in view
    ids, found = view.load("b")
    assert (ids.tolist(), ids.dtype) == ([1, 7], torch.int32)
    assert torch.equal(found, states(2, ord("b")))
    assert found.dtype == torch.bfloat16
    with pytest.raises(KeyError):
        view.load("d")


def damage_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage_length(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [damage_byte, damage_length])
def test_a_view_refuses_a_damaged_shard(view_folder: Path, damage: Any) -> None:
    path = view_folder / shards(view_folder)[1]
    path.chmod(0o644)
    copy = view_folder / "copy"
    shutil.copy(path, copy)
    damage(copy)
    copy.replace(path)
    with pytest.raises(ValueError, match=f"{path} is damaged; remove {view_folder} and run"):
        StateView(view_folder)


def test_a_view_refuses_a_missing_shard(view_folder: Path) -> None:
    path = view_folder / shards(view_folder)[1]
    path.unlink()
    with pytest.raises(ValueError, match=f"{path} is missing; remove {view_folder} and run"):
        StateView(view_folder)


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 60])
def test_a_shard_whose_header_is_cut_is_refused_by_name(tmp_path: Path, num_bytes: int) -> None:
    filled(tmp_path, "a")
    (path,) = tmp_path.glob("*.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=f"{cut} is damaged; delete it"):
        samples_in(cut)
    # the store goes on without it: what it held is extracted again
    store = HiddenStateStore(tmp_path)
    assert not cut.exists()
    assert SPEC.store_key("a") in store


def test_a_flipped_bit_in_the_store_is_found_and_only_its_samples_are_lost(tmp_path: Path) -> None:
    filled(tmp_path, "a", "b")
    victim = HiddenStateStore(tmp_path)._shard_of[SPEC.store_key("b")]
    content = bytearray((tmp_path / victim).read_bytes())
    content[-1] ^= 1
    (tmp_path / victim).chmod(0o644)
    (tmp_path / victim).write_bytes(content)
    store = HiddenStateStore(tmp_path)
    keys = [SPEC.store_key(name) for name in ("a", "b", "never extracted")]
    assert store.drop_damaged(keys) == 1
    assert SPEC.store_key("a") in store
    assert SPEC.store_key("b") not in store
    assert not (tmp_path / victim).exists()
    assert store.drop_damaged(keys) == 0


def test_a_shard_whose_data_is_cut_or_lengthened_is_refused_by_name(tmp_path: Path) -> None:
    filled(tmp_path, "a")
    (path,) = tmp_path.glob("*.safetensors")
    for content in (path.read_bytes()[:-1], path.read_bytes() + b"x", b"hello, no shard at all"):
        other = tmp_path / "other.safetensors"
        other.write_bytes(content)
        with pytest.raises(ValueError, match=f"{other} is damaged; delete it"):
            samples_in(other)
