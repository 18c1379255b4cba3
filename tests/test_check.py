from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmill.check import compare_acceptance, compare_speed, errors_of, whole_steps
from specmill.runs import read_runs, write_runs
from specmill.walk import Runs
from tests.fakes import sample

ANSWER = list(range(10, 20))


def runs_of(right: list[int], most_k: int = 3) -> Runs:
    return Runs.of_chain(np.array([[place < run for place in range(most_k)] for run in right]))


def request(output_ids: list[int], chunks: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "role": "method",
        "concurrency": 1,
        "context": 0,
        "k": 2,
        "sample_key": "a",
        "output_ids": output_ids,
        "chunk_tokens": chunks,
    } | changes


def test_steps_count_as_far_as_the_answers_agree() -> None:
    assert whole_steps([1, 3, 1, 3], 6) == (2, 5)
    assert whole_steps([1, 3, 1, 3], 8) == (3, 8)
    assert whole_steps([1, 3], 3) is None
    assert whole_steps([1], 1) is None


def test_a_first_chunk_of_several_tokens_hides_a_step() -> None:
    assert whole_steps([2, 3, 1], 6) is None


def test_served_and_replayed_steps_are_of_the_same_tokens() -> None:
    # the served answer leaves the recorded one at its seventh token, in its third step
    output = [*ANSWER[:6], 99, 98]
    # replayed with K = 2: 10 known; 11 12 and 13; 14 alone: 4 tokens in 2 steps
    known = (ANSWER, runs_of([2, 0, 0, 0, 2, 1, 1, 1, 1]))
    (found,) = compare_acceptance([request(output, [1, 3, 1, 3])], lambda _: known)
    assert found == {
        "k": 2,
        "num_sequences": 1,
        "num_left_out": 0,
        "num_tokens": 4,
        "served_steps": 2,
        "replayed_steps": 2,
        "served": 2.0,
        "replayed": 2.0,
        "error": 0.0,
    }


def test_the_error_is_of_the_sum_over_all_sequences() -> None:
    known = (ANSWER, runs_of([0] * 9))
    requests = [request(ANSWER, [1, 3, 3, 3]), request(ANSWER, [1] * 10)]
    (found,) = compare_acceptance(requests, lambda _: known)
    assert (found["served_steps"], found["replayed_steps"], found["num_tokens"]) == (12, 18, 18)
    assert (found["served"], found["replayed"]) == (1.5, 1.0)
    assert found["error"] == pytest.approx(12 / 18 - 1, abs=1e-4)


@pytest.mark.parametrize(
    "changes", [{"role": "reference"}, {"concurrency": 8}, {"context": 512}, {"k": 4}]
)
def test_what_replay_does_not_speak_of_is_left_out(changes: dict[str, Any]) -> None:
    known = (ANSWER, runs_of([0] * 9))
    assert compare_acceptance([request(ANSWER, [1] * 10, **changes)], lambda _: known) == []


def test_a_sequence_without_a_whole_step_is_counted_as_left_out() -> None:
    known = (ANSWER, runs_of([0] * 9))
    requests = [request([10, 99], [1, 1]), request(ANSWER, [1] * 10)]
    (found,) = compare_acceptance(requests, lambda _: known)
    assert (found["num_sequences"], found["num_left_out"]) == (1, 1)


def predicted(k: int, concurrency: int, speedup: float, category: str = "all") -> dict[str, Any]:
    return {
        "method": "ngram",
        "k": k,
        "concurrency": concurrency,
        "category": category,
        "speedup": speedup,
        "speedup_low": speedup - 0.1,
        "speedup_high": speedup + 0.1,
    }


def measured(*cells: tuple[int, int, float | None, str]) -> dict[str, dict[str, Any]]:
    rows = [
        {
            "num_speculative_tokens": k,
            "concurrency": concurrency,
            "rate": None,
            "context": 0,
            "category": category,
            "speedup": speedup,
            "speedup_low": None,
            "speedup_high": None,
        }
        for k, concurrency, speedup, category in cells
    ]
    return {"ngram": {"rows": rows}}


def test_only_cells_that_were_both_predicted_and_measured_are_compared() -> None:
    rows = compare_speed(
        [predicted(3, 1, 1.1), predicted(3, 8, 0.9), predicted(3, 16, 0.8), predicted(2, 1, 1.0)],
        measured((3, 1, 1.0, "all"), (3, 8, 1.0, "all"), (2, 1, None, "all")),
        [{"k": 3, "batch": 1}, {"k": 3, "batch": 16}],
    )
    assert [(row["concurrency"], row["error"], row["is_new"]) for row in rows] == [
        (1, 0.1, False),
        (8, -0.1, True),
    ]


def test_errors_are_medians_of_absolute_values_by_group() -> None:
    rows = [
        {"category": "all", "error": 0.1, "is_new": False},
        {"category": "all", "error": -0.2, "is_new": True},
        {"category": "all", "error": 0.04, "is_new": True},
        {"category": "maths", "error": -0.3, "is_new": True},
    ]
    assert errors_of(rows) == {
        "num_cells": 3,
        "median_absolute_error": 0.1,
        "num_cells_new": 2,
        "median_absolute_error_new": 0.12,
        "num_cells_by_category": 1,
        "median_absolute_error_by_category": 0.3,
    }


def test_without_cells_there_is_no_error() -> None:
    assert errors_of([]) == {"num_cells": 0, "num_cells_new": 0, "num_cells_by_category": 0}


def test_runs_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    one = sample([1, 2], [3, 4, 5])
    runs = runs_of([2, 1])
    write_runs(tmp_path / "a.parquet", [one], [runs])
    write_runs(tmp_path / "b.parquet", [one], [runs])
    answer, found = read_runs(tmp_path / "a.parquet")[one.sample_key]
    assert answer == [3, 4, 5]
    assert np.array_equal(found.accepted, runs.accepted)
    assert np.array_equal(found.drafted, runs.drafted)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_a_row_that_is_not_replayed_has_a_file_without_rows(tmp_path: Path) -> None:
    write_runs(tmp_path / "a.parquet", [], [])
    assert read_runs(tmp_path / "a.parquet") == {}
