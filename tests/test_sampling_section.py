from typing import Any

from specmill.sampling_section import sampling_section


def outcome(p_value: float, length: float | None = 1.5) -> dict[str, Any]:
    return {
        "lossless": p_value >= 1e-3,
        "p_value": p_value,
        "num_samples": 8192,
        "num_tests": 6,
        "temperature": 1.0,
        "acceptance_length": length,
    }


SAMPLING = {
    "none": outcome(0.31, None),
    "ngram": outcome(0.8),
    "wrong": outcome(2e-7),
    "suffix": {"lossless": None, "not_checked": "it needs a package"},
}


def test_the_table_has_a_line_per_row_and_a_reason_for_each_that_did_not_pass() -> None:
    lines = sampling_section(SAMPLING, None)
    assert [line for line in lines if line.startswith("| ")][2:] == [
        "| none | yes | 0.31 | 8192 | - |",
        "| ngram | yes | 0.8 | 8192 | 1.50 |",
        "| wrong | **no** | 2e-07 | 8192 | 1.50 |",
        "| suffix | not tested | - | - | - |",
    ]
    reasons = [line for line in lines if line.startswith("- ")]
    assert len(reasons) == 2
    assert "**wrong is not lossless when sampled**" in reasons[0]
    assert "p = 2e-07 over 6 tests of 8192 samples" in reasons[0]
    assert reasons[1] == "- suffix: sampling was not tested: it needs a package"


def test_without_any_result_there_is_no_section() -> None:
    assert sampling_section({}, None) == []


def test_a_fault_that_is_known_stands_in_the_reason_of_every_wrong_row_and_of_no_other() -> None:
    lines = sampling_section(SAMPLING, "vllm#1 swaps tokens")
    assert [line.split("**")[1] for line in lines if "Known: vllm#1 swaps tokens" in line] == [
        "wrong is not lossless when sampled"
    ]
