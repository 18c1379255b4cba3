"""Step time from waves: which gaps count, how points are paired, what params.yaml may say."""

from typing import Any

import pytest
from pydantic import ValidationError

from specmill.curves import (
    by_name,
    curve_points,
    plot_rows,
    steady_gaps,
    tokens_per_chunk,
    wave_record,
)
from tests.waves import curves_section, streamed, waves_of

# the second begins at 3 and the first ends at 7: what counts lies between
FIRST = streamed((1.0, 1), (2.0, 1), (3.0, 1), (4.5, 2), (5.5, 1), (7.0, 1))
SECOND = streamed((3.0, 1), (4.5, 1), (5.5, 1), (7.0, 1), (8.0, 1), sent=1.0)


def test_only_gaps_while_all_requests_answer_are_steps() -> None:
    gaps, sizes = steady_gaps([FIRST, SECOND])
    assert gaps == [1.5, 1.0, 1.5, 1.5, 1.0, 1.5]
    assert sizes == [2, 1, 1, 1, 1, 1]


def test_a_wave_is_the_time_of_its_steps_and_the_median_wait_for_a_first_token() -> None:
    """8 s of gaps; a chunk of two tokens may be one step that drafted three."""
    wave = wave_record("tokens", 3, 1, "tokens", [FIRST, SECOND])
    assert wave == {
        "kind": "tokens",
        "k": 3,
        "batch": 2,
        "repeat": 1,
        "group": "tokens",
        "step_ms": pytest.approx(8000 / 6),
        "ttft_ms": 1500.0,  # of 1000 and 2000
        "tokens_per_step": pytest.approx(7 / 6),
        "num_gaps": 6,
    }


def test_a_chunk_of_more_tokens_than_a_step_brings_is_several_steps() -> None:
    """Without drafts seven tokens in 8 s are seven steps, of which two came as one chunk."""
    wave = wave_record("none", 0, 0, "", [FIRST, SECOND])
    assert wave["step_ms"] == pytest.approx(8000 / 7)
    assert wave["tokens_per_step"] == 1.0


def test_requests_that_never_answered_together_are_an_error() -> None:
    late = streamed((9.0, 1), (10.0, 1))
    with pytest.raises(RuntimeError, match=r"2 requests to tokens \(K 3\).*curves\.steps"):
        wave_record("tokens", 3, 0, "", [FIRST, late])


def test_tokens_per_chunk_leaves_out_the_prompt_s_chunk_and_the_cut_one() -> None:
    whole = streamed((1.0, 1), (2.0, 4), (3.0, 4), (4.0, 2))
    assert tokens_per_chunk([whole, streamed((1.0, 1), (2.0, 1), (3.0, 9))], 3) == 3.0
    # nothing between first and last: every draft may have been accepted
    assert tokens_per_chunk([streamed((1.0, 1), (2.0, 2))], 3) == 4


def test_a_ratio_is_to_none_of_the_same_repeat_and_spread_is_least_and_greatest() -> None:
    # ratios by repeat 2, 1.5, 1.25; the ratio of the medians would be 30 / 20
    waves = waves_of("none", 0, [10.0, 20.0, 40.0]) + waves_of("eagle3", 3, [20.0, 30.0, 50.0])
    eagle3, none = curve_points(waves)
    assert eagle3 == {
        "kind": "eagle3", "k": 3, "batch": 1,
        "step_ms": 30.0, "step_ms_low": 20.0, "step_ms_high": 50.0,
        "ratio": 1.5, "ratio_low": 1.25, "ratio_high": 2.0,
        "ttft_ms": 300.0, "tokens_per_step": 1.0, "num_gaps": 12, "num_waves": 3,
    }  # fmt: skip
    assert (none["kind"], none["k"], none["ratio"], none["step_ms"]) == ("none", 0, 1.0, 20.0)


def test_waves_of_none_are_compared_within_their_group_and_counted_together() -> None:
    waves = [
        *waves_of("none", 0, [10.0], "a"), *waves_of("a", 1, [20.0], "a"),
        *waves_of("none", 0, [30.0], "b"), *waves_of("b", 1, [30.0], "b"),
    ]  # fmt: skip
    points = {point["kind"]: point for point in curve_points(waves)}
    assert (points["a"]["ratio"], points["b"]["ratio"]) == (2.0, 1.0)
    assert (points["none"]["step_ms"], points["none"]["num_waves"]) == (20.0, 2)


def test_plots_and_mlflow_get_every_point() -> None:
    points = curve_points(waves_of("none", 0, [10.0]))
    assert plot_rows(points) == [{"kind": "none", "k": 0, "batch": 1, "step_ms": 10.0}]
    assert by_name(points) == {"step_ms.none.k0.b1": 10.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [3, 3]}, "lists a value twice"),
        ({"batch": [1, 1]}, "lists a value twice"),
        ({"tokens": [0, 3]}, "greater than or equal to 1"),
        ({"batch": []}, "at least 1 item"),
        ({"steps": 0}, "greater than or equal to 1"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        curves_section(**changes)
