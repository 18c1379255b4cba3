"""One state of the pipeline as MLflow shows it: what dvc.lock, params.yaml and reports/ say.

A state is known by what dvc.lock says of every stage but `report`, which is a function of the
others: inside the report stage its own entry is that of the previous run. A file that is missing is
absent here too; a file that dvc.lock was not made with is an error, for its numbers would be shown
beside the wrong parameters.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmill import paths
from specmill.files import digest, file_digest, read_json
from specmill.params_file import read_yaml
from specmill.params_scheduled import scheduled_name
from specmill.rows import PLACE, load_name
from specmill.samples import ALL
from specmill.tracking import leaves, numbers

LOCK = Path("dvc.lock")
FOREACH = {
    "bench": "methods",
    "bench_scheduled": "scheduled",
    "replay": "methods",
    "sampling": "methods",
    "imported": "imported",
    "train_sibling": "siblings",
    "train_medusa": "medusa",
    "draft_model": "draft_models",
    "head": "heads",
    "foreign_head": "foreign_heads",
    "spoiled_head": "spoiled_heads",
}
"""Stages that exist once per entry of a section."""


@dataclass(frozen=True)
class Cell:
    """One measured cell: a method at one K, load, context and prompt type."""

    name: str
    params: dict[str, Any]
    metrics: dict[str, float]
    flags: dict[str, str]
    """What is no number: `fresh_prompts`, the verdict, why a method is not served."""


@dataclass(frozen=True)
class State:
    """What one MLflow parent run and its children hold."""

    key: str
    params: dict[str, Any]
    metrics: dict[str, float]
    curves: list[tuple[str, int, float]]
    """Name, step, value."""
    tags: dict[str, str]
    artifacts: list[tuple[Path, str]]
    """A file and the folder it goes to."""
    cells: list[Cell]
    report: str
    """Digest of what the report stage wrote, which may change while the key does not."""
    head: dict[str, str] | None
    """Tags of the trained head; None when no stage trained one."""


def read_state(folder: Path) -> State:
    """Read the state of a checkout.

    Raises:
        ValueError: when its files and its dvc.lock do not belong together.
        FileNotFoundError: when dvc.lock or params.yaml is missing.
    """
    params = read_yaml(folder / paths.PARAMS)
    stages = {
        name: entry
        for name, entry in read_yaml(folder / LOCK)["stages"].items()
        if name != "report" and _is_asked_for(name, params)
    }
    _check(folder, params, stages)
    benches = {
        method: read_json(folder / paths.BENCH / f"{method}.json")
        for method in (
            *params["methods"],
            *params.get("imported", {}),
            *map(scheduled_name, params.get("scheduled", {})),
        )
        if (folder / paths.BENCH / f"{method}.json").is_file()
    }
    for method, bench in benches.items():
        if "rows" not in bench:
            raise ValueError(f"bench/{method}.json has no rows: another version wrote it")
    artifacts = _artifacts(folder)
    tags = _tags(folder, stages)
    return State(
        key=digest(stages),
        params=leaves({name: section for name, section in params.items() if name != "runtime"}),
        metrics=_metrics(folder),
        curves=_training_curves(folder) + _acceptance_curves(benches),
        tags=tags,
        artifacts=artifacts,
        cells=[cell for method, bench in benches.items() for cell in _cells(method, bench)],
        report=digest(
            {
                str(file.relative_to(folder)): file_digest(file)
                for file in [path for path, _ in artifacts]
                + [folder / paths.REPORTS / "summary.json"]
                if file.is_relative_to(folder / paths.REPORTS) and file.is_file()
            }
        ),
        head=_head(params["methods"], benches, tags),
    )


def _is_asked_for(stage: str, params: dict[str, Any]) -> bool:
    """DVC keeps the entry of a row or head that is no longer in params.yaml."""
    kind, _, name = stage.partition("@")
    return not name or name in params.get(FOREACH[kind], {})


def _value(params: dict[str, Any], key: str) -> Any:
    """A section, or with `section.name` an entry of it."""
    for part in key.split("."):
        params = params.get(part, {})
    return params


def _check(folder: Path, params: dict[str, Any], stages: dict[str, Any]) -> None:
    made = {out["path"]: out["md5"] for entry in stages.values() for out in entry.get("outs", [])}
    for stage, entry in stages.items():
        for dep in entry.get("deps", []):
            if made.get(dep["path"], dep.get("md5")) != dep.get("md5"):
                raise ValueError(
                    f"stage {stage} ran with another {dep['path']}; run `dvc repro` first"
                )
        for key, value in entry.get("params", {}).get(str(paths.PARAMS), {}).items():
            if _value(params, key) != value:
                raise ValueError(
                    f"`{key}` of params.yaml is not what stage {stage} ran with; "
                    "run `dvc repro` first"
                )
        for out in entry.get("outs", []):
            file = folder / out["path"]
            small = file.is_relative_to(folder / paths.REPORTS) and file.is_file()
            if small and hashlib.md5(file.read_bytes()).hexdigest() != out["md5"]:
                raise ValueError(
                    f"{out['path']} is not what stage {stage} wrote; run `dvc repro` first"
                )


def _metrics(folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for stem in ("prepare", "extract", "vocab", "train", "summary"):
        file = folder / paths.REPORTS / f"{stem}.json"
        if file.is_file():
            found |= numbers(read_json(file), "" if stem == "summary" else f"{stem}.")
    return found


def _training_curves(folder: Path) -> list[tuple[str, int, float]]:
    file = folder / paths.REPORTS / "plots" / "train.json"
    return [
        (f"heldout_{figure}_pos_{row['position']}", row["epoch"], row[figure])
        for row in (read_json(file) if file.is_file() else [])
        for figure in ("accuracy", "loss")
    ]


def _acceptance_curves(benches: dict[str, Any]) -> list[tuple[str, int, float]]:
    """Acceptance by position, over all prompt types, at the headline K."""
    prefix = "acceptance_rate_pos_"
    return [
        (f"acceptance_rate.{method}.{load_name(row)}", int(name.removeprefix(prefix)), value)
        for method, bench in benches.items()
        for row in bench["rows"]
        if _is_headline(row, bench)
        for name, value in row.items()
        if name.startswith(prefix) and value is not None
    ]


def _is_headline(row: dict[str, Any], bench: dict[str, Any]) -> bool:
    headline = bench["num_speculative_tokens"]
    return bool(row["category"] == ALL and row["num_speculative_tokens"] == headline)


def _cells(method: str, bench: dict[str, Any]) -> list[Cell]:
    refused = bench.get("refused", {})
    cells = []
    for row in bench["rows"]:
        figures = {name: value for name, value in row.items() if name not in PLACE}
        k, category = row["num_speculative_tokens"], row["category"]
        reason = bench.get("not_served", refused.get(str(k)))
        cells.append(
            Cell(
                name=f"{method} K={k} {load_name(row)} {category}",
                params={"method": method} | {n: row[n] for n in PLACE if row[n] is not None},
                metrics=numbers(figures),
                flags=({"not_served": reason} if reason else {})
                | {
                    name: value if isinstance(value, str) else str(value).lower()
                    for name, value in figures.items()
                    if isinstance(value, bool | str)
                },
            )
        )
    return cells


def _tags(folder: Path, stages: dict[str, Any]) -> dict[str, str]:
    tags = {
        f"dvc.lock.{stage}.{out['path']}": out["md5"]
        for stage, entry in stages.items()
        for out in entry.get("outs", [])
    }
    if (folder / paths.IDENTITY).is_file():
        verifier = read_json(folder / paths.IDENTITY)
        tags["verifier.name"] = verifier["name"]
        tags["verifier.fingerprint"] = verifier["fingerprint"]
    if (folder / paths.HARDWARE).is_file():
        machine = read_json(folder / paths.HARDWARE)
        tags["hardware"] = ", ".join(gpu["name"] for gpu in machine["gpus"]) or (
            f"{machine['cpu_model']}, {machine['num_usable_cores']} cores"
        )
        tags["vllm.version"] = machine["versions"]["vllm"]
    return tags


def _artifacts(folder: Path) -> list[tuple[Path, str]]:
    reports, head = folder / paths.REPORTS, folder / paths.EAGLE3
    plots = reports / "plots"
    wanted = [(folder / name, "") for name in (paths.PARAMS, LOCK, "dvc.yaml")]
    shown = (reports / "comparison.md", reports / "index.html", *sorted(reports.glob("*.svg")))
    wanted += [(file, "") for file in shown]
    wanted += [
        (file, (Path("plots") / file.parent.relative_to(plots)).as_posix())
        for file in sorted(plots.rglob("*"))
    ]
    wanted += [(head / name, "head") for name in ("provenance.json", "config.json")]
    return [(file, place) for file, place in wanted if file.is_file()]


def _head(
    methods: dict[str, Any], benches: dict[str, Any], tags: dict[str, str]
) -> dict[str, str] | None:
    md5 = tags.get(f"dvc.lock.train.{paths.EAGLE3}")
    if md5 is None:
        return None
    lengths = [
        row["acceptance_length"]
        for method, bench in benches.items()
        if methods.get(method, {}).get("head") == str(paths.EAGLE3)
        for row in bench["rows"]
        if _is_headline(row, bench) and load_name(row) == "c1"
        if row.get("acceptance_length") is not None
    ]
    return (
        {"dvc.md5": md5}
        | ({"verifier": tags["verifier.name"]} if "verifier.name" in tags else {})
        | ({"acceptance_length.c1": str(lengths[0])} if lengths else {})
    )
