"""A clone of the repository to torture, and what a stage has written in it.

Everything lies in one folder: the clone, DVC's caches and MLflow's database, so that nothing of the
user's is touched.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks.torture_stages import STAGES
from specmill.files import tree_digest
from specmill.manifest import Manifest

ROOT = Path(__file__).resolve().parents[1]
SMALLER: dict[str, dict[str, Any]] = {
    "prepare": {"limit": 12, "max_tokens": 32},
    "train": {"epochs": 6},
    "bench": {"concurrency": [1], "max_tokens": 16},
    "extract": {"shard_mib": 1},
    # one answer at a time: the same prompts in another batch may be rounded otherwise
    "runtime": {"request_concurrency": 1, "extract_window": 512},
}
"""What differs from profiles/smoke.yaml."""


class Workspace:
    """The clone, with a smaller smoke profile; made once, found again."""

    def __init__(self, work: Path):
        self.folder, self.kept = work / "repository", work / "undisturbed"
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if name != "PYTHONDONTWRITEBYTECODE"
            and not name.startswith(("DVC_", "MLFLOW_", "GIT_"))
        } | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "DVC_NO_ANALYTICS": "1",
            "DVC_SITE_CACHE_DIR": str(work / "site-cache"),
            "MLFLOW_DISABLE_TELEMETRY": "true",
            **{f"GIT_{who}_NAME": "torture" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_EMAIL": "torture@localhost" for who in ("AUTHOR", "COMMITTER")},
        }
        if not self.folder.is_dir():
            self._clone(work)
        self.set_runtime({})
        self.commit = self.git("rev-parse", "HEAD~1")

    def _clone(self, work: Path) -> None:
        made = work / "cloning"
        shutil.rmtree(made, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, made], check=True)
        (made / "dvc.lock").unlink(missing_ok=True)
        self.folder, final = made, self.folder
        self.set_runtime({})
        self.git("commit", "--quiet", "--all", "-m", "smaller")
        self.folder = final
        made.rename(final)

    def git(self, *words: str) -> str:
        """What a git command prints."""
        command = ["git", "-C", str(self.folder), *words]
        done = subprocess.run(
            command, env=self.environment, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def set_runtime(self, changes: dict[str, Any]) -> None:
        """Write params.yaml; `runtime` is no stage's, so that changing it reruns nothing."""
        safe = YAML(typ="safe")
        params = safe.load(self.folder / "profiles/smoke.yaml")
        for section, keys in SMALLER.items():
            params[section] |= keys
        params["runtime"] |= changes
        safe.dump(params, self.folder / "params.yaml")

    def outputs(self, stage: str) -> list[str]:
        """Every file and folder that dvc.yaml says a stage writes."""
        pipeline = YAML(typ="safe").load(self.folder / "dvc.yaml")["stages"]
        name, _, key = stage.partition("@")
        listed = pipeline[name].get("do", pipeline[name])
        outs = [out for kind in ("outs", "metrics", "plots") for out in listed.get(kind, [])]
        names = [next(iter(out)) if isinstance(out, dict) else out for out in outs]
        return [out.replace("${key}", key) for out in names]

    def keep(self, stage: str) -> None:
        """Copy a stage's outputs and dvc.lock aside."""
        for name in self.outputs(stage):
            self._copy(self.folder / name, self.kept / name)
        shutil.copy2(self.folder / "dvc.lock", self.kept / "dvc.lock")

    def restore(self, stage: str) -> None:
        """Bring the outputs back that were copied aside, and dvc.lock of all stages."""
        for name in self.outputs(stage):
            self._copy(self.kept / name, self.folder / name)
        shutil.copy2(self.kept / "dvc.lock", self.folder / "dvc.lock")

    @staticmethod
    def _copy(source: Path, target: Path) -> None:
        remove(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, target)

    def before(self, stage: str) -> None:
        """The state in which a stage has never run: no outputs, caches, lock entry, run cache."""
        for name in self.outputs(stage):
            remove(self.folder / name)
        for name in STAGES[stage].caches:
            (self.folder / name).mkdir(parents=True, exist_ok=True)  # a server may stage in it
            for path in (self.folder / name).iterdir():
                remove(path)
        remove(self.folder / ".dvc/cache/runs")
        safe, lock = YAML(typ="safe"), self.folder / "dvc.lock"
        if lock.is_file():
            known = safe.load(lock)
            known["stages"].pop(stage, None)
            safe.dump(known, lock)

    def digests(self, stage: str) -> dict[str, Any]:
        """What a stage's outputs hold, as far as it must be the same every time.

        Shards are filled in the order in which states arrive, so of a view it is each sample's
        checksum; of a bench, which is measured, which cells it has.
        """
        if stage == "bench@ngram":
            path = self.folder / "data/bench/ngram/cells.json"
            places = ("role", "k", "phase", "round", "number")
            listed = json.loads(path.read_text())["cells"]
            return {"cells": [[cell[name] for name in places] for cell in listed]}
        found: dict[str, Any] = {}
        for name in self.outputs(stage):
            path = self.folder / name
            if stage == "extract" and path.is_dir():
                places_of = Manifest(path).places
                found[name] = {key: piece.row.checksum for key, piece in places_of.items()}
            else:
                found[name] = tree_digest(path) if path.exists() else None
        return found

    def running_runs(self) -> int:
        """MLflow runs that say that they are RUNNING."""
        path = self.folder / "mlflow.db"
        if not path.is_file():
            return 0
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)
        try:
            asked = "select count(*) from runs where status = 'RUNNING'"
            return int(connection.execute(asked).fetchone()[0])
        except sqlite3.OperationalError:  # its tables are not made yet
            return 0
        finally:
            connection.close()


def remove(path: Path) -> None:
    """Remove a file or a folder if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
