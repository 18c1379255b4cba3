"""Which conversations train, which validate and which are measured: picked by hash, disjoint."""

import hashlib
import re

from specmill.conversations import Conversation
from specmill.sources import Reading


def normalise(text: str) -> str:
    """Lower case, words and operators, single spaces: how two datasets are compared."""
    return " ".join(re.findall(r"\w+|[-+*/=<>%^]", text.lower()) or text.split())


def place(conversation: Conversation, seed: int) -> float:
    """A number in [0, 1) drawn from what is said and `seed`; it never depends on other rows."""
    drawn = hashlib.sha256(f"{seed}:{conversation.key}".encode()).hexdigest()[:13]
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

    Held-out ones are the lowest places of the first tenth, training ones the lowest of the rest;
    one more row takes at most one place and never moves a conversation between the two. Each
    dataset gives its share by weight.

    Returns:
        (training, held-out), in order of their place.

    Raises:
        ValueError: when a dataset has fewer conversations than its share; names both.
    """
    weights = [reading.dataset.weight for reading in readings]
    wanted = [None] * len(readings) if limit is None else shares(limit, weights)
    wanted_out = shares(heldout, weights)
    training: dict[str, Conversation] = {}
    kept_out: dict[str, Conversation] = {}
    for reading, number, number_out in zip(readings, wanted, wanted_out, strict=True):
        ordered = sorted(reading.conversations, key=lambda one: place(one, seed))
        inside = [one for one in ordered if place(one, seed) < 0.1 and one.key not in kept_out]
        outside = [one for one in ordered if place(one, seed) >= 0.1 and one.key not in training]
        found = f"{reading.dataset.source} gave {len(inside) + len(outside)} conversations"
        if len(inside) < number_out:
            raise ValueError(
                f"prepare.heldout asks for {number_out} of them, but {found} and only "
                f"{len(inside)} fall into the held-out tenth; lower it or add data"
            )
        if number is not None and len(outside) < number:
            raise ValueError(
                f"prepare.limit asks for {number} of them, but {found} and only {len(outside)} are "
                "left for training; lower it, set it to null, raise prepare.max_rows or add data"
            )
        training |= {one.key: one for one in outside[:number]}
        kept_out |= {one.key: one for one in inside[:number_out]}
    in_order = [
        sorted(picked.values(), key=lambda one: place(one, seed)) for picked in (training, kept_out)
    ]
    return in_order[0], in_order[1]


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
        for one in sorted(found, key=lambda one: place(one, seed))[:per_category]
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
