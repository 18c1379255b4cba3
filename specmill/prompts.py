"""The project's own prompts: reading, checking and picking them."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from specmill.samples import ALL


@dataclass(frozen=True)
class Prompt:
    """User turns of one conversation, and the kind of task it is."""

    category: str
    turns: tuple[str, ...]

    @property
    def key(self) -> str:
        """Digest of the turns: equal for prompts that differ in case or spacing only."""
        turns = (" ".join(turn.lower().split()) for turn in self.turns)
        return hashlib.sha256("\n".join(turns).encode()).hexdigest()


def normalise(text: str) -> str:
    """Lower case, words and operators, single spaces: how two prompt files are compared."""
    return " ".join(re.findall(r"\w+|[-+*/=<>%^]", text.lower()) or text.split())


def read_prompts(path: Path) -> list[Prompt]:
    """Read a JSON Lines file of `{"category": ..., "turns": [...]}`; exact repeats are dropped.

    Raises:
        ValueError: naming the file and line that is not such an object.
    """
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(path.read_text().split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = Prompt(row["category"], tuple(row["turns"]))
            valid = (
                isinstance(row["turns"], list)
                and bool(prompt.turns)
                and all(isinstance(text, str) and text.strip() for text in prompt.turns)
                and isinstance(prompt.category, str)
                and prompt.category.strip() not in ("", ALL)
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} is not a prompt: {error!r}") from None
        if not valid:
            raise ValueError(
                f"{path}:{number}: category must be text other than {ALL!r} (the sum of all) and "
                "turns a list of texts, none of them empty"
            )
        prompts.setdefault(prompt.key, prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return list(prompts.values())


def split_prompts(
    prompts: list[Prompt], limit: int | None, heldout: int, seed: int
) -> tuple[list[Prompt], list[Prompt]]:
    """Pick training and held-out prompts by hash, so that a new prompt moves few others.

    Every prompt has a fixed place in [0, 1) drawn from its text and `seed`. Held-out prompts are
    the `heldout` lowest of the first tenth, training prompts the `limit` lowest of the rest; one
    more prompt in the file takes at most one place and never moves a prompt between the two.

    Returns:
        (training, held-out), in order of their place.

    Raises:
        ValueError: when either part has fewer prompts than asked for.
    """

    def place(prompt: Prompt) -> float:
        return int(hashlib.sha256(f"{seed}:{prompt.key}".encode()).hexdigest()[:13], 16) / 16**13

    ordered = sorted(prompts, key=place)
    kept_out = [prompt for prompt in ordered if place(prompt) < 0.1]
    training = [prompt for prompt in ordered if place(prompt) >= 0.1]
    if len(kept_out) < heldout:
        raise ValueError(
            f"prepare.heldout is {heldout}, but only {len(kept_out)} of {len(prompts)} prompts "
            "fall into the held-out tenth; lower it or add prompts"
        )
    if limit is not None and len(training) < limit:
        raise ValueError(
            f"prepare.limit is {limit}, but only {len(training)} prompts are left for training; "
            "lower it, set it to null or add prompts"
        )
    return training[:limit], kept_out[:heldout]


def check_disjoint(training: list[Prompt], bench: list[Prompt]) -> None:
    """Refuse a bench prompt that is also a training prompt (any of its turns, normalised).

    Raises:
        ValueError: quoting the prompts that are in both.
    """
    known = {normalise(turn) for prompt in training for turn in prompt.turns}
    shared = [turn for prompt in bench for turn in prompt.turns if normalise(turn) in known]
    if shared:
        raise ValueError(f"{len(shared)} bench prompts are also training prompts: {shared[:3]}")
