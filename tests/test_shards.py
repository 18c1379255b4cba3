import fcntl
import hashlib
import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from specmill.files import digest
from specmill.shard_writing import abandoned, scratch_in, write_shard
from specmill.shards import Row, Shard, StateSpec, damaged_rows, read_shard
from tests.stored import BF16, FP8, TOKEN, flip, piece, sample_bytes, sample_key

SAMPLES = [[1, 2, 3], [4], [5, 6]]


def written(folder: Path, spec: StateSpec) -> tuple[Shard, Path]:
    """A shard of the three samples."""
    folder.mkdir(exist_ok=True)
    shard = write_shard(folder, spec, [piece(folder / "made", spec, ids) for ids in SAMPLES])
    return shard, folder / shard.name


@pytest.mark.parametrize(
    ("spec", "tensors"),
    [
        (
            BF16,
            '"ids/{key}":{{"dtype":"I32","shape":[2],"data_offsets":[0,8]}},'
            '"states/{key}":{{"dtype":"BF16","shape":[2,2,4],"data_offsets":[8,40]}}',
        ),
        (
            FP8,
            '"scales/{key}":{{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}},'
            '"ids/{key}":{{"dtype":"I32","shape":[2],"data_offsets":[16,24]}},'
            '"states/{key}":{{"dtype":"F8_E4M3","shape":[2,2,4],"data_offsets":[24,40]}}',
        ),
    ],
)
def test_a_shard_is_the_bytes_that_its_description_says(
    tmp_path: Path, spec: StateSpec, tensors: str
) -> None:
    content = sample_bytes(spec, [7, 9])
    key = hashlib.sha256(b"\x07\0\0\0\x09\0\0\0").hexdigest()
    about = (
        f'{{"dtype": "{spec.dtype}", "format": 2, "hidden_size": 4, "layer_ids": [2, 4], '
        f'"samples": [["{key}", 2, "{hashlib.sha256(content).hexdigest()}"]], '
        '"verifier": "fingerprint"}'
    )
    metadata = f'"__metadata__":{{"specmill":{json.dumps(about)}}}'
    header = f"{{{metadata},{tensors.format(key=key)}}}".encode()
    header += b" " * (-len(header) % 8)
    header = struct.pack("<Q", len(header)) + header

    name = write_shard(tmp_path, spec, [piece(tmp_path / "made", spec, [7, 9])]).name
    assert name == hashlib.sha256(header).hexdigest() + ".safetensors"
    assert (tmp_path / name).read_bytes() == header + content


@pytest.mark.parametrize("spec", [BF16, FP8])
def test_safetensors_reads_the_shard_and_the_header_gives_the_same_rows(
    tmp_path: Path, spec: StateSpec
) -> None:
    shard, path = written(tmp_path, spec)
    with safe_open(path, framework="np") as handle:
        assert len(handle.keys()) == (9 if spec == FP8 else 6)
        for ids in SAMPLES:
            assert handle.get_tensor(f"ids/{sample_key(ids)}").tolist() == ids
            if spec == FP8:
                found = handle.get_tensor(f"scales/{sample_key(ids)}").tobytes()
                assert found == sample_bytes(spec, ids)[: len(ids) * 8]
    assert read_shard(path) == shard
    assert [row.num_tokens for row in shard.rows] == [3, 1, 2]
    assert path.stat().st_size == shard.num_bytes == len(shard.header) + 6 * TOKEN


def test_bytes_a_token_are_layers_by_width_by_bytes_and_the_id_and_a_scale_a_layer() -> None:
    # SmolLM2-135M: 4 layers x 576 x 2 bytes = 4,608; as fp8 2,304 and 4 scales x 4 bytes
    smol = StateSpec("fingerprint", (2, 15, 27, 30), hidden_size=576, dtype="bfloat16")
    assert smol.bytes_per_token == 4608 + 4
    assert replace(smol, dtype="float16").bytes_per_token == 4608 + 4
    assert replace(smol, dtype="float32").bytes_per_token == 9216 + 4
    assert replace(smol, dtype="float8_e4m3fn").bytes_per_token == 2304 + 4 + 16


