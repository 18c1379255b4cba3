import multiprocessing
import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specmill.files import read_json, write_json
from specmill.manifest import MANIFEST, Manifest, write_manifest
from specmill.shards import FP8, Piece, Row, StateSpec, read_shard
from specmill.states import quantise, stage
from specmill.store import HiddenStateStore
from specmill.view import StateView
from tests.stored import flip, sample_key

SPEC = StateSpec("fingerprint", (2, 4), hidden_size=4, dtype="bfloat16")
A, B, C = ([number, number + 1] for number in (10, 20, 30))


def states(ids: list[int]) -> torch.Tensor:
    """[num_tokens, 2 layers, 4]: whole numbers up to 256, which bfloat16 holds exactly."""
    grid = [[[float(token + layer)] * 4 for layer in (0, 100)] for token in ids]
    return torch.tensor(grid, dtype=torch.bfloat16)


def make_view(folder: Path, *groups: list[list[int]], spec: StateSpec = SPEC) -> Path:
    """A view of samples, a shard for each group."""
    store = HiddenStateStore(folder / "store")
    for group in groups:
        pieces: list[Piece] = []
        for ids in group:
            path = folder / f"{sample_key(ids)}.safetensors"
            stage(path, spec, torch.tensor(ids), states(ids))
            pieces += read_shard(path, named=False).pieces(path)
        store.add(spec, pieces)
    keys = [sample_key(ids) for group in groups for ids in group]
    store.write_view(folder / "view", spec, keys, 10**6)
    return folder / "view"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A view of A and B in one shard, and C in another."""
    return make_view(tmp_path, [A, B], [C])


def file_of(folder: Path, ids: list[int]) -> Path:
    return Manifest(folder).places[sample_key(ids)].file


def test_a_view_gives_the_ids_and_states_that_were_staged(folder: Path) -> None:
    view = StateView(folder)
    assert list(view.places) == [sample_key(ids) for ids in (A, B, C)]
    assert view.spec == SPEC
    assert not view.online
    for sample in (C, A, B):
        ids, found, scales = view.load(sample_key(sample))
        assert (ids.tolist(), ids.dtype) == (sample, torch.int32)
        assert torch.equal(found, states(sample))
        assert found.dtype == torch.bfloat16
        assert scales is None
    with pytest.raises(KeyError):
        view.load(sample_key([1]))


def test_a_view_of_fp8_gives_the_scales_too(tmp_path: Path) -> None:
    view = StateView(make_view(tmp_path, [A, B], spec=replace(SPEC, dtype=FP8)))
    ids, found, scales = view.load(sample_key(B))
    kept, expected = quantise(states(B))
    assert ids.tolist() == B
    assert scales is not None
    assert torch.equal(found.view(torch.uint8), kept.view(torch.uint8))
    assert torch.equal(scales, expected)


# how it is read


def mapped_file(address: int) -> str:
    """The file that is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(text, 16) for text in line.split()[0].split("-"))
        if start <= address < end:
            return line.split(maxsplit=5)[-1]
    raise AssertionError(f"nothing is mapped at {address:x}")


@pytest.mark.parametrize("dtype", ["bfloat16", FP8])
def test_tensors_are_maps_of_the_shards_file(tmp_path: Path, dtype: str) -> None:
    folder = make_view(tmp_path, [A, B], spec=replace(SPEC, dtype=dtype))
    view = StateView(folder)
    tensors = [tensor for tensor in view.load(sample_key(B)) if tensor is not None]
    for tensor in tensors:
        assert Path(mapped_file(tensor.data_ptr())).samefile(file_of(folder, B))
    again = [tensor for tensor in view.load(sample_key(B)) if tensor is not None]
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in tensors]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_one_sample_of_a_large_shard_does_not_bring_the_others_into_memory(tmp_path: Path) -> None:
    spec = replace(SPEC, hidden_size=1024)
    small = tmp_path / "small.safetensors"
    row = stage(small, spec, torch.tensor(A), torch.ones(2, 2, 1024, dtype=torch.bfloat16))
    store = HiddenStateStore(tmp_path / "store")
    tokens = 2**26 // spec.bytes_per_token  # 64 MiB, of which nobody asks the checksum
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, tokens * spec.bytes_per_token)
    unread = Row(sample_key([1]), tokens, 64 * "0")
    staged = read_shard(small, named=False)
    store.add(spec, [Piece(unread, large, 0), *staged.pieces(small)])
    (name,) = store.shards
    pieces = store.pieces(spec, [unread.sample_key, row.sample_key])
    write_manifest(store.folder, spec, pieces)
    view = StateView(store.folder)
    before = resident_bytes()
    _, found, _ = view.load(row.sample_key)
    assert bool((found == 1).all())
    assert (store.folder / name).stat().st_size > 2**26 - 10_000
    assert resident_bytes() - before < 2**24


def test_bytes_are_compared_when_a_sample_is_first_read_and_not_again(folder: Path) -> None:
    place = Manifest(folder).places[sample_key(A)]
    view = StateView(folder)
    view.load(sample_key(A))
    flip(place.file, place.offset)
    view.load(sample_key(A))
    with pytest.raises(
        ValueError, match=f"sample {sample_key(A)[:12]} in {place.file} are damaged"
    ):
        StateView(folder).load(sample_key(A))


def load_elsewhere(view: StateView, key: str) -> tuple[int, list[int], list[Any]]:
    ids, found, _ = view.load(key)
    return os.getpid(), ids.tolist(), found.tolist()


def test_a_view_is_read_in_another_process(folder: Path) -> None:
    view = StateView(folder)
    view.load(sample_key(A))  # what is mapped here stays here
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        process, ids, found = pool.submit(load_elsewhere, view, sample_key(B)).result()
    assert process != os.getpid()
    assert ids == B
    assert found == states(B).tolist()
    copy = pickle.loads(pickle.dumps(view))
    assert torch.equal(copy.load(sample_key(C))[1], states(C))


