"""What the page is made of, and where it lies under reports."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmill.files import read_json
from specmill.params_bench import Bench
from specmill.pictures import PICTURES
from specmill.rows import Results, Row

_FURTHER = ("check", "curves", "decision", "predicted", "routing", "train")
_FURTHER_PLOTS = ("predicted", "train")


@dataclass(frozen=True)
class Evidence:
    """All that a page shows."""

    results: Results
    """reports/bench/NAME.json by name, with what was found out about sampling in `sampling`."""
    hardware: dict[str, Any]
    """reports/hardware.json."""
    verifier: dict[str, Any]
    """models/verifier/identity.json."""
    plots: dict[str, list[Row]]
    """reports/plots/NAME.json by name: those of PICTURES and, if there, _FURTHER_PLOTS."""
    pictures: dict[str, str]
    """reports/NAME.svg by name: PICTURES."""
    further: dict[str, Any]
    """reports/NAME.json by name, those of _FURTHER that are there."""
    serve_script: str | None
    """reports/serve.sh; None where there is none."""
    bench: Bench
    """Section of params.yaml."""


def gather(
    reports: Path,
    results: Results,
    hardware: dict[str, Any],
    verifier: dict[str, Any],
    bench: Bench,
) -> Evidence:
    """Read what other stages and the report left in `reports`; a stage that is not there left none.

    Raises:
        ValueError: naming a file that is not valid JSON.
    """
    script = reports / "serve.sh"
    return Evidence(
        results,
        hardware,
        verifier,
        _read(reports / "plots", (*PICTURES, *_FURTHER_PLOTS)),
        {name: (reports / f"{name}.svg").read_text() for name in PICTURES},
        _read(reports, _FURTHER),
        script.read_text() if script.is_file() else None,
        bench,
    )


def _read(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    files = {name: folder / f"{name}.json" for name in names}
    return {name: read_json(file) for name, file in files.items() if file.is_file()}
