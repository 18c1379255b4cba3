"""MLflow: one run per executed stage, in a store anchored at the repository's root.

DVC is the truth for what was run, the JSON in Git is the result; MLflow is where runs are
compared. So nothing here can fail a stage: what MLflow or its database raises is a warning.

The database and the artifact location are created under a file lock, because SQLite migrations
race when two processes meet a new database, and anchored at DVC_ROOT, because `dvc exp run
--temp` works in a folder that is deleted. Set MLFLOW_TRACKING_URI to use a server instead.
"""

import contextlib
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specmill.files import locked

logger = logging.getLogger(__name__)

EXPERIMENT = "specmill"


class Tracker:
    """The MLflow run of one stage."""

    def __init__(self, run_id: str | None):
        self._run_id = run_id

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log the numbers of a nested dictionary under dotted names."""
        with _never_failing():
            import mlflow

            if self._run_id is not None:
                mlflow.log_metrics(numbers(metrics), step=step, run_id=self._run_id)

    def log_params(self, params: dict[str, Any]) -> None:
        """Log nested parameters under dotted names."""
        with _never_failing():
            import mlflow

            if self._run_id is not None:
                client = mlflow.MlflowClient()
                for name, value in _leaves(params).items():
                    client.log_param(self._run_id, name, value)

    def log_artifact(self, path: Path) -> None:
        """Keep a small file with the run."""
        with _never_failing():
            import mlflow

            if self._run_id is not None:
                mlflow.log_artifact(str(path), run_id=self._run_id)


def numbers(tree: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten a nested dictionary to its numbers, keys joined by dots; the rest is left out."""
    flat: dict[str, float] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= numbers(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[name] = float(value)
    return flat


@contextlib.contextmanager
def track(root: Path, stage: str, params: dict[str, Any]) -> Iterator[Tracker]:
    """An MLflow run for the length of a stage.

    Ends FINISHED, FAILED (an exception) or KILLED (Ctrl-C or SIGTERM).

    Args:
        root: Where the store lies when MLFLOW_TRACKING_URI is not set.
        stage: The run's name starts with it; also tag `dvc.stage`.
        params: Nested parameters, logged under dotted names.
    """
    run_id = None
    with _never_failing():
        run_id = _start(root, stage)
    tracker = Tracker(run_id)
    tracker.log_params(params)
    try:
        yield tracker
    except BaseException as error:
        _end(run_id, "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED")
        raise
    _end(run_id, "FINISHED")


def open_store(root: Path) -> str:
    """Point MLflow at the store, creating it if need be; returns the experiment's id."""
    import mlflow

    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root}/mlflow.db"
    with locked(root / ".cache" / "mlflow.lock"):
        mlflow.set_tracking_uri(uri)
        found = mlflow.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            return str(found.experiment_id)
        # a server knows better where its artifacts go
        place = (root / "mlartifacts").as_uri() if uri.startswith("sqlite") else None
        return str(mlflow.create_experiment(EXPERIMENT, artifact_location=place))


def _start(root: Path, stage: str) -> str:
    import mlflow

    experiment = open_store(root)
    tags = {"dvc.stage": stage, **git_state(root)}
    for tag, variable in (
        ("dvc.exp_name", "DVC_EXP_NAME"),
        ("dvc.baseline_rev", "DVC_EXP_BASELINE_REV"),
    ):
        if variable in os.environ:
            tags[tag] = os.environ[variable]
    client = mlflow.MlflowClient()
    run = client.create_run(experiment, tags=tags, run_name=f"{stage}-{os.urandom(3).hex()}")
    return str(run.info.run_id)


def _end(run_id: str | None, status: str) -> None:
    with _never_failing():
        if run_id is not None:
            import mlflow

            mlflow.MlflowClient().set_terminated(run_id, status)


def git_state(root: Path) -> dict[str, str]:
    """`git.commit` and `git.dirty` of the repository at `root`; empty outside one."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "HEAD")
    if not commit:
        return {}
    return {"git.commit": commit, "git.dirty": str(bool(git("status", "--porcelain"))).lower()}


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= _leaves(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


@contextlib.contextmanager
def _never_failing() -> Iterator[None]:
    try:
        yield
    except _tracking_errors() as error:
        logger.warning("MLflow: %s; the stage goes on without", error)


def _tracking_errors() -> tuple[type[Exception], ...]:
    """What MLflow and its database raise; without MLflow, that it is not installed."""
    try:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError
    except ModuleNotFoundError:
        return (ModuleNotFoundError,)
    return (MlflowException, SQLAlchemyError, OSError)
