from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from specmill.vocab import (
    build_tables,
    check_tables,
    count_trained_tokens,
    coverage,
    load_tables,
    save_tables,
    tables_digest,
)
from tests.fakes import sample

# 10 target ids, 4 draft ids: 7 comes 5 times, 1 and 9 3 times, 4 and 2 twice
COUNTS = Counter({9: 3, 7: 5, 4: 2, 1: 3, 2: 2})


def test_only_tokens_of_answers_are_counted() -> None:
    samples = [sample([1, 2, 3], [3, 4, 3]), sample([4], [5]), sample([6], [])]
    assert count_trained_tokens(samples) == {3: 2, 4: 1, 5: 1}


def test_d2t_maps_each_draft_id_to_its_target_id() -> None:
    d2t, t2d = build_tables(COUNTS, 3, 10)
    # draft ids 0, 1, 2 are target ids 1, 7, 9: offsets 1, 6, 7
    assert d2t.tolist() == [1, 6, 7]
    assert np.nonzero(t2d)[0].tolist() == [1, 7, 9]
    assert (d2t.dtype, t2d.dtype) == (np.int64, np.bool_)


def test_among_equally_frequent_tokens_the_lower_id_is_chosen() -> None:
    d2t, _ = build_tables(COUNTS, 4, 10)
    assert (np.arange(4) + d2t).tolist() == [1, 2, 7, 9]
    d2t, _ = build_tables(COUNTS, 2, 10)
    assert (np.arange(2) + d2t).tolist() == [1, 7]


def test_room_left_over_is_filled_with_the_lowest_unused_ids() -> None:
    d2t, _ = build_tables(COUNTS, 8, 10)
    # 1, 2, 4, 7, 9 are used; 0, 3, 5 are the lowest of the rest
    assert (np.arange(8) + d2t).tolist() == [0, 1, 2, 3, 4, 5, 7, 9]


def test_the_full_vocabulary_has_offsets_of_zero() -> None:
    d2t, t2d = build_tables(COUNTS, 10, 10)
    assert d2t.tolist() == [0] * 10
    assert t2d.all()


@pytest.mark.parametrize("size", [1, 5, 40, 100])
def test_both_tables_describe_one_mapping_of_the_size_asked_for(size: int) -> None:
    generator = np.random.default_rng(size)
    counts = Counter(generator.integers(0, 100, 300).tolist())
    d2t, t2d = build_tables(counts, size, 100)
    assert t2d.sum() == size
    assert np.nonzero(t2d)[0].tolist() == (np.arange(size) + d2t).tolist()
    least = min(counts[int(token)] for token in np.arange(size) + d2t)
    most = max((counts[token] for token in range(100) if not t2d[token]), default=0)
    assert least >= most


def test_a_draft_vocabulary_above_the_verifiers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"draft_vocab_size is 11, above .* of 10"):
        build_tables(COUNTS, 11, 10)


def test_coverage_is_the_share_of_trained_tokens_that_are_kept() -> None:
    t2d = np.zeros(10, dtype=bool)
    t2d[[7, 1]] = True
    assert coverage(COUNTS, t2d) == 8 / 15
    assert coverage(COUNTS, np.ones(10, dtype=bool)) == 1
    assert coverage(Counter({0: 4}), t2d) == 0


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        ([1, 6], [1, 7, 9], r"d2t is \(2,\) and t2d \(10,\); expected \(3,\) and \(10,\)"),
        ([1, 6, 7], [1, 7], "t2d marks 2 tokens, expected 3"),
        ([1, 6, 7], [1, 7, 8], "not the same mapping"),
        ([1, 7, 9], [1, 7, 9], "not the same mapping"),  # ids where offsets belong
    ],
)
def test_tables_that_are_not_one_mapping_are_refused(
    d2t: list[int], t2d: list[int], message: str
) -> None:
    mask = np.zeros(10, dtype=bool)
    mask[t2d] = True
    with pytest.raises(ValueError, match=message):
        check_tables(np.array(d2t), mask, 3, 10)


def test_a_t2d_of_another_vocabulary_is_refused() -> None:
    d2t, t2d = build_tables(COUNTS, 3, 10)
    with pytest.raises(ValueError, match=r"expected \(3,\) and \(12,\)"):
        check_tables(d2t, t2d, 3, 12)


def test_tables_survive_the_folder(tmp_path: Path) -> None:
    d2t, t2d = build_tables(COUNTS, 3, 10)
    save_tables(tmp_path / "vocab", d2t, t2d)
    found = load_tables(tmp_path / "vocab")
    assert [table.tolist() for table in found] == [d2t.tolist(), t2d.tolist()]
    assert [table.dtype for table in found] == [np.int64, np.bool_]


def test_the_digest_tells_mappings_apart_and_not_their_integer_types() -> None:
    d2t, t2d = build_tables(COUNTS, 3, 10)
    other = build_tables(COUNTS, 4, 10)
    assert tables_digest(d2t, t2d) == tables_digest(d2t.astype(np.int32), t2d)
    assert tables_digest(d2t, t2d) != tables_digest(*other)
    assert tables_digest(d2t, t2d) != tables_digest(d2t + 1, t2d)
    assert tables_digest(d2t, t2d) != tables_digest(d2t, other[1])
