from typing import Any

import pytest

from specmill.between import NotMeasured
from specmill.step_times import step_times


def none(batch: int, step_ms: float, ttft_ms: float) -> dict[str, Any]:
    return {"kind": "none", "k": 0, "batch": batch, "step_ms": step_ms, "ttft_ms": ttft_ms,
            "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}  # fmt: skip


def drafted(
    k: int, batch: int, ratio: float, ttft_ms: float, kind: str = "eagle3"
) -> dict[str, Any]:
    # a step time that contradicts the ratio: it was measured at another moment than `none`
    return {"kind": kind, "k": k, "batch": batch, "step_ms": 999.0, "ttft_ms": ttft_ms,
            "ratio": ratio, "ratio_low": ratio - 0.1, "ratio_high": ratio + 0.2}  # fmt: skip


CURVES: dict[str, Any] = {
    "points": [
        none(1, 10.0, 30.0),
        none(4, 20.0, 90.0),
        drafted(1, 1, 1.2, 40.0),
        drafted(3, 1, 1.6, 44.0),
        drafted(1, 4, 1.5, 100.0),
        drafted(3, 4, 2.0, 120.0),
        drafted(3, 4, 1.1, 95.0, kind="tokens"),
        drafted(0, 4, 1.3, 95.0, kind="tokens"),
    ]
}


def test_a_measured_point_is_itself() -> None:
    cell = step_times(CURVES, "eagle3").cell(3, 4)
    assert (cell.none_ms, cell.none_ttft_ms, cell.ttft_ms) == (20.0, 90.0, 120.0)
    assert cell.ratio.value == pytest.approx(2.0)
    assert cell.ratio.low == pytest.approx(1.9)
    assert cell.ratio.high == pytest.approx(2.2)
    assert cell.step_ms == pytest.approx(40.0)


def test_between_two_k_the_step_time_is_on_a_straight_line() -> None:
    cell = step_times(CURVES, "eagle3").cell(2, 1)
    assert cell.step_ms == pytest.approx(14.0)  # halfway from 12 to 16 ms
    assert cell.ttft_ms == pytest.approx(42.0)


def test_between_two_loads_both_step_times_are_and_the_ratio_follows() -> None:
    cell = step_times(CURVES, "eagle3").cell(1, 2)
    assert cell.none_ms == pytest.approx(10 + 10 / 3)
    assert cell.step_ms == pytest.approx(12 + 18 / 3)  # a third of the way from 12 to 30 ms
    assert cell.ratio.value == pytest.approx(18 / (40 / 3))
    assert cell.none_ttft_ms == pytest.approx(50.0)


def test_k_is_interpolated_at_each_load_and_the_load_after_that() -> None:
    cell = step_times(CURVES, "eagle3").cell(2, 2)
    # K = 2: 14 ms at one request, halfway from 30 to 40 at four
    assert cell.step_ms == pytest.approx(14 + (35 - 14) / 3)


@pytest.mark.parametrize(
    ("k", "batch", "message"),
    [
        (4, 1, r"K: 4 is outside what was measured \(1-3\)"),
        (1, 8, r"requests in flight: 8 is outside what was measured \(1-4\)"),
    ],
)
def test_beyond_the_measured_points_there_is_no_figure(k: int, batch: int, message: str) -> None:
    with pytest.raises(NotMeasured, match=message):
        step_times(CURVES, "eagle3").cell(k, batch)


def test_a_single_point_is_no_line() -> None:
    times = step_times(CURVES, "tokens")
    assert times.cell(3, 4).ratio.value == pytest.approx(1.1)
    with pytest.raises(NotMeasured, match=r"K: 2 is outside what was measured \(3\)"):
        times.cell(2, 4)


@pytest.mark.parametrize("kind", ["medusa/three", "none"])
def test_a_kind_that_was_not_measured_is_named_with_those_that_were(kind: str) -> None:
    with pytest.raises(NotMeasured, match=f"no step times of '{kind}'; there are eagle3, tokens"):
        step_times(CURVES, kind)


def test_a_load_without_a_reference_is_refused() -> None:
    lonely = {"points": [*CURVES["points"], drafted(1, 16, 1.5, 100.0)]}
    with pytest.raises(NotMeasured, match=r"eagle3 was measured at \[16\] requests"):
        step_times(lonely, "eagle3")


def test_steps_without_drafts_are_no_k_to_interpolate_from_but_known_beside_it() -> None:
    times = step_times(CURVES, "tokens")
    cell = times.cell(3, 4)
    assert cell.empty is not None
    assert (cell.empty.value, cell.empty.low, cell.empty.high) == pytest.approx((1.3, 1.2, 1.5))
    with pytest.raises(NotMeasured, match=r"K: 1 is outside what was measured \(3\)"):
        times.cell(1, 4)
    assert step_times(CURVES, "eagle3").cell(3, 4).empty is None


def test_steps_without_drafts_have_to_be_known_at_every_load_or_at_none() -> None:
    more = {"points": [*CURVES["points"], drafted(3, 1, 1.1, 30.0, kind="tokens")]}
    with pytest.raises(NotMeasured, match=r"not measured at \[1\] requests in flight without"):
        step_times(more, "tokens")


def test_between_two_loads_steps_without_drafts_are_on_a_line_too() -> None:
    more = {"points": [*CURVES["points"],
                       *(drafted(k, 1, 2.0, 30.0, kind="tokens") for k in (0, 3))]}  # fmt: skip
    empty = step_times(more, "tokens").cell(3, 2).empty
    assert empty is not None
    # 20 ms at one request and 26 at four, of none 10 and 20
    assert empty.value == pytest.approx((20 + 6 / 3) / (10 + 10 / 3))
