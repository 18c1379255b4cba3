"""Training longer, another head, more data: what a better head would bring decides."""

from typing import Any

import pytest

from specmill.head_options import head_options, held_out_lengths
from specmill.options import Option
from tests.decided import bench, better, cell, foreseen, grounds, predictions


def epochs(*accuracies: list[float], **replayed: list[float]) -> list[dict[str, Any]]:
    """reports/plots/train.json; `replayed` lengths by K for every epoch."""
    lengths = replayed.get("replayed")
    return [
        {"epoch": epoch, "position": position, "accuracy": accuracy, "loss": 1.0}
        | ({"replayed_length": lengths[epoch] - position * 0.01} if lengths else {})
        for epoch, by_position in enumerate(accuracies)
        for position, accuracy in enumerate(by_position)
    ]


RISING = epochs([0.3, 0.1, 0.02], [0.35, 0.12, 0.05])
SLOWER = {"eagle3": bench(2, cell(2, 1, 0.9, 0.85, 0.95, tokens_per_step=1.5))}
HEADS = better("eagle3", 2, 1, (1.4, 0.85), (2.0, 1.2), (3.0, 1.7), bound=1.7)


def named(found: dict[str, Any], **further: Any) -> dict[str, Option]:
    return {option.name: option for option in head_options(grounds(found, **further))}


def test_held_out_length_is_one_and_the_sum_of_accuracies_up_to_k() -> None:
    assert held_out_lengths(RISING, 2) == pytest.approx([1.4, 1.47])
    assert held_out_lengths(RISING, 1) == pytest.approx([1.3, 1.35])
    assert held_out_lengths(RISING, 9) == pytest.approx([1.42, 1.52])
    assert held_out_lengths([], 2) == []


def test_where_it_was_replayed_the_replayed_length_counts() -> None:
    rows = epochs([0.3, 0.1], [0.35, 0.12], replayed=[1.5, 1.6])
    assert held_out_lengths(rows, 2) == pytest.approx([1.49, 1.59])
    assert held_out_lengths(rows, 1) == pytest.approx([1.5, 1.6])


def test_a_head_that_does_not_pay_yet_has_what_it_must_reach_as_gate() -> None:
    found = named(SLOWER, training=RISING, predicted=predictions(heads=HEADS))
    assert list(found) == ["train longer", "other head", "more on-policy data"]
    for option in found.values():
        assert (option.status, option.method, option.k) == ("pending", "eagle3", 2)
        assert option.gate == "tokens per step exceed 1.70 at 1 request in flight (now 1.50)"
    assert found["train longer"].evidence == [
        "Held-out acceptance length with K=2 by epoch: 1.40, 1.47.",
        "The last epoch changed it by +5.0%.",
    ]
    assert found["other head"].evidence == [
        "No head from elsewhere is a row (`heads` in params.yaml).",
        "Predicted by tokens per step at K=2 and 1 request in flight: 1.4 -15% (-16% to -14%), 2.0 "
        "+20% (+19% to +21%), 3.0 +70% (+69% to +71%).",
    ]


def test_where_not_even_a_perfect_head_pays_all_three_are_ruled_out() -> None:
    heads = better("eagle3", 2, 1, (1.4, 0.5), (3.0, 0.9), bound=3.4)
    heads += better("eagle3", 2, 8, (1.4, 0.4), (3.0, 0.7), bound=4.4)
    found = named(SLOWER, training=RISING, predicted=predictions(heads=heads))
    for option in found.values():
        assert option.status == "ruled out"
        assert option.gate == (
            "a step costs less: at K=2 a head whose drafts are all accepted is predicted -10% "
            "(-11% to -9%) at best"
        )


def test_a_head_that_no_longer_gets_better_is_not_trained_longer() -> None:
    level = epochs([0.3, 0.1], [0.305, 0.1])  # 1.405 / 1.4 is 0.4%
    found = named(SLOWER, training=level, predicted=predictions(heads=HEADS))
    assert found["train longer"].status == "ruled out"
    assert found["train longer"].gate == (
        "other data or parameters make it rise in the last epoch again"
    )
    assert found["other head"].status == "pending"


def test_a_head_that_pays_is_measured_against_the_next_better_one() -> None:
    pays = {"eagle3": bench(2, cell(2, 1, 1.1, 1.05, 1.15, tokens_per_step=1.8))}
    found = named(pays, training=RISING, predicted=predictions(heads=HEADS))
    assert found["other head"].gate == (
        "more is wanted: 2.0 tokens per step instead of 1.80 would be +20% (+19% to +21%) at 1 "
        "request in flight"
    )
    found = named(pays, predicted=predictions(foreseen("eagle3", 2, 1, 1.1)))
    assert found["other head"].gate == (
        "it pays as it is; what a better head would bring is not predicted"
    )


def test_what_is_not_known_is_said() -> None:
    found = named(SLOWER)
    assert found["train longer"].evidence == [
        "There is no reports/plots/train.json: whether the head was still getting better is not "
        "known."
    ]
    assert found["more on-policy data"].evidence == [
        "How much it was trained on is not known: no reports/prepare.json."
    ]
    assert found["other head"].evidence[-1] == "What a better head would bring is not predicted."
    assert {option.status for option in found.values()} == {"pending"}
    once = named(SLOWER, training=epochs([0.3, 0.1]))["train longer"]
    assert once.evidence[0].startswith("Only one epoch was trained: ")


def test_data_and_coverage_are_the_evidence_for_more_of_it() -> None:
    found = named(
        SLOWER,
        prepared={"train": {"num_kept": 456, "num_trained_tokens": 68348}},
        vocab={"heldout_coverage": 0.9109},
    )
    assert found["more on-policy data"].evidence == [
        "It was trained on up to 456 answers with 68,348 trained tokens.",
        "Its draft vocabulary has 91.1% of the held-out answers' tokens: acceptance at position 0 "
        "cannot be more.",
    ]
    full = named(SLOWER, vocab={"coverage": 1.0, "heldout_coverage": None})
    assert len(full["more on-policy data"].evidence) == 1


def test_heads_from_elsewhere_that_are_rows_are_evidence() -> None:
    theirs = bench(2, cell(2, 8, 0.7, 0.6, 0.8), cell(2, 1, 1.1, 1.05, 1.15))
    found = SLOWER | {"foreign": theirs | {"head": {"trained_for": "older", "run_on": "tiny"}}}
    assert named(found)["other head"].evidence[0] == (
        "foreign, trained for older: +10% (+5% to +15%) at 1 request in flight."
    )
    found["foreign"]["head"] = {"trained_for": None, "run_on": "tiny"}
    assert "trained for nobody says which verifier" in named(found)["other head"].evidence[0]


def test_where_no_row_serves_the_head_nothing_is_said_of_it() -> None:
    known = grounds()
    rows = {name: row for name, row in known.methods.items() if name != "eagle3"}
    assert head_options(type(known)(known.results, rows, known.hardware)) == []
