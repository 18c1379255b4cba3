import hashlib
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specmill.samples import (
    SCHEMA,
    Sample,
    keep_trainable,
    make_sample,
    read_samples,
    write_samples,
)
from tests.fakes import sample


def fields(one: Sample) -> dict[str, object]:
    return vars(one) | {"input_ids": one.input_ids.tolist(), "loss_mask": one.loss_mask.tolist()}


def rewritten(path: Path, column: str, values: list[list[int]]) -> Path:
    """The same file with one column replaced, its keys left as they are."""
    table = pq.read_table(path)
    place = SCHEMA.get_field_index(column)
    pq.write_table(
        table.set_column(place, SCHEMA.field(column), pa.array(values, SCHEMA.field(column).type)),
        path,
    )
    return path


def test_the_mask_is_one_on_exactly_the_ids_of_the_answer() -> None:
    one = make_sample(
        [5, 6, 5],
        [6, 7, 8, 9],
        category="maths",
        source="file",
        split="heldout",
        turn=1,
        text="words",
        finish_reason="length",
    )
    assert one.input_ids.tolist() == [5, 6, 5, 6, 7, 8, 9]
    assert one.loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert one.input_ids[one.loss_mask == 1].tolist() == [6, 7, 8, 9] == one.answer_token_ids
    assert one.prompt_token_ids == [5, 6, 5]
    assert (one.input_ids.dtype, one.loss_mask.dtype) == (np.int32, np.uint8)
    assert (one.category, one.source, one.split) == ("maths", "file", "heldout")
    assert (one.turn, one.text, one.finish_reason) == (1, "words", "length")


def test_ids_come_back_as_plain_integers_that_json_can_write() -> None:
    one = sample([1], [2])
    assert {type(token) for token in [*one.prompt_token_ids, *one.answer_token_ids]} == {int}


def test_the_key_is_the_hash_of_the_ids_as_little_endian_int32() -> None:
    expected = hashlib.sha256(struct.pack("<3i", 1, 2, 70000)).hexdigest()
    assert sample([1, 2], [70000]).sample_key == expected


def test_the_key_depends_on_the_ids_and_on_nothing_else() -> None:
    one = sample([1, 2], [3, 4])
    assert one.sample_key == sample([1], [2, 3, 4], category="maths", split="bench").sample_key
    assert one.sample_key != sample([1, 2], [4, 3]).sample_key
    assert one.sample_key != sample([1, 2], [3, 4, 0]).sample_key


def test_dropped_samples_are_counted_by_their_reason() -> None:
    kept = [sample([1], [2, 3]), sample([1, 2, 3], [4, 5])]
    samples = [
        sample([9], []),  # nothing that trains
        kept[0],
        sample([1], [2]),  # one trained token, two are asked for
        sample([1, 2, 3, 4], [5, 6]),  # six tokens, five fit
        sample([1, 2], [3]),  # too short comes before: its ids are those of kept[0]
        sample([], [1, 2, 3]),  # the ids of kept[0], another mask
        kept[1],
        kept[1],
    ]
    found, counts = keep_trainable(iter(samples), min_tokens=2, max_model_len=5)
    assert [one.sample_key for one in found] == [one.sample_key for one in kept]
    assert found[0].loss_mask.tolist() == [0, 1, 1]
    assert counts == {
        "num_kept": 2,
        "num_no_trained_token": 1,
        "num_too_short": 2,
        "num_too_long": 1,
        "num_duplicate": 2,
    }
    assert sum(counts.values()) == len(samples)


def test_samples_survive_the_file(tmp_path: Path) -> None:
    samples = [
        sample([1, 2], [3, 49151], category="maths", split="bench", turn=1),
        sample([7], []),
        sample([], [8]),
    ]
    write_samples(tmp_path / "deep" / "x.parquet", samples)
    found = read_samples(tmp_path / "deep" / "x.parquet")
    assert [fields(one) for one in found] == [fields(one) for one in samples]
    assert {(one.input_ids.dtype, one.loss_mask.dtype) for one in found} == {
        (np.dtype(np.int32), np.dtype(np.uint8))
    }


def test_equal_samples_give_equal_bytes_and_other_samples_give_others(tmp_path: Path) -> None:
    for name, last in (("a", 3), ("b", 3), ("c", 4)):
        write_samples(tmp_path / name, [sample([1, 2], [last]), sample([5], [6])])
    first, second, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == second
    assert first != other


def test_a_file_whose_ids_were_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_samples(path, [sample([1, 2], [3]), sample([5], [6])])
    rewritten(path, "input_ids", [[1, 2, 3], [5, 7]])
    with pytest.raises(ValueError, match=r"x\.parquet, row 1: token ids do not match their key"):
        read_samples(path)


def test_a_file_whose_mask_lacks_a_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_samples(path, [sample([1, 2], [3]), sample([5], [6])])
    rewritten(path, "loss_mask", [[0, 1], [0, 1]])
    with pytest.raises(ValueError, match="row 0: token ids do not match their key or mask"):
        read_samples(path)
