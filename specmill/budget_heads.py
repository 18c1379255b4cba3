"""What further heads and their replays will take: arithmetic and bytes, and where nothing is known.

    train_medusa    of each trained position and head: 6 FLOP per weight of its blocks and, since
                    the lm_head is frozen, 4 per weight of it (forward, and back to its input)
    draft_model     the kept layers and what is around them, read and written
    foreign_head    one engine start; the verifier read and its noised copy written, samples read by
                    the copy, a head trained
    replay@M        2 FLOP per weight and token of the bench's samples, for each draft of an EAGLE-3
                    head, once for each Medusa head

A head that is looked at (head, spoiled_head) is compared with drawn matrices by singular values,
one from the Hub is downloaded, and drafts that are looked up are looked up by numba or by
arctic-inference: no rate of these was ever measured, so that they have no time.
"""

from specmill.doctor_verifier import Size
from specmill.params_heads import Medusa
from specmill.workload import Turns

COPIES = 3
"""A checkpoint has the weights and two moments, in float32."""
NOT_REPLAYED = ("none", "peagle", "dflash", "draft_model")
"""Methods whose replay ends at once (specmill.replay)."""
LOOKED_UP = ("ngram", "suffix")


def medusa_flop(chosen: Medusa, size: Size, draft_vocab_size: int, positions: float) -> float:
    """Of one pass over so many trained positions, forward and backward."""
    blocks, lm_head = medusa_weights(chosen, size, draft_vocab_size)
    return positions * (6 * blocks + 4 * chosen.num_heads * lm_head)


def medusa_draft_flop(chosen: Medusa, size: Size, draft_vocab_size: int) -> int:
    """Of the drafts of all heads at one position."""
    blocks, lm_head = medusa_weights(chosen, size, draft_vocab_size)
    return 2 * (blocks + chosen.num_heads * lm_head)


def medusa_weights(chosen: Medusa, size: Size, draft_vocab_size: int) -> tuple[int, int]:
    """Trained weights of all heads together, and those of the frozen lm_head that they share."""
    hidden = size.geometry.hidden_size
    whole = size.geometry.weights["lm_head"]
    blocks = chosen.num_heads * chosen.num_layers * hidden**2
    return blocks, hidden * draft_vocab_size if chosen.vocabulary == "draft" else whole


def cut_bytes(size: Size, num_layers: int) -> int:
    """Of a verifier's first layers with its embedding and lm_head.

    Where layers differ (experts) each counts as the mean of all.
    """
    around = size.weight_bytes - layer_bytes(size)
    return around + layer_bytes(size) * num_layers // size.geometry.num_layers


def layer_bytes(size: Size) -> int:
    """Of all decoder layers."""
    experts = size.geometry.experts
    weights = {name: count for name, count in size.geometry.weights.items() if name != "lm_head"}
    if experts:
        weights["routed"] = experts.num * experts.num_layers * experts.weights_each
    return int(sum(count * size.bits[name] / 8 for name, count in weights.items()))


def share(turns: Turns, most: int | None) -> float:
    """Of the training samples, where a head is trained on the first `most`."""
    return min(1.0, (most or turns.number) / turns.number)
