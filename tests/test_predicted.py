from typing import Any

import pytest

from specmill import predicted as prediction
from specmill.params import Spec
from specmill.params_bench import Bench
from specmill.params_file import load_params
from specmill.predicted import plot_rows
from tests.test_step_times import CURVES
from tests.workspace import ROOT

PARAMS = load_params(ROOT / "params.yaml")
BENCH = PARAMS.bench.model_copy(update={"concurrency": [1, 8], "max_tokens": 11})
SPEC = Spec(tokens=3, sweep=[1])


KINDS: dict[str, str | None] = {
    "none": "none", "ngram": "tokens", "eagle3": "eagle3", "found": "eagle3", "odd": None,
}  # fmt: skip


def curves() -> dict[str, Any]:
    return CURVES | {"prompt_tokens": 200.0}


def predict(
    curves: dict[str, Any], replays: dict[str, dict[str, Any]], spec: Spec, bench: Bench
) -> dict[str, Any]:
    return prediction.predict(curves, (KINDS, {"odd": "its kind is new"}), replays, spec, bench)


def replay(method: str, *rows: tuple[str, int, float], coverage: float = 1.0) -> dict[str, Any]:
    return {
        "method": method,
        "replayed": bool(rows),
        "reason": None if rows else f"{method} has no head",
        "rows": [
            {"category": category, "k": k, "draft_coverage": coverage, "tokens_per_step": tokens,
             "tokens_per_step_low": tokens / 1.1, "tokens_per_step_high": tokens * 1.1}
            for category, k, tokens in rows
        ],
    }  # fmt: skip


def replays() -> dict[str, Any]:
    return {
        "none": replay("none"),
        "ngram": replay("ngram", ("all", 3, 1.2)),
        "eagle3": replay("eagle3", ("all", 3, 2.0), ("maths", 3, 3.0), ("all", 1, 1.6),
                         ("all", 5, 2.2)),
        "found": replay("found"),
        "odd": replay("odd", ("all", 3, 2.0)),
    }  # fmt: skip


def of(rows: list[dict[str, Any]], **place: Any) -> dict[str, Any]:
    (row,) = [row for row in rows if row.items() >= place.items()]
    return row


def test_a_predicted_cell_is_replayed_acceptance_over_measured_step_times() -> None:
    rows = predict(curves(), replays(), SPEC, BENCH)["rows"]
    row = of(rows, method="eagle3", k=3, concurrency=1, category="all")
    # none: 30 + 10 * 10 ms; eagle3: 44 + 10 * 16 / 2 ms
    assert row["speedup"] == pytest.approx(130 / 124, abs=1e-4)
    assert row["break_even_tokens_per_step"] == pytest.approx(160 / 86, abs=1e-4)
    assert (row["tokens_per_step"], row["step_ratio"]) == (2.0, 1.6)
    assert row["speedup_low"] < row["speedup"] < row["speedup_high"]
    assert of(rows, method="eagle3", concurrency=1, category="maths")["speedup"] == pytest.approx(
        130 / (44 + 160 / 3), abs=1e-4
    )


def test_rows_that_draft_in_some_steps_pay_for_those_alone() -> None:
    some = {"ngram": replay("ngram", ("all", 3, 1.2), coverage=0.25)}
    at_four = BENCH.model_copy(update={"concurrency": [4]})
    (row,) = predict(curves(), some, SPEC, at_four)["rows"]
    # in 0.25 ** 4 of the steps all draft, which takes 1.1 times as long; in all others 1.3 times
    assert row["step_ratio"] == pytest.approx(1.3 - 0.0039 * 0.2, abs=1e-4)
    assert row["speedup"] == pytest.approx(290 / (95 + 200 * 1.29922 / 1.2), abs=1e-4)


def test_rows_that_draft_in_some_steps_have_no_prediction_without_steps_that_do_not() -> None:
    some = {"ngram": replay("ngram", ("all", 3, 1.2), coverage=0.25)}
    at_four = BENCH.model_copy(update={"concurrency": [4]})
    points = [one for one in CURVES["points"] if (one["kind"], one["k"]) != ("tokens", 0)]
    predicted = predict(curves() | {"points": points}, some, SPEC, at_four)
    assert predicted["rows"] == []
    assert "steps in which nothing is drafted were not measured" in predicted["without"]["ngram"]


