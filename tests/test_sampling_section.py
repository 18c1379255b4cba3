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
    "worse": outcome(0.0),
    "suffix": {"lossless": None, "not_checked": "it needs a package"},
}


def test_the_table_has_a_line_per_row_and_a_reason_for_each_that_did_not_pass() -> None:
    lines = sampling_section(SAMPLING)
    assert [line for line in lines if line.startswith("| ")][2:] == [
        "| none | yes | 0.31 | 8192 | - |",
        "| ngram | yes | 0.8 | 8192 | 1.50 |",
        "| wrong | **no** | 2e-07 | 8192 | 1.50 |",
        "| worse | **no** | < 1e-300 | 8192 | 1.50 |",
        "| suffix | not tested | - | - | - |",
    ]
    reasons = [line for line in lines if line.startswith("- ")]
    assert reasons == [
        "- **Not lossless when sampled** (†, above): wrong, worse.",
        "- suffix: sampling was not tested: it needs a package",
    ]


def test_without_any_result_there_is_no_section() -> None:
    assert sampling_section({}) == []