# damage


@pytest.mark.parametrize("part", ["scales", "ids", "states"])
@pytest.mark.parametrize("dtype", ["bfloat16", FP8])
def test_a_flipped_bit_of_a_sample_is_noticed_and_its_neighbours_are_read(
    tmp_path: Path, dtype: str, part: str
) -> None:
    spec = replace(SPEC, dtype=dtype)
    folder = make_view(tmp_path, [A, B, C], spec=spec)
    place = Manifest(folder).places[sample_key(B)]
    flip(place.file, place.offset + {"scales": 0, "ids": 23, "states": 39}[part])
    view = StateView(folder)
    with pytest.raises(ValueError, match=rf"sample {sample_key(B)[:12]} .*verify {folder}"):
        view.load(sample_key(B))
    assert view.load(sample_key(A))[0].tolist() == A
    assert view.load(sample_key(C))[0].tolist() == C


def test_any_flipped_bit_of_a_header_is_noticed_by_loading_and_by_requiring(folder: Path) -> None:
    place = Manifest(folder).places[sample_key(A)]
    for at in range(0, place.offset, 7):
        flip(place.file, at, bit=at % 8)
        with pytest.raises(ValueError, match=f"{place.file} is damaged"):
            StateView(folder).load(sample_key(B))
        with pytest.raises(ValueError, match=f"{place.file} is damaged"):
            StateView(folder).require([sample_key(B)])
        flip(place.file, at, bit=at % 8)
    assert StateView(folder).load(sample_key(B))[0].tolist() == B


def test_a_missing_shard_is_an_error_that_names_it(folder: Path) -> None:
    file = file_of(folder, A)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=str(file)):
        StateView(folder).load(sample_key(A))
    assert StateView(folder).load(sample_key(C))[0].tolist() == C


def test_a_manifest_that_belongs_to_other_shards_is_noticed(folder: Path) -> None:
    manifest = read_json(folder / MANIFEST)
    for row in manifest["samples"]:
        row[3] = 1 - row[3]
    write_json(folder / MANIFEST, manifest)
    with pytest.raises(ValueError, match=f"verify {folder}"):
        StateView(folder).load(sample_key(A))


# what is required


def test_a_whole_view_gives_all_its_samples_and_any_of_them(folder: Path) -> None:
    keys = [sample_key(ids) for ids in (C, A, B)]
    StateView(folder).require(keys)
    StateView(folder).require(keys[:1])
    StateView(folder).require([])


def test_samples_that_were_not_extracted_are_counted_and_the_first_is_named(folder: Path) -> None:
    keys = [sample_key(ids) for ids in (A, [1], B, [2], C)]
    expected = f"holds no hidden states of 2 of 5 samples, the first {sample_key([1])[:12]}"
    with pytest.raises(ValueError, match=rf"{folder} {expected}; run `dvc repro extract`"):
        StateView(folder).require(keys)


def test_shards_that_are_not_here_are_counted_and_the_first_is_named(folder: Path) -> None:
    file = file_of(folder, A)
    file.unlink()
    view = StateView(folder)
    expected = rf"of 2 of 3 samples are missing: 1 of 2 shards .* the first {file.name}; `dvc pull"
    with pytest.raises(ValueError, match=expected):
        view.require([sample_key(ids) for ids in (A, B, C)])
    view.require([sample_key(C)])  # a part that was pulled will do


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shard_that_was_cut_or_lengthened_is_named_with_what_depends_on_it(
    folder: Path, change: int
) -> None:
    file = file_of(folder, A)
    size = file.stat().st_size
    file.chmod(0o644)
    os.truncate(file, size + change)
    view = StateView(folder)
    expected = f"{file} is damaged: {size + change} bytes, {size} were written"
    with pytest.raises(ValueError, match=f"of 2 of 3 samples cannot be read: {expected}"):
        view.require([sample_key(ids) for ids in (A, B, C)])
    with pytest.raises(ValueError, match=expected):
        view.load(sample_key(B))
    view.require([sample_key(C)])


# the manifest


def test_an_online_view_holds_nothing_but_says_what_states_are(tmp_path: Path) -> None:
    write_manifest(tmp_path / "view", SPEC, [], online=True)
    view = StateView(tmp_path / "view")
    assert view.online
    assert view.spec == SPEC
    assert view.places == {}
    assert os.listdir(tmp_path / "view") == [MANIFEST]


def test_a_folder_without_a_manifest_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{tmp_path / MANIFEST} is missing; `dvc pull extract`"):
        StateView(tmp_path)


def test_a_manifest_of_another_version_is_refused(folder: Path) -> None:
    write_json(folder / MANIFEST, read_json(folder / MANIFEST) | {"format": 1})
    with pytest.raises(ValueError, match="written by another version; run `dvc repro extract`"):
        StateView(folder)


@pytest.mark.parametrize(
    "changed",
    [
        {"shards": []},
        {"samples": None},
        {"samples": [["key", 2, "checksum", 0]]},
        {"dtype": "bfloat17"},
        {"hidden_sise": 4},
        {"layer_ids": 4},
    ],
)
def test_a_damaged_manifest_is_refused_by_name(folder: Path, changed: dict[str, Any]) -> None:
    write_json(folder / MANIFEST, read_json(folder / MANIFEST) | changed)
    with pytest.raises(ValueError, match=f"{folder / MANIFEST} is damaged"):
        StateView(folder)


def test_a_cut_manifest_is_refused_by_name(folder: Path) -> None:
    (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{folder / MANIFEST} is not valid JSON"):
        StateView(folder)
