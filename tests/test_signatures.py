"""What is used of vLLM and speculators, against what is installed, and drift that is made up."""

import ast
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specmill import compat
from specmill.signatures import USES, Use, drift

ROOT = Path(__file__).parents[1]
ENGINES = ("vllm", "speculators", "hs_connectors", "arctic_inference")


@pytest.mark.slow
def test_the_installed_versions_are_as_they_are_used() -> None:
    assert drift(compat.device()) == [], (
        "another version is installed: mend the files named, then the table"
    )


def test_everything_that_is_imported_of_them_stands_in_the_table() -> None:
    known = {use.place.partition(":")[0] + "." + use.place.partition(":")[2] for use in USES}
    covered = {name.rsplit(".", depth)[0] for name in known for depth in range(4)} | known
    for path in (ROOT / "specmill").rglob("*.py"):
        if path.name == "signatures.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ENGINES:
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    assert name in covered, f"{path.name} imports {name}: add it to USES"


def test_the_table_names_files_that_are_there() -> None:
    for use in USES:
        assert (ROOT / "specmill" / use.user).is_file(), use.user


class Base:
    """Stands for a class of an engine."""

    def __init__(self, model: str, colour: str = "blue"):
        self.cache = model
        self.colour = colour

    def step(self, ids: list[int]) -> None:
        self.stepped = ids

    def anything(self, **_options: Any) -> None:
        """Takes whatever it is given."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("made_up_engine")
    module.Base = Base  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_engine", module)
    return "made_up_engine"


@pytest.mark.parametrize(
    ("place", "options", "expected"),
    [
        ("Base", {"passed": ("model",), "named": ("cache", "step", "stepped")}, ""),
        ("Base.step", {"passed": ("ids",), "overridden": True}, ""),
        ("Base.anything", {"passed": ("x",)}, ""),
        ("Other", {}, "is not there: module 'made_up_engine' has no attribute 'Other'"),
        ("Base", {"passed": ("model", "size")}, "takes no size any more"),
        ("Base", {"passed": ("colour",)}, "needs model too"),
        ("Base", {"passed": ("model",), "overridden": True}, "takes colour, which ours does not"),
        ("Base", {"named": ("cache", "blocks")}, "has no blocks any more"),
    ],
)
def test_drift_is_named_with_the_file_that_it_breaks(
    engine: str, place: str, options: dict[str, Any], expected: str
) -> None:
    found = drift("cpu", [Use(f"{engine}:{place}", "connector.py", **options)])
    if not expected:
        assert found == []
    else:
        (sentence,) = found
        assert sentence.startswith(f"{engine}:{place} (specmill/connector.py) {expected}")


def test_a_module_that_is_gone_is_drift_too() -> None:
    gone = Use("no_such_engine.core:Thing", "engines.py")
    (sentence,) = drift("cpu", [gone])
    assert drift("cuda", [replace(gone, cpu_only=True)]) == []
    assert "is not there: No module named 'no_such_engine'" in sentence
