import pytest

from specmill.latency import goodput, itl_s, latency, ttft_s
from tests.benched import answer, request

# sent at 1 s; first token after 0.2 s, then 2 tokens after 0.3 s and 1 after 0.6 s
PLAIN = request([1, 2, 3, 4], 1.0, (1.2, 1), (1.5, 2), (2.1, 1))
AT_ONCE = answer([1, 2, 3], 0.5)
BOUNDS = {"max_ttft_ms": 200.0, "max_itl_ms": 300.0}


def test_the_first_chunk_ends_the_time_to_the_first_token() -> None:
    assert ttft_s(PLAIN) == pytest.approx(0.2)
    assert ttft_s(AT_ONCE) == 0.5


def test_time_per_token_is_of_the_tokens_after_the_first_chunk_and_not_per_chunk() -> None:
    assert itl_s(PLAIN) == pytest.approx(0.3)  # 0.9 s for 3 tokens in 2 chunks
    # a first chunk of several tokens says nothing of how long they took
    assert itl_s(request([1, 2, 3], 0.0, (1.0, 2), (1.5, 1))) == 0.5


def test_an_answer_of_one_chunk_has_no_time_per_token() -> None:
    assert itl_s(AT_ONCE) is None


def test_percentiles_are_over_requests_and_of_chunks_over_all_gaps() -> None:
    found = latency([PLAIN, AT_ONCE])
    assert found["ttft_ms_p50"] == pytest.approx(350.0)  # between 200 and 500
    assert found["ttft_ms_p90"] == pytest.approx(470.0)
    assert found["itl_ms_p50"] == found["itl_ms_p99"] == pytest.approx(300.0)
    assert found["chunk_ms_p50"] == pytest.approx(450.0)  # between 300 and 600
    assert found["e2e_ms_p50"] == pytest.approx(800.0)  # between 1100 and 500
    assert found["e2e_ms_p99"] == pytest.approx(1094.0)


def test_percentiles_of_many_requests_are_ordered_and_count_from_below() -> None:
    found = latency([answer([1], seconds) for seconds in range(101)])
    assert [found[f"ttft_ms_p{p}"] for p in (50, 90, 99)] == [50_000.0, 90_000.0, 99_000.0]


def test_where_every_answer_is_one_chunk_nothing_is_known_of_what_follows() -> None:
    found = latency([AT_ONCE])
    assert {name for name, value in found.items() if value is None} == {
        f"{name}_ms_p{percent}" for name in ("itl", "chunk") for percent in (50, 90, 99)
    }


def test_goodput_counts_requests_a_second_whose_first_and_further_tokens_came_in_time() -> None:
    late_first = request([1, 2], 0.0, (0.3, 1), (0.4, 1))
    slow_after = request([1, 2], 0.0, (0.1, 1), (0.5, 1))
    good = request([1, 2], 0.0, (0.1, 1), (0.3, 1))
    assert goodput([late_first, slow_after, good], 2.0, BOUNDS) == 0.5
    assert goodput([late_first, slow_after], 2.0, BOUNDS) == 0.0


def test_a_request_of_one_chunk_needs_only_its_first_token_in_time() -> None:
    assert goodput([answer([1, 2], 0.1), answer([1, 2], 0.3)], 1.0, BOUNDS) == 1.0


def test_a_bound_that_is_just_met_is_met() -> None:
    exact = request([1, 2], 0.0, (0.25, 1), (0.5, 1))
    assert goodput([exact], 1.0, {"max_ttft_ms": 250.0, "max_itl_ms": 250.0}) == 1.0
