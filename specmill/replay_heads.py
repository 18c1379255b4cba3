"""Which drafts of a head are right at every place of recorded greedy answers, from hidden states.

EAGLE-3. The training-time test feeds each step its own state and the *recorded* token, not the one
drafted (arXiv 2503.01840, section 3.2; speculators.models.eagle3.core). As long as every earlier
draft was right the two are the same, so up to the first wrong draft this is the very chain that an
engine drafts, at all places and for all K in one forward pass. For a sample x0 ... x9 with aux
states g0 ... g9, whose answer begins with x4, and starts as in specmill.walk:

    state fed at step 0     g0  g1  g2  g3  g4  g5  g6  g7  g8
    token fed at step 0     x1  x2  x3  x4  x5  x6  x7  x8  x9
    start                                0   1   2   3   4        x4 is known, x4 x5, ...
    draft of step 0                     x5  x6  x7  x8  x9        to equal
    token fed at step 1                 x5  x6  x7  x8  x9
    draft of step 1                     x6  x7  x8  x9   -
    draft of step 2                     x7  x8  x9   -   -

A draft is right when `draft_id + d2t[draft_id]` is the recorded token. speculators' own `full_acc`
compares with the likeliest token *within the draft vocabulary* instead.

Medusa. Head i guesses the token i + 2 places after the state it is given (specmill.medusa), so that
head i at g3 (normed last state) drafts what step i does above. No head sees another's draft.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specmill import compat
from specmill.files import read_object
from specmill.head_checks import aux_ids_of
from specmill.medusa import MedusaHeads, VerifierHead, load_verifier_head
from specmill.offline import chain_drafts, load_draft_model
from specmill.replayed import chain_runs
from specmill.samples import Sample
from specmill.section import DoesNotFit
from specmill.states import restore
from specmill.view import StateView
from specmill.walk import Runs


def eagle3_runs(
    head: Path, verifier: dict[str, Any], verifier_head: Path, view: StateView,
    samples: list[Sample], most_k: int,
) -> list[Runs]:  # fmt: skip
    """Of an EAGLE-3 head, in the order of the samples.

    Args:
        head: A speculators checkpoint.
        verifier: identity.json.
        verifier_head: Its slice.
        view: Its hidden states of the samples.
        samples: Greedy answers.
        most_k: Largest K.

    Raises:
        DoesNotFit: when the head is fed states of layers that are not kept.
    """
    config = read_object(head / "config.json")
    asked = sorted(set(aux_ids_of(config, verifier["num_layers"])))  # as vLLM feeds them
    if lost := sorted(set(asked) - set(view.spec.layer_ids)):
        raise DoesNotFit(
            f"it is fed states of layers {asked}, and those of {lost} are not kept "
            "(extract.aux_layer_ids)"
        )
    dtype = getattr(torch, verifier["dtype"])
    model = load_draft_model(head, verifier_head, dtype)
    d2t = load_file(head / "model.safetensors").get("d2t")
    found = []
    for sample in samples:
        drafts, fed = chain_drafts(model, view, sample, asked, dtype, most_k)
        found.append(chain_runs(drafts, fed, torch.from_numpy(sample.loss_mask[1:] == 1), d2t))
    return found


def medusa_runs(
    folder: Path, verifier: dict[str, Any], verifier_head: Path, view: StateView,
    samples: list[Sample], most_k: int,
) -> list[Runs]:  # fmt: skip
    """Of Medusa heads (specmill.medusa.export_medusa); the rest as `eagle3_runs`.

    Raises:
        DoesNotFit: when K is more than there are heads.
    """
    dtype, machine = getattr(torch, verifier["dtype"]), compat.device()
    norm = load_verifier_head(verifier_head, dtype, machine)
    heads = load_medusa(folder, machine)
    if most_k > len(heads.blocks):
        raise DoesNotFit(f"it has {len(heads.blocks)} heads, fewer than K {most_k}")
    return [_medusa_runs(heads, norm, view, sample, most_k) for sample in samples]


@torch.no_grad()
def _medusa_runs(
    heads: MedusaHeads, norm: VerifierHead, view: StateView, sample: Sample, most_k: int
) -> Runs:
    ids, states, scales = view.load(sample.sample_key)
    machine = norm.norm.device
    last = restore(states[:-1, -1], None if scales is None else scales[:-1, -1], norm.norm.dtype)
    normed = norm.normed(last.to(machine))
    guesses = torch.stack(
        [heads.token_ids[heads.logits(head, normed).argmax(-1)] for head in range(most_k)]
    )
    answered = torch.from_numpy(sample.loss_mask[1:] == 1)
    return chain_runs(guesses.cpu(), ids[1:].long(), answered, None)


def load_medusa(folder: Path, machine: str) -> MedusaHeads:
    """Heads as `specmill.medusa.export_medusa` wrote them."""
    config = read_object(folder / "config.json")
    weights = load_file(folder / "model.safetensors", device=machine)
    lm_head = weights["lm_heads.0.weight"]
    token_ids = weights.get("token_map", torch.arange(len(lm_head), device=machine))
    heads = MedusaHeads(lm_head, token_ids, config["num_heads"], config["num_hidden_layers"])
    for head, block in enumerate(heads.blocks):
        layers = [
            weights[f"blocks.{head}.layers.{layer}.weight"]
            for layer in range(config["num_hidden_layers"])
        ]
        block.data = torch.stack(layers).float()
    heads.to(machine)
    return heads
