"""Which conversations train, which validate and which are measured: picked by hash, disjoint."""

import hashlib
import re

from specmill.conversations import Conversation
from specmill.sources import Reading

HELDOUT_SHARE = 0.1
"""Places below this never train, so that prepare.heldout can change and training does not."""


def normalise(text: str) -> str:
    """Lower case, words and operators, single spaces: how two datasets are compared."""
    return " ".join(re.findall(r"\w+|[-+*/=<>%^]", text.lower()) or text.split())


def place(conversation: Conversation, seed: int) -> float:
    """A number in [0, 1) drawn from the first question and `seed`; other rows never matter.

    Conversations that begin with the same question, normalised, have one place and so fall on one
    side: a held-out turn is no training turn.
    """
    first = normalise(conversation.questions[0])
    drawn = hashlib.sha256(f"{seed}:{first}".encode()).hexdigest()[:13]
    return int(drawn, 16) / 16**13


def shares(total: int, weights: list[float]) -> list[int]:
    """Split `total` by weight: whole numbers that add up to it, largest remainders first."""
    exact = [total * weight / sum(weights) for weight in weights]
    given = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: given[i] - exact[i])
    for i in by_remainder[: total - sum(given)]:
        given[i] += 1
    return given


def pick_training(
    readings: list[Reading], limit: int | None, heldout: int, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Pick training and held-out conversations by hash, so that a new row moves few others.

    Held-out ones are the lowest places, training ones the lowest beyond the first tenth: while the
    tenth holds enough of them, one more row takes at most one place and never moves a conversation
    between the two. Each dataset gives its share by weight.

    Returns:
        (training, held-out), in order of their place.

    Raises:
        ValueError: when a dataset has fewer conversations than its share; names both.
    """

    def order(one: Conversation) -> tuple[float, str]:
        return place(one, seed), one.key

    weights = [reading.dataset.weight for reading in readings]
    kept_out: dict[str, Conversation] = {}
    for reading, number in zip(readings, shares(heldout, weights), strict=True):
        fresh = sorted((o for o in reading.conversations if o.key not in kept_out), key=order)
        if len(fresh) < number:
            raise ValueError(
                f"prepare.heldout asks for {number} conversations of {reading.dataset.source}, "
                f"which gave {len(fresh)}; lower it or add data"
            )
        kept_out |= {one.key: one for one in fresh[:number]}
    last = max(place(one, seed) for one in kept_out.values())
    training: dict[str, Conversation] = {}
    wanted = [None] * len(readings) if limit is None else shares(limit, weights)
    for reading, share in zip(readings, wanted, strict=True):
        beyond = [
            one
            for one in reading.conversations
            if HELDOUT_SHARE <= place(one, seed) > last and one.key not in training
        ]
        _check_share(reading, share, len(beyond), limit, heldout)
        training |= {one.key: one for one in sorted(beyond, key=order)[:share]}
    if not training:
        raise ValueError(
            f"prepare.heldout is {heldout}, and no conversation is left for training; lower it or "
            "add data"
        )
    return sorted(training.values(), key=order), sorted(kept_out.values(), key=order)


def _check_share(
    reading: Reading, share: int | None, num_beyond: int, limit: int | None, heldout: int
) -> None:
    source = reading.dataset.source
    if share == 0:
        raise ValueError(
            f"{source} has weight {reading.dataset.weight}, too little for one of {limit} prompts "
            "(prepare.limit); raise it or leave the dataset out"
        )
    if share is not None and num_beyond < share:
        raise ValueError(
            f"prepare.limit asks for {share} of {source}, which gave {len(reading.conversations)} "
            f"conversations; the {num_beyond} that come after the held-out ones (prepare.heldout "
            f"{heldout}; the first tenth never trains) are too few: lower it, set it to null, "
            "raise prepare.max_rows or add data"
        )


def pick_bench(readings: list[Reading], per_category: int, seed: int) -> list[Conversation]:
    """The bench prompts to answer: up to `per_category` of each category by hash, in file order."""
    by_category: dict[str, list[Conversation]] = {}
    every: dict[str, Conversation] = {}
    for reading in readings:
        for one in reading.conversations:
            every.setdefault(one.key, one)
    for one in every.values():
        by_category.setdefault(one.category, []).append(one)
    picked = {
        one.key
        for found in by_category.values()
        for one in sorted(found, key=lambda one: (place(one, seed), one.key))[:per_category]
    }
    return [one for one in every.values() if one.key in picked]


def drop_bench_prompts(reading: Reading, bench: list[Conversation]) -> int:
    """Take out of `reading` whatever shares a user turn, normalised, with a bench prompt.

    Returns:
        How many were taken out.
    """
    measured = {normalise(text) for one in bench for text in one.questions}
    before = len(reading.conversations)
    reading.conversations = [
        one
        for one in reading.conversations
        if not any(normalise(text) in measured for text in one.questions)
    ]
    return before - len(reading.conversations)
