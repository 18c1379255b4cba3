"""Which hidden states an EAGLE-3 draft model is fed: the one place where depths are numbered.

Aux id i is the residual stream *entering* decoder layer i, that is, the output of layer i - 1.
With n layers, id n is the output of the last layer *before* the final norm. vLLM's
`eagle_aux_hidden_state_layer_ids` and speculators' `target_layer_ids` use these numbers
(speculators models/utils.py, `resolve_target_layer_ids`); `output_hidden_states` of transformers
agrees for i < n, while its last entry is taken *after* the final norm.

    id              0           1           2     ...    n - 1           n
    state      embeddings | layer 0 out | layer 1 out | layer n-2 out | layer n-1 out -> norm
    enters        layer 0     layer 1     layer 2         layer n-1      final norm
"""

from typing import Any, Literal

from specmill.shards import FP8, StateSpec


def default_aux_layer_ids(num_layers: int) -> list[int]:
    """EAGLE-3's low, middle and high depth: [2, n // 2, n - 3].

    Raises:
        ValueError: when the verifier is too shallow for three different depths.
    """
    ids = [2, num_layers // 2, num_layers - 3]
    if not 0 < ids[0] < ids[1] < ids[2]:
        raise ValueError(
            f"a verifier of {num_layers} layers has no three default depths {ids}; "
            "set extract.aux_layer_ids"
        )
    return ids


def aux_layer_ids(chosen: list[int] | None, num_layers: int) -> list[int]:
    """The depths fed to the draft model, checked; the last layer is not one of them.

    Raises:
        ValueError: when there are not three, or an id repeats, falls, or lies outside
            0 ... num_layers - 1.
    """
    if chosen is None:
        return default_aux_layer_ids(num_layers)
    if len(chosen) != 3:
        raise ValueError(
            f"extract.aux_layer_ids is {chosen}; vLLM serves EAGLE-3 heads with three depths"
        )
    if sorted(set(chosen)) != chosen or not 0 <= chosen[0] <= chosen[-1] < num_layers:
        raise ValueError(
            f"extract.aux_layer_ids is {chosen}; give rising ids from 0 to {num_layers - 1} "
            f"(the last layer, {num_layers}, is always extracted besides)"
        )
    return chosen


def stored_layer_ids(aux_ids: list[int], num_layers: int) -> list[int]:
    """The depths kept for each token: the aux ids, then the last layer (the training target)."""
    return [*aux_ids, num_layers]


def states_of(
    verifier: dict[str, Any], aux_ids: list[int] | None, dtype: Literal["auto", "fp8_e4m3"]
) -> StateSpec:
    """What is extracted of a verifier.

    Args:
        verifier: Its identity.json.
        aux_ids: Of extract.aux_layer_ids.
        dtype: Of extract.dtype; `auto` keeps the verifier's own.
    """
    num_layers = verifier["num_layers"]
    return StateSpec(
        verifier["fingerprint"],
        tuple(stored_layer_ids(aux_layer_ids(aux_ids, num_layers), num_layers)),
        verifier["hidden_size"],
        FP8 if dtype == "fp8_e4m3" else verifier["dtype"],
    )
