"""Which commit and which DVC experiment something was made by."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Committed:
    """A file as the current commit has it."""

    commit: str | None
    """The last commit that changed it, abbreviated, or the current one if none did; None outside
    a repository and before its first commit."""
    text: str | None
    """None when the commit has no such file."""


def origin_tags() -> dict[str, str]:
    """Which commit and which DVC experiment the working directory belongs to."""
    variables = {"dvc.exp_name": "DVC_EXP_NAME", "dvc.baseline_rev": "DVC_EXP_BASELINE_REV"}
    return git_state(Path()) | {
        tag: os.environ[variable] for tag, variable in variables.items() if variable in os.environ
    }


def git_state(root: Path) -> dict[str, str]:
    """`git.commit` and `git.dirty` of the repository at `root`; empty outside one.

    Dirty is a change in anything but the pipeline's own results. `dvc exp run -S` makes one: it
    edits params.yaml.
    """
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _git(root, "status", "--porcelain", "--", ".", ":!reports", ":!dvc.lock")
    return {"git.commit": commit, "git.dirty": str(bool(changed)).lower()}


def code_state() -> dict[str, str]:
    """`code.commit`, the last that changed what runs, and `code.dirty`, whether that is changed.

    Other commits do not count, so that the same training leaves the same provenance.
    """
    code = ("--", "stages", "specmill", "requirements")
    commit = _git(Path(), "log", "-1", "--format=%H", *code)
    if not commit:
        return {}
    changed = _git(Path(), "status", "--porcelain", *code)
    return {"code.commit": commit, "code.dirty": str(bool(changed)).lower()}


def committed(path: Path) -> Committed:
    """A file of the working directory as Git has it.

    Args:
        path: Relative to the working directory.
    """
    head = _git(Path(), "rev-parse", "--short", "HEAD")
    if not head:
        return Committed(None, None)
    text = _git(Path(), "show", f"HEAD:./{path}") or None
    changed = _git(Path(), "log", "-1", "--format=%h", "--", str(path))
    return Committed(changed or head, text)


def _git(root: Path, *words: str) -> str:
    """What a git command prints; empty when it fails, as outside a repository."""
    # without its lock: DVC works on the same index
    command = ["git", "--no-optional-locks", "-C", str(root), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
