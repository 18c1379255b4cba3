"""Prompts by template: phrasings with slots, filled from word lists by a seeded generator.

A grammar is a YAML file of lists (data/prompts/grammar). A list is written as such, or as one line
with " | " between its entries. In an entry, `{name}` is replaced by an entry of the list `name`,
`{name#tag}` by the same one wherever the prompt says so, `{2..12}` by a whole number of that range,
and `{name}` with a value given from outside by that value as it stands.
"""

import random
import re
from collections.abc import Mapping
from pathlib import Path

from ruamel.yaml import YAML

SLOT = re.compile(r"\{([a-z_]+)(?:#(\w+))?\}|\{(\d+)\.\.(\d+)\}")
BETWEEN = re.compile(r"(?<=\s)\|(?=\s|$)")
ATTEMPTS = 20
"""Draws before a prompt may hold the same word twice: a list may be short."""


def read_grammar(path: Path) -> dict[str, list[str]]:
    """Read a grammar: the entries of each list, by its name."""
    lists: dict[str, list[str]] = {}
    for name, entries in YAML(typ="safe").load(path.read_text()).items():
        split = BETWEEN.split(entries) if isinstance(entries, str) else entries
        lists[name] = [entry.strip() for entry in split]
    return lists


def slots(grammar: Mapping[str, list[str]], names: list[str]) -> set[str]:
    """Names of slots that phrasings below `names` use and no list fills: given from outside."""
    found: set[str] = set()
    todo, seen = list(names), set(names)
    while todo:
        for entry in grammar[todo.pop()]:
            for name in (match[1] for match in SLOT.finditer(entry) if match[1]):
                if name not in grammar:
                    found.add(name)
                elif name not in seen:
                    seen.add(name)
                    todo.append(name)
    return found


def phrase(
    grammar: Mapping[str, list[str]],
    name: str,
    rng: random.Random,
    given: Mapping[str, str] | None = None,
) -> str:
    """One prompt of the list `name`.

    Args:
        grammar: Lists of entries by name.
        name: The list to start from.
        rng: Draws the entries.
        given: Values of slots that are no lists; they are put in as they stand.

    Raises:
        ValueError: when a slot is neither a list nor given; names both.
    """
    given = given or {}
    drawn: set[str] = set()
    tagged: dict[tuple[str, str], str] = {}

    def entry_of(slot: str) -> str:
        for _ in range(ATTEMPTS):
            entry = rng.choice(grammar[slot])
            if entry not in drawn:
                break
        drawn.add(entry)
        return entry

    def fill(match: re.Match[str]) -> str:
        slot, tag, low, high = match.groups()
        if low:
            return str(rng.randint(int(low), int(high)))
        if slot in given:
            return given[slot]
        if slot not in grammar:
            raise ValueError(f"{{{slot}}} of the list {name} is no list of the grammar")
        if tag is None:
            return SLOT.sub(fill, entry_of(slot))
        if (slot, tag) not in tagged:
            tagged[slot, tag] = SLOT.sub(fill, entry_of(slot))
        return tagged[slot, tag]

    written = SLOT.sub(fill, entry_of(name)).strip()
    return written[:1].upper() + written[1:] if rng.random() < 0.9 else written
