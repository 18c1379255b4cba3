"""Look at a head before it is served: does it fit, is it whole, how good is it offline?

What makes serving impossible or meaningless refuses the head; anything else is a finding, whose
sentence names the likely cause and the way out, and the head is served anyway. The likely cause of
poor drafts is found by trying (specmill.trials).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from specmill.files import read_object
from specmill.head_checks import check_config, differences, misfits
from specmill.head_facts import trained_for
from specmill.head_shapes import WEIGHTS, tensor_shapes
from specmill.offline import expected_shapes
from specmill.random_tensors import looks_drawn
from specmill.samples import Sample
from specmill.section import DoesNotFit
from specmill.trials import read_tables, try_offline
from specmill.view import StateView


def inspect_head(
    folder: Path,
    verifier: dict[str, Any],
    verifier_head: Path,
    view: StateView,
    heldout: list[Sample],
) -> dict[str, Any]:
    """Everything inspection.json holds.

    Args:
        folder: A head in speculators' format.
        verifier: identity.json of the verifier that is to run it.
        verifier_head: Its slice (data/verifier_head).
        view: Its hidden states of the held-out samples.
        heldout: Greedy answers of the verifier.

    Returns:
        `trained_for`: name of the verifier it was made for, None when nobody says;
        `run_on`: name of the verifier; `refused`: why it cannot be served, or None;
        `findings`: a sentence by short key, or None;
        `offline`: `acceptance_rate_pos_0`, `num_positions` and `layer_ids`, or None where the
        states that its config asks for are not stored.
    """
    inspection = refusal(trained_for(folder), verifier, None)
    try:
        findings = _whole(folder, verifier, verifier_head)
        causes, offline = try_offline(folder, verifier, verifier_head, view, heldout)
    except DoesNotFit as reason:
        return inspection | {"refused": str(reason)}
    return inspection | {"findings": findings | causes or None, "offline": offline}


def refusal(made_for: str | None, verifier: dict[str, Any], reason: str | None) -> dict[str, Any]:
    """An inspection that found nothing, or that came no further than `reason`."""
    return {
        "trained_for": made_for,
        "run_on": verifier["name"],
        "refused": reason,
        "findings": None,
        "offline": None,
    }


def _whole(folder: Path, verifier: dict[str, Any], verifier_head: Path) -> dict[str, str]:
    """Findings about config and tensors.

    Raises:
        DoesNotFit: with every reason.
    """
    config = read_object(folder / "config.json")
    kind = config.get("speculators_model_type")
    if kind != "eagle3":
        raise DoesNotFit(f"{folder.name} is a head of kind {kind}, not eagle3")
    check_config(config, folder.name)
    try:
        reasons = misfits(config, tensor_shapes(folder), expected_shapes(folder), verifier)
    except ValueError as error:
        raise DoesNotFit(f"{folder.name}: {error}") from None
    if reasons:
        raise DoesNotFit(f"{folder.name} does not fit {verifier['name']}: {'; '.join(reasons)}")
    found = differences(config, read_object(verifier_head / "config.json"), verifier)
    found |= _contents(folder)
    d2t, t2d = read_tables(folder)
    if d2t is not None and (fault := mapping_fault(d2t, t2d, verifier["vocab_size"])):
        found["mapping"] = fault
    return found


def _contents(folder: Path) -> dict[str, str]:
    """Findings about the values of the tensors, read one at a time."""
    zero, drawn = [], []
    check_finite(folder)
    for name, tensor in _weights(folder):
        if not bool(tensor.any()):
            zero.append(name)
        elif looks_drawn(tensor):
            drawn.append(name)
    found = {}
    if zero:
        found["zeros"] = f"all zeros: {', '.join(zero)}; lost in training or in a conversion"
    if drawn:
        found["drawn"] = (
            f"hardly or never trained, by the look of their values: {', '.join(drawn)}; a "
            "converter that does not find a tensor under its name leaves it as it was drawn, so "
            "compare names and values with the original checkpoint"
        )
    return found


def check_finite(folder: Path) -> None:
    """Refuse a head that computes nothing: training from it would not either.

    Raises:
        DoesNotFit: naming the tensors that hold NaN or infinity.
    """
    broken = [name for name, tensor in _weights(folder) if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise DoesNotFit(f"{folder.name} holds NaN or infinity in {', '.join(broken)}")


def _weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors but the mapping, one at a time."""
    with safe_open(folder / WEIGHTS, framework="pt") as weights:
        for name in sorted(set(weights.keys()) - {"d2t", "t2d"}):
            yield name, weights.get_tensor(name)


def mapping_fault(d2t: np.ndarray, t2d: np.ndarray | None, vocab_size: int) -> str | None:
    """How d2t and t2d contradict each other; None when they are one mapping, or t2d is missing.

    Raises:
        DoesNotFit: when d2t leads to ids that the verifier does not have.
    """
    own = np.arange(len(d2t))
    if not np.all((own + d2t >= 0) & (own + d2t < vocab_size)):
        raise DoesNotFit(f"d2t leads to ids outside the verifier's 0 to {vocab_size - 1}")
    if t2d is None:
        return None
    members = np.nonzero(t2d)[0]
    if np.array_equal(members, own + d2t):
        return None
    if len(members) != len(d2t):
        return f"t2d marks {len(members)} tokens and the head drafts {len(d2t)}"
    if np.array_equal(members, d2t):
        return "d2t holds target ids where offsets belong (target id = draft id + d2t)"
    if not d2t.any():
        return "d2t is all zeros, so draft id i is read as token i, and t2d says otherwise"
    wrong = int((members != own + d2t).sum())
    return f"d2t and t2d disagree on {wrong} of {len(d2t)} draft ids"
