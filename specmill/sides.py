"""A report to be compared with another: what was measured, and with what.

dvc.lock says with what: digests of the verifier, prompts and heads, and the parameters. It is
therefore needed beside the reports, and files that are not what it says are left out.
"""

import hashlib
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from specmill import paths
from specmill.rows import PLACE

LOCK = Path("dvc.lock")

Read = Callable[[Path], bytes | None]
"""Content of a file by its path in the repository; None when there is none."""

_OF_MACHINE = {"cpu_model", "num_usable_cores", "gpus", "versions"}
"""Keys of reports/hardware.json that are compared."""

MEASURING = ("bench", "bench_scheduled")
"""Stages whose rows are compared."""


@dataclass(frozen=True)
class Measured:
    """A row of a report."""

    result: dict[str, Any]
    """reports/bench/NAME.json."""
    digests: dict[str, str]
    """What the stage read, by path, as DVC's md5."""
    params: dict[str, Any]
    """Sections of params.yaml that the stage ran with, by name."""


@dataclass(frozen=True)
class Side:
    """One of two reports."""

    name: str
    """As it was asked for."""
    hardware: dict[str, Any]
    prompts: dict[str, Any]
    """What the bench prompts were made of: `sources` with digests, and the section `prepare`."""
    rows: dict[str, Measured]
    """By name."""
    left_out: dict[str, str]
    """Rows that cannot be compared with anything, and why."""


def open_side(asked: str) -> Side:
    """Read a report.

    Args:
        asked: A folder `reports` with dvc.lock beside it, the folder above it, or a Git revision
            of this repository, `REV` or `REV:FOLDER`. A folder that exists is preferred.

    Raises:
        ValueError: when it is none of these, or what is needed is not there.
    """
    read = _reader(asked)
    lock, machine = read(LOCK), read(paths.HARDWARE)
    if lock is None:
        raise ValueError(
            f"{asked} has no dvc.lock in it or beside it: nothing says which verifier, prompts and "
            "settings were measured; copy it along with reports"
        )
    if machine is None:
        raise ValueError(f"{asked} has no {paths.HARDWARE}: nothing says where it was measured")
    stages = _parsed_lock(asked, lock)
    rows: dict[str, Measured] = {}
    left_out: dict[str, str] = {}
    for stage, entry in stages.items():
        kind, _, _ = stage.partition("@")
        outs = {Path(out.path): out.md5 for out in entry.outs}
        for path in [path for path in outs if path.parent == paths.BENCH]:
            name, content = path.stem, read(path)
            if kind not in MEASURING:
                left_out[name] = "it was measured by another tool"
            elif content is None:
                left_out[name] = f"{path} is not there"
            elif hashlib.md5(content).hexdigest() != outs[path]:
                left_out[name] = f"{path} is not what dvc.lock says stage {stage} wrote"
            else:
                row = Measured(
                    _json(asked, path, content),
                    {dep.path: dep.md5 for dep in entry.deps if dep.md5},
                    entry.params.get(str(paths.PARAMS), {}),
                )
                left = _why_not(row, machine)
                if left:
                    left_out[name] = left
                else:
                    rows[name] = row
    hardware = _json(asked, paths.HARDWARE, machine)
    if not isinstance(hardware, dict) or not hardware.keys() >= _OF_MACHINE:
        raise ValueError(f"{asked}: {paths.HARDWARE} is none that the stage hardware wrote")
    return Side(asked, hardware, _prompts(asked, read, stages), rows, left_out)


def _json(asked: str, path: Path, content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"{asked}: {path} is not valid JSON: {error}") from None


def _why_not(row: Measured, machine: bytes) -> str | None:
    listed = row.result.get("rows") if isinstance(row.result, dict) else None
    rows = listed if isinstance(listed, list) else []
    if not rows or not all(isinstance(one, dict) and set(PLACE) <= one.keys() for one in rows):
        return "another version of the bench wrote it"
    if "not_served" in row.result:
        return f"it is not served: {row.result['not_served']}"
    if row.digests.get(str(paths.HARDWARE)) != hashlib.md5(machine).hexdigest():
        return f"it was measured on another machine than {paths.HARDWARE} says"
    return None


def _prompts(asked: str, read: Read, stages: "dict[str, _Locked]") -> dict[str, Any]:
    content = read(paths.SOURCES)
    sources = _json(asked, paths.SOURCES, content) if content else {}
    prepare = stages["prepare"].params if "prepare" in stages else {}
    return {
        "sources": sources.get("bench") if isinstance(sources, dict) else None,
        "prepare": prepare.get(str(paths.PARAMS), {}).get("prepare", {}),
    }


class _File(BaseModel):
    path: str
    md5: str | None = None


class _Locked(BaseModel):
    """A stage of dvc.lock, as far as it is read."""

    deps: list[_File] = []
    outs: list[_File] = []
    params: dict[str, dict[str, Any]] = {}


def _parsed_lock(asked: str, lock: bytes) -> dict[str, _Locked]:
    try:
        stages = dict(YAML(typ="safe").load(StringIO(lock.decode()))["stages"])
        return {name: _Locked.model_validate(entry) for name, entry in stages.items()}
    except (YAMLError, ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{asked}: its dvc.lock is none that DVC wrote") from None


def _reader(asked: str) -> Read:
    folder = Path(asked)
    if folder.is_dir():
        # a folder `reports` is asked for by itself
        inside = not (folder / LOCK).is_file() and (folder / "bench").is_dir()
        root = folder.resolve().parent if inside else folder
        return lambda path: (root / path).read_bytes() if (root / path).is_file() else None
    revision, _, place = asked.partition(":")
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if not revision or commit is None:
        raise ValueError(f"{asked} is neither a folder nor a Git revision of this repository")
    sha = commit.decode().strip()
    above = Path(place).parent if Path(place).name == paths.REPORTS.name else Path(place)
    return lambda path: _git("show", f"{sha}:{'./' if not place else ''}{above / path}")


def _git(*words: str) -> bytes | None:
    """What a git command prints; None when it fails."""
    done = subprocess.run(["git", *words], capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None
