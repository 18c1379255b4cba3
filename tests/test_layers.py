import pytest

from specmill.layers import aux_layer_ids, default_aux_layer_ids, stored_layer_ids


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (30, [2, 15, 27]),  # SmolLM2-135M
        (36, [2, 18, 33]),
        (61, [2, 30, 58]),
        (7, [2, 3, 4]),  # the shallowest that has three
    ],
)
def test_default_depths_are_2_the_middle_and_the_third_from_last(
    num_layers: int, expected: list[int]
) -> None:
    assert default_aux_layer_ids(num_layers) == expected
    assert aux_layer_ids(None, num_layers) == expected


@pytest.mark.parametrize("num_layers", [1, 4, 5, 6])
def test_a_verifier_too_shallow_for_the_defaults_must_be_given_depths(num_layers: int) -> None:
    with pytest.raises(ValueError, match=r"set extract\.aux_layer_ids"):
        aux_layer_ids(None, num_layers)
    if num_layers > 2:
        assert aux_layer_ids([0, 1, 2], num_layers) == [0, 1, 2]


@pytest.mark.parametrize("chosen", [[0, 1, 2], [0, 15, 29], [5, 6, 7]])
def test_rising_depths_below_the_last_layer_are_taken_as_given(chosen: list[int]) -> None:
    assert aux_layer_ids(chosen, 30) == chosen


@pytest.mark.parametrize("chosen", [[2, 15, 30], [2, 2, 5], [15, 2, 20], [-1, 5, 9]])
def test_other_depths_are_refused_with_the_range_that_is_allowed(chosen: list[int]) -> None:
    with pytest.raises(ValueError, match=r"is \[.*\]; give rising ids from 0 to 29 .*30, is"):
        aux_layer_ids(chosen, 30)


@pytest.mark.parametrize("chosen", [[], [2], [2, 15], [2, 9, 15, 27]])
def test_other_numbers_of_depths_than_vllm_serves_are_refused(chosen: list[int]) -> None:
    with pytest.raises(ValueError, match="heads with three depths"):
        aux_layer_ids(chosen, 30)


def test_the_last_layer_is_stored_after_the_aux_layers() -> None:
    chosen = [2, 15, 27]
    assert stored_layer_ids(chosen, 30) == [2, 15, 27, 30]
    assert chosen == [2, 15, 27]