def test_a_dtype_that_is_not_kept_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"kept as bfloat16, .*float8_e4m3fn, not int8"):
        replace(BF16, dtype="int8")


def test_a_store_key_is_the_digest_of_canonical_json() -> None:
    for key in ("a" * 64, 'with "quotes" and ümlaut'):
        fields = {"format": 2, "sample": key, "verifier": BF16.verifier, "dtype": BF16.dtype,
                  "layer_ids": list(BF16.layer_ids), "hidden_size": BF16.hidden_size}  # fmt: skip
        assert BF16.store_key(key) == digest(fields)


@pytest.mark.parametrize(
    "changed",
    [
        {"verifier": "other"},
        {"layer_ids": (2, 5)},
        {"layer_ids": (4, 2)},
        {"hidden_size": 8},
        {"dtype": "float8_e4m3fn"},
    ],
)
def test_the_store_key_and_the_shard_change_with_what_shapes_the_states(
    changed: dict[str, Any],
) -> None:
    other, rows = replace(BF16, **changed), (Row("key", 1, "checksum"),)
    assert other.store_key("key") != BF16.store_key("key")
    assert Shard(other, rows).name != Shard(BF16, rows).name


def test_the_store_key_changes_with_the_sample_and_not_between_equal_specs() -> None:
    same = StateSpec("fingerprint", (2, 4), hidden_size=4, dtype="bfloat16")
    assert BF16.store_key("a") == same.store_key("a")
    assert BF16.store_key("a") != BF16.store_key("b")


def test_equal_samples_in_equal_order_give_one_file(tmp_path: Path) -> None:
    one, path = written(tmp_path, BF16)
    two, other = written(tmp_path / "other", BF16)
    assert one.name == two.name
    assert path.read_bytes() == other.read_bytes()
    pieces = list(one.pieces(path))
    assert write_shard(tmp_path, BF16, pieces[::-1]).name != one.name


def test_a_sample_that_is_given_twice_is_written_once(tmp_path: Path) -> None:
    one = piece(tmp_path / "made", BF16, [1, 2])
    shard = write_shard(tmp_path, BF16, [one, piece(tmp_path / "made", BF16, [3]), one])
    assert [row.sample_key for row in shard.rows] == [sample_key([1, 2]), sample_key([3])]
    assert read_shard(tmp_path / shard.name) == shard
    assert damaged_rows(shard, tmp_path / shard.name) == []


def test_a_shard_gets_its_name_after_its_bytes_are_safe_and_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Any] = []

    def fsync(handle: int) -> None:
        steps.append(("fsync", os.readlink(f"/proc/self/fd/{handle}"), os.fstat(handle).st_size))

    def rename(source: Path, target: Path) -> None:
        steps.append(("rename", str(source), str(target)))
        os.rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    shard, path = written(tmp_path, BF16)
    scratch = steps[0][1]
    assert steps[:2] == [("fsync", scratch, shard.num_bytes), ("rename", scratch, str(path))]
    assert steps[2][:2] == ("fsync", str(tmp_path))
    assert Path(scratch).name.startswith(".")
    assert path.stat().st_mode & 0o777 == 0o444
    assert sorted(os.listdir(tmp_path)) == sorted(["made", path.name])


def test_a_source_that_ends_within_a_sample_leaves_no_shard(tmp_path: Path) -> None:
    cut = piece(tmp_path / "made", BF16, [1, 2])
    os.truncate(cut.file, 2 * TOKEN - 1)
    (tmp_path / "store").mkdir()
    with pytest.raises(
        ValueError, match=f"{cut.file} ends within sample {sample_key([1, 2])[:12]}"
    ):
        write_shard(tmp_path / "store", BF16, [cut])
    assert os.listdir(tmp_path / "store") == []


