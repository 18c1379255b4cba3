from typing import Any

from specmill.prediction_section import prediction_section

SPEED: dict[str, Any] = {
    "method": "ngram",
    "k": 3,
    "concurrency": 8,
    "category": "all",
    "predicted": 0.85,
    "predicted_low": 0.8,
    "predicted_high": 0.9,
    "measured": 0.83,
    "measured_low": None,
    "measured_high": None,
    "error": 0.0241,
    "is_new": True,
}
ACCEPTANCE = {
    "method": "eagle3",
    "k": 3,
    "num_sequences": 12,
    "num_tokens": 600,
    "replayed": 1.4512,
    "served": 1.46,
    "error": -0.006,
}
CHECK: dict[str, Any] = {
    "num_cells": 1,
    "median_absolute_error": 0.0241,
    "num_cells_new": 1,
    "median_absolute_error_new": 0.0241,
    "speed": [SPEED, SPEED | {"category": "maths", "k": 9}],
    "acceptance": [ACCEPTANCE],
}


def test_predictions_stand_beside_their_measurements_and_the_error() -> None:
    text = "\n".join(prediction_section(CHECK))
    assert "Median absolute error: 2.4% over 1 of them; 2.4% over the 1 whose K" in text
    assert "| ngram | 3 | 8* | -15% (-20% to -10%) | -17% | +2.4% |" in text
    assert "| eagle3 | 3 | 1.451 | 1.460 | -0.6% | 12 | 600 |" in text


def test_single_prompt_types_are_not_listed() -> None:
    assert "| ngram | 9 |" not in "\n".join(prediction_section(CHECK))


def test_cells_of_the_curves_alone_have_one_error() -> None:
    seen = CHECK | {"num_cells_new": 0, "speed": [SPEED | {"is_new": False}]}
    text = "\n".join(prediction_section(seen))
    assert "over 1 of them." in text
    assert "| ngram | 3 | 8 |" in text


def test_nothing_compared_is_no_section() -> None:
    nothing = {"num_cells": 0, "num_cells_new": 0, "speed": [], "acceptance": []}
    assert prediction_section(nothing) == []
