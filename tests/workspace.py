"""A scratch copy of the repository with a Git history of its own, in which DVC can run."""

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CANARY = secrets.token_hex(16)
"""What a user keeps secret: whatever is written holds it nowhere."""
_SECRETS = (
    "SPECMILL_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "MLFLOW_TRACKING_PASSWORD", "OPENAI_API_KEY",
)  # fmt: skip


class Workspace:
    """A folder with the repository's files, committed once."""

    def __init__(self, folder: Path):
        self.folder = folder
        listed = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        for name in listed:
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        (folder / "dvc.lock").unlink(missing_ok=True)
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if name != "PYTHONDONTWRITEBYTECODE"
            and not name.startswith(("DVC_", "MLFLOW_", "GIT_"))
        } | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "DVC_NO_ANALYTICS": "1",
            "DVC_SITE_CACHE_DIR": str(folder.parent / "site-cache"),
            "MLFLOW_DISABLE_TELEMETRY": "true",
            **dict.fromkeys(_SECRETS, CANARY),
            **{f"GIT_{who}_NAME": "test" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_EMAIL": "test@localhost" for who in ("AUTHOR", "COMMITTER")},
        }
        self.run("git", "init", "--quiet")
        self.commit("start")

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder; a failure shows its output."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{' '.join(command)} ended with {done.returncode}\n"
                f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
            )
        return done

    def commit(self, message: str) -> None:
        """Commit everything."""
        self.run("git", "add", "--all")
        self.run("git", "commit", "--quiet", "--allow-empty", "-m", message)

    def reset(self) -> None:
        """Go back to the last commit and its DVC data."""
        self.run("git", "restore", "--source=HEAD", "--staged", "--worktree", ".")
        self.run("dvc", "checkout", "--quiet", "--force")

    def stages_run(self, *command: str) -> list[str]:
        """Run a DVC command; the stages whose command was executed, in order."""
        output = self.run(*command).stdout
        return [
            line.split("'")[1] for line in output.splitlines() if line.startswith("Running stage '")
        ]
