"""Which commit and which DVC experiment something was made by."""

import os
import subprocess
from pathlib import Path


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


def _git(root: Path, *words: str) -> str:
    """What a git command prints; empty when it fails, as outside a repository."""
    # without its lock: DVC works on the same index
    command = ["git", "--no-optional-locks", "-C", str(root), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