def test_what_cannot_be_predicted_has_no_row_and_a_reason() -> None:
    predicted = predict(curves(), replays(), SPEC, BENCH)
    assert {(row["method"], row["k"], row["concurrency"]) for row in predicted["rows"]} == {
        ("eagle3", 1, 1), ("eagle3", 3, 1),
    }  # fmt: skip
    load = "requests in flight: 8 is outside what was measured (1-4)"
    assert predicted["without"] == {
        "ngram": "K 1 was not replayed; requests in flight: 1 is outside what was measured (4); "
        "requests in flight: 8 is outside what was measured (4)",
        "eagle3": f"{load}; K: 5 is outside what was measured (1-3)",
        "found": f"found has no head; {load}",
        "odd": "its kind is new",
    }


def test_loads_without_step_times_are_said_to_be_left_out() -> None:
    odd = BENCH.model_copy(update={"rates": [2.0], "context": [0, 1024]})
    without = predict(curves(), replays(), SPEC, odd)["without"]
    assert {"bench.rates", "bench.context"} < set(without)
    assert "bench.context" not in predict(curves(), replays(), SPEC, BENCH)["without"]


def test_the_best_k_is_over_all_prompt_types_and_may_be_no_speculation() -> None:
    predicted = predict(curves(), replays(), SPEC, BENCH)
    # K = 1: 130 / (40 + 120 / 1.6) = 1.130, K = 3: 1.048
    (best,) = predicted["best"]
    assert (best["method"], best["concurrency"], best["k"], best["next_k"]) == ("eagle3", 1, 1, 3)
    assert best["margin"] == pytest.approx(1.1304 / 1.0484, abs=1e-3)
    assert predicted["headline"] == {
        "eagle3": {"c1": {"best_k": 1, "predicted_speedup": best["speedup"]}}
    }
    poor = replays() | {"eagle3": replay("eagle3", ("all", 3, 1.1))}
    (best,) = predict(curves(), poor, SPEC, BENCH)["best"]
    assert (best["k"], best["next_k"], best["speedup"]) == (0, 3, 1.0)


def test_better_heads_are_asked_for_where_there_is_a_head_to_better() -> None:
    rows = predict(curves(), replays(), SPEC, BENCH)["better_head"]
    # a head that could not be replayed has step times all the same; n-gram has no head
    assert {row["method"] for row in rows} == {"eagle3", "found"}
    assert {row["k"] for row in rows} == {3}
    lengths = [row["tokens_per_step"] for row in rows if row["method"] == "found"]
    assert lengths == [1.4, 1.7, 2.0, 2.5, 3.0, 3.5, 4.0]
    assert of(rows, method="found", tokens_per_step=2.5)["speedup"] == pytest.approx(
        130 / (44 + 160 / 2.5), abs=1e-4
    )


def test_the_map_of_the_prediction_has_the_rows_of_the_measured_one() -> None:
    rows = plot_rows(predict(curves(), replays(), SPEC, BENCH))
    assert [(row["load"], row["num_speculative_tokens"], row["verdict"]) for row in rows] == [
        # K = 1: half-widths 1.1 and 1.4 / 1.2 make 1.199; 130 / (40 + 75 * 1.199) = 1.0008
        ("1 in flight", 1, "faster"),
        ("1 in flight", 3, "no difference shown"),
    ]
    nothing = plot_rows(predict(curves(), {"none": replay("none")}, SPEC, BENCH))
    assert [row["speedup"] for row in nothing] == [None]
    assert set(nothing[0]) == set(rows[0])


def test_the_headline_k_of_params_yaml_is_what_better_heads_are_asked_for() -> None:
    predicted = predict(curves(), replays(), PARAMS.spec, PARAMS.bench)
    assert {row["k"] for row in predicted["better_head"]} == {PARAMS.spec.tokens}