@pytest.mark.parametrize("spec", [BF16, FP8])
def test_a_flipped_bit_is_found_wherever_it_is_and_loses_its_sample_alone(
    tmp_path: Path, spec: StateSpec
) -> None:
    shard, path = written(tmp_path, spec)
    # data: 3, 1 and 2 tokens
    owners = [row for row in shard.rows for _ in range(row.num_tokens * TOKEN)]
    for at in range(shard.num_bytes):
        flip(path, at, bit=at % 8)
        if at < len(shard.header):
            assert damaged_rows(shard, path) == []
            with pytest.raises(ValueError, match=f"{path} is damaged"):
                read_shard(path)
        else:
            assert damaged_rows(shard, path) == [owners[at - len(shard.header)]]
            assert read_shard(path) == shard
        flip(path, at, bit=at % 8)
    assert damaged_rows(shard, path) == []


def test_a_shard_that_is_cut_anywhere_or_lengthened_is_refused_by_name(tmp_path: Path) -> None:
    shard, path = written(tmp_path, BF16)
    content = path.read_bytes()
    path.chmod(0o644)
    for length in range(0, shard.num_bytes, 3):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=f"{path} is damaged"):
            read_shard(path)
        # bytes of the last sample are gone, then those of the one before it, too
        whole = (length - len(shard.header)) // TOKEN
        lost = [shard.rows[i] for i, end in enumerate((3, 4, 6)) if end > whole]
        assert damaged_rows(shard, path) == lost
    path.write_bytes(content + b"\0")
    with pytest.raises(ValueError, match=rf"{len(content) + 1} bytes, {len(content)} were written"):
        read_shard(path)
    assert damaged_rows(shard, path) == []


def test_a_shard_under_another_name_is_refused_unless_it_is_staged(tmp_path: Path) -> None:
    shard, path = written(tmp_path, BF16)
    other = path.rename(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=f"{other} is damaged: its header"):
        read_shard(other)
    assert read_shard(other, named=False) == shard


@pytest.mark.parametrize(
    "about",
    [
        "[]",
        "null",
        '{"format": 1}',
        '{"format": 2}',
        '{"format": 2, "samples": [], "layer_ids": [2], "dtype": "bfloat16", "verifier": "v"}',
        '{"format": 2, "samples": [["key", "2", "checksum"]], "layer_ids": [2], '
        '"dtype": "bfloat16", "verifier": "v", "hidden_size": 4}',
        '{"format": 2, "samples": [["key", 2]], "layer_ids": [2], '
        '"dtype": "bfloat16", "verifier": "v", "hidden_size": 4}',
    ],
)
def test_a_header_that_says_nonsense_is_refused_as_damaged(tmp_path: Path, about: str) -> None:
    header = json.dumps({"__metadata__": {"specmill": about}}).encode()
    path = tmp_path / "nonsense.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match=f"{path} is damaged or no shard of this version"):
        read_shard(path, named=False)


def test_what_a_killed_writer_leaves_is_found_and_what_a_living_one_writes_is_not(
    tmp_path: Path,
) -> None:
    dead, alive = scratch_in(tmp_path), scratch_in(tmp_path)
    dead.write_bytes(b"half")
    (tmp_path / ".index.jsonl.17.tmp").write_bytes(b"of another writer")
    with alive.open("xb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert abandoned(tmp_path) == [dead.name]
    assert sorted(abandoned(tmp_path)) == sorted([dead.name, alive.name])


def test_a_shard_that_is_being_written_is_not_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    rename = os.replace

    def look(source: Path, target: Path) -> None:
        seen.append(abandoned(tmp_path))
        rename(source, target)

    monkeypatch.setattr(os, "replace", look)
    written(tmp_path, BF16)
    assert seen == [[]]
