"""What a run says it can decide."""

from typing import Any

import pytest

from specmill.yardstick import blur, is_test, limits
from tests.benches import comparable, engine

Results = dict[str, dict[str, Any]]


@pytest.fixture
def results() -> Results:
    return comparable()


def test_the_size_of_a_run_and_how_far_none_lies_from_itself_are_said_by_load(
    results: Results,
) -> None:
    results["ngram"]["rows"][0] |= {"num_pairs": 21, "output_tokens": 13723}
    results["eagle3"]["rows"][0] |= {"output_tokens": 4539}
    # none is 0.98 to 1.03 at one request, 0.97 to 1.02 at eight
    assert limits(results, None) == [
        "At 1 request in flight: 8 to 21 pairs and 4,539 to 13,723 output tokens for each method; "
        "`none` against itself is +0.2% (-2% to +3%), so a change of less than 3% may be the "
        "machine's.",
        "At 8 requests in flight: 8 pairs for each method; `none` against itself is -0.4% (-3% to "
        "+2%), so a change of less than 3% may be the machine's.",
    ]


def test_without_none_or_its_interval_what_equal_servers_differ_by_is_not_known(
    results: Results,
) -> None:
    results["none"]["rows"][0] |= {"speedup_low": None, "speedup_high": None, "num_pairs": 4}
    assert limits(results, None)[0] == (
        "At 1 request in flight: 4 to 8 pairs for each method, too few for an interval of `none` "
        "against itself (+0.2%)."
    )
    assert blur(results) == float("inf")
    del results["none"]
    assert limits(results, None)[-2:] == [
        "At 8 requests in flight: 8 pairs for each method.",
        "`none` was not measured: how far equal servers differ here is not known.",
    ]
    assert blur(results) is None


def test_rows_can_be_ranked_while_the_interval_of_none_is_narrow(results: Results) -> None:
    assert blur(results) is None
    results["none"]["rows"][2] |= {"speedup_low": 0.85, "speedup_high": 1.06}
    assert blur(results) == pytest.approx(0.15)
    results["none"]["rows"][2] |= {"speedup_low": 0.9, "speedup_high": 1.09}
    assert blur(results) is None


def test_uncompiled_engines_make_a_run_a_test(results: Results) -> None:
    assert not is_test(results)
    results["ngram"]["engine"]["reference_k0_0"] = engine(enforce_eager="True")
    assert is_test(results)
    assert limits(results, None)[0] == (
        "**Test configuration**: engines of ngram ran uncompiled (`bench.enforce_eager`), as no "
        "deployment does."
    )


def test_step_times_that_were_measured_once_leave_predictions_too_narrow(results: Results) -> None:
    once = {"points": [{"k": 0, "num_waves": 2}, {"k": 3, "num_waves": 1}]}
    assert limits(results, once)[-1].startswith("Step times were measured once each")
    several = {"points": [{"k": 0, "num_waves": 1}, {"k": 3, "num_waves": 3}]}
    assert limits(results, several) == limits(results, None)
