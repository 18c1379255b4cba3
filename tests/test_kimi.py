"""docs/kimi-k2.5.md shows what the code says of Kimi-K2.5, from the inputs that it states."""

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

from specmill import predict
from specmill.doctor import examine, text
from specmill.params_file import load_params
from tests.patients import ENGINE, ROOT, card, seen
from tests.published import GOLDEN, KIMI_LENGTHS, KIMI_SPEEDS
from tests.targets import KIMI_K25, TARGETS

DOCS = (ROOT / "docs/kimi-k2.5.md").read_text()
HEADS = (2.6, 3.3)
"""Acceptance lengths at K = 3 that cards of heads for Kimi-K2.5 name, chat to maths and code."""


def predicted(folder: Path) -> list[str]:
    """The table of the command that the document shows."""
    config = folder / "config.json"
    config.write_text(json.dumps(KIMI_K25))
    lengths = [GOLDEN[k] for k in (1, 2, 3, 4, 5)]
    rates = [round(more - less, 2) for less, more in zip([1.0, *lengths], lengths, strict=False)]
    command = DOCS.partition("python -m specmill.predict ")[2].partition("\n\n")[0]
    words = command.replace("\\\n", " ").split()
    assert words[:2] == ["--acceptance", ",".join(f"{rate:.2f}" for rate in rates)]
    words[words.index("config.json")] = str(config)
    with redirect_stdout(io.StringIO()) as said:
        predict.main(words)
    return said.getvalue().partition("break even\n")[2].partition("\n\n")[0].splitlines()


def implied() -> list[str]:
    """What published speeds imply of a step at K = 3, and what the heads of the cards would bring.

    Speed-up is tokens a step over the step's growth, so that the growth is the tokens per step over
    the speed-up.
    """
    lines = []
    for (context, batch), (none, drafted) in KIMI_SPEEDS.items():
        gain = drafted / none
        low, high = KIMI_LENGTHS.low / gain, KIMI_LENGTHS.high / gain
        lines.append(
            f"| {context}k | {batch} | {gain:.2f} | {low:.2f} - {high:.2f} | "
            f"{HEADS[0] / high:.2f} - {HEADS[0] / low:.2f} | "
            f"{HEADS[1] / high:.2f} - {HEADS[1] / low:.2f} |"
        )
    return lines


def costs(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The doctor's table for a profile on its constructed machine."""
    target = TARGETS[name]
    room = SimpleNamespace(free=target.disk_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    what = seen(
        machine=target.machine,
        card=card(target.config),
        speed=target.speed,
        engine=ENGINE,
        is_linked=True,
    )
    answer = text(examine(load_params(ROOT / f"profiles/{name}.yaml"), what, []), None)
    table = answer.partition("\n\n")[2].partition("\n\n")[0].splitlines()
    return [line.removesuffix("estimated").rstrip() for line in table]


def test_the_break_even_that_the_document_shows_is_predicted(tmp_path: Path) -> None:
    table = predicted(tmp_path)
    assert len(table) == 7
    for line in table:
        assert f"    {line}\n" in DOCS


def test_what_published_speeds_imply_is_computed() -> None:
    for line in implied():
        assert f"\n{line}\n" in DOCS, line


@pytest.mark.parametrize("name", ["kimi-k2.5-8x-rtx-pro-6000", "kimi-k2.5-b200"])
def test_the_costs_that_the_document_shows_are_the_doctors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for line in costs(name, monkeypatch):
        if "sampling" not in line:
            assert f"    {line}\n" in DOCS, line
