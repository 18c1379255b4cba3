"""What would break even, at the load where least is missing."""

from specmill.gates import break_even, loads
from specmill.grounds import in_flight
from tests.decided import bench, better, cell, foreseen, grounds, predictions


def test_the_load_where_least_is_missing_counts_not_the_lowest_bound() -> None:
    found = {
        "eagle3": bench(
            2,
            cell(2, 1, 0.9, 0.8, 0.95, tokens_per_step=1.2),
            cell(2, 8, 0.9, 0.8, 0.95, tokens_per_step=1.8),
        )
    }
    # 1.5 / 1.2 = 1.25 is missing at one request, 2.0 / 1.8 = 1.11 at eight
    predicted = predictions(
        foreseen("eagle3", 2, 1, 0.8, bound=1.5), foreseen("eagle3", 2, 8, 0.9, bound=2.0)
    )
    assert break_even(grounds(found, predicted=predicted), "eagle3", 2) == (
        "tokens per step exceed 2.00 at 8 requests in flight (now 1.80) and 1.50 at 1 (now 1.20)"
    )


def test_a_load_that_no_acceptance_pays_at_is_named_and_one_that_pays_is_not() -> None:
    cells = [cell(2, load, 0.9, 0.8, 0.95, tokens_per_step=1.2) for load in (1, 32)]
    found = {"eagle3": bench(2, *cells, cell(2, 8, 1.02, 0.98, 1.1, tokens_per_step=1.2))}
    predicted = predictions(
        foreseen("eagle3", 2, 1, 0.8, bound=1.5),
        foreseen("eagle3", 2, 8, 1.0, bound=1.1),
        foreseen("eagle3", 2, 32, 0.4, bound=3.01),
    )
    # 8 requests break even as it is: 1.2 / 1.2 would be the least that is missing
    assert break_even(grounds(found, predicted=predicted), "eagle3", 2) == (
        "tokens per step exceed 1.20 at 8 requests in flight (now 1.20) and 1.50 at 1 (now 1.20), "
        "and it is not served at 32 requests in flight, where no acceptance is enough"
    )


def test_loads_are_listed_with_their_unit_once() -> None:
    assert loads([in_flight(8)]) == "8 requests in flight"
    assert loads([in_flight(32), in_flight(1), in_flight(8)]) == "1, 8 and 32 requests in flight"
    long = in_flight(8) | {"context": 1024}
    assert loads([long, in_flight(1)]) == (
        "1 request in flight and 8 requests in flight, 1024 tokens of context"
    )


def test_where_the_measurement_contradicts_the_prediction_it_is_believed() -> None:
    found = {"eagle3": bench(2, cell(2, 1, 0.8, 0.75, 0.85, tokens_per_step=1.6))}
    predicted = predictions(foreseen("eagle3", 2, 1, 1.1, bound=1.4))
    # 1.6 / 0.8
    assert break_even(grounds(found, predicted=predicted), "eagle3", 2) == (
        "tokens per step exceed 2.00 at 1 request in flight (now 1.60)"
    )


def test_more_than_all_drafts_accepted_is_not_asked_for() -> None:
    found = {"eagle3": bench(1, cell(1, 8, 0.4, 0.3, 0.5, tokens_per_step=1.3))}
    said = "a step costs less: at K=1 not even 2 tokens per step, all drafts accepted, break even"
    for bound in (2.01, None):
        predicted = predictions(foreseen("eagle3", 1, 8, 0.4, bound=bound))
        assert break_even(grounds(found, predicted=predicted), "eagle3", 1) == said
    predicted = predictions(foreseen("eagle3", 1, 8, 0.4, bound=2.0))
    assert "exceed 2.00" in break_even(grounds(found, predicted=predicted), "eagle3", 1)


def test_loads_that_were_not_measured_do_not_count_beside_those_that_were() -> None:
    found = {"eagle3": bench(2, cell(2, 8, 0.9, 0.8, 0.95, tokens_per_step=1.2))}
    predicted = predictions(
        foreseen("eagle3", 2, 1, 0.9, bound=1.25), foreseen("eagle3", 2, 8, 0.9, bound=2.0)
    )
    gate = break_even(grounds(found, predicted=predicted), "eagle3", 2)
    assert gate == "tokens per step exceed 2.00 at 8 requests in flight (now 1.20)"


def test_acceptance_at_position_0_is_left_out_where_it_would_have_to_be_above_one() -> None:
    figures = {"tokens_per_step": 1.2, "acceptance_rate_pos_0": 0.2}
    found = {"eagle3": bench(5, cell(5, 1, 0.5, 0.4, 0.6, **figures))}
    # 0.2 * (2.1 - 1) / (1.2 - 1) = 1.1
    predicted = predictions(foreseen("eagle3", 5, 1, 0.5, bound=2.1))
    assert break_even(grounds(found, predicted=predicted), "eagle3", 5) == (
        "tokens per step exceed 2.10 at 1 request in flight (now 1.20)"
    )


def test_a_row_whose_acceptance_is_not_predicted_takes_its_bound_from_the_better_heads() -> None:
    found = {"draft": bench(2, cell(2, 1, 0.9, 0.8, 0.95, tokens_per_step=1.5))}
    heads = better("draft", 2, 1, (1.4, 0.8), (3.0, 1.5), bound=1.8)
    gate = break_even(grounds(found, predicted=predictions(heads=heads)), "draft", 2)
    assert gate == "tokens per step exceed 1.80 at 1 request in flight (now 1.50)"


def test_what_is_not_predicted_is_said() -> None:
    known = grounds(predicted=predictions(medusa="it has no curve"))
    assert break_even(known, "medusa", 3) == (
        "break-even is in reach, which is not known: it has no curve"
    )
    assert break_even(known, "eagle3", 3) == (
        "break-even is in reach, which is not known: no step times at K=3"
    )
