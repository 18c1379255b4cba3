"""MLflow: where its store is, and a run for every executed stage.

DVC is the truth for what was run, the JSON in Git is the result; MLflow is where runs are
compared. So nothing here can fail a stage: what MLflow or its database raises is one warning.

The store is MLFLOW_TRACKING_URI, or `runtime.tracking_uri`, or mlflow.db at DVC_ROOT: `dvc exp run
--temp` works in a folder that is deleted. The database and the artifact location are created under
a file lock, because SQLite migrations race when two processes meet a new database.

It has two experiments: `specmill` compares results (specmill/sync.py), `specmill-executions` shows
the stages that were executed, with their curves while they run. MLFLOW_EXPERIMENT_NAME replaces
`specmill`.
"""

import contextlib
import logging
import os
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmill.files import locked
from specmill.liveness import process_tags, reap, start_watcher
from specmill.masked import masked
from specmill.revision import origin_tags

logger = logging.getLogger(__name__)

EXPERIMENT = "specmill"
MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # a line for every cell
    # MLflow's own (7 retries, 120 s each) would hold up every stage while a server is away
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
}
"""Set where the environment does not say otherwise."""
BATCH = 100
"""MLflow takes at most 100 parameters, 100 tags and 1000 metrics in one request."""


@dataclass(frozen=True)
class Point:
    """One value of a metric; `step` orders a curve, `time_ms` is milliseconds since 1970."""

    name: str
    value: float
    time_ms: int
    step: int = 0


@dataclass(frozen=True)
class Store:
    """One experiment of an MLflow store that answers."""

    root: Path
    uri: str
    client: Any
    experiment_id: str

    def log(
        self,
        run_id: str,
        params: dict[str, Any] | None = None,
        points: Iterable[Point] = (),
        tags: dict[str, str] | None = None,
    ) -> None:
        """Log to a run in as few requests as MLflow allows; names it does not take are mended."""
        from mlflow.entities import Metric, Param, RunTag

        metrics = [Metric(_name(p.name), p.value, p.time_ms, p.step) for p in points]
        pairs = [Param(_name(name), str(value)) for name, value in (params or {}).items()]
        labels = [RunTag(_name(name), value) for name, value in (tags or {}).items()]
        for i in range(0, max(len(metrics), len(pairs), len(labels)), BATCH):
            part = slice(i, i + BATCH)
            self.client.log_batch(run_id, metrics[part], pairs[part], labels[part])


class Tracker:
    """The MLflow run of one stage; after a failure it is silent for the rest of the stage."""

    def __init__(self, store: Store | None, run_id: str, watcher: subprocess.Popen[bytes] | None):
        self._store = store
        self._run_id = run_id
        self._watcher = watcher
        self._failed = False

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log the numbers of a nested dictionary under dotted names."""
        now = _now_ms()
        points = [Point(name, value, now, step or 0) for name, value in numbers(metrics).items()]
        self._tell(lambda store: store.log(self._run_id, points=points))

    def log_params(self, params: dict[str, Any]) -> None:
        """Log nested parameters under dotted names."""
        self._tell(lambda store: store.log(self._run_id, params=leaves(params)))

    def log_artifact(self, path: Path) -> None:
        """Keep a small file with the run."""
        self._tell(lambda store: store.client.log_artifact(self._run_id, str(path)))

    def end(self, status: str) -> None:
        """End the run; tried after a failure too, for the store may be back."""
        self._tell(lambda store: store.client.set_terminated(self._run_id, status), last=True)
        if self._watcher is not None and self._watcher.stdin is not None:
            self._watcher.kill()
            self._watcher.wait()
            self._watcher.stdin.close()

    def _tell(self, action: Callable[[Store], None], last: bool = False) -> None:
        if self._store is None or (self._failed and not last):
            return
        try:
            action(self._store)
        except tracking_errors() as error:
            if not self._failed:
                warn(error)
            self._failed = True


@contextlib.contextmanager
def track(
    root: Path, stage: str, params: dict[str, Any], uri: str | None = None
) -> Iterator[Tracker]:
    """An MLflow run for the length of a stage.

    Ends FINISHED, FAILED (an exception) or KILLED (Ctrl-C, SIGTERM, or a process that is gone).

    Args:
        root: Where the store lies when neither the environment nor `uri` names one.
        stage: The run's name starts with it; also tag `dvc.stage`.
        params: Nested parameters, logged under dotted names.
        uri: `runtime.tracking_uri`.
    """
    store, run_id, watcher = None, "", None
    try:
        opened = open_store(root, uri, "-executions")
        tags = {"dvc.stage": stage, **process_tags(), **origin_tags()}
        name = f"{stage}-{os.urandom(3).hex()}"
        run = opened.client.create_run(opened.experiment_id, tags=tags, run_name=name)
        run_id = run.info.run_id
        watcher = start_watcher(opened.uri, run_id)
        store = opened
    except tracking_errors() as error:
        warn(error)
    tracker = Tracker(store, run_id, watcher)
    tracker.log_params(params)
    try:
        yield tracker
    except BaseException as error:
        tracker.end("KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED")
        raise
    tracker.end("FINISHED")


def open_store(root: Path, uri: str | None = None, suffix: str = "") -> Store:
    """Open one experiment of the store, creating what is missing, and reap its dead runs.

    Args:
        root: The repository's root.
        uri: `runtime.tracking_uri`; the environment wins.
        suffix: Added to the experiment's name.
    """
    for variable, value in MLFLOW.items():
        os.environ.setdefault(variable, value)
    import mlflow

    uri = os.environ.get("MLFLOW_TRACKING_URI") or uri or f"sqlite:///{root}/mlflow.db"
    name = (os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT) + suffix
    with locked(root / ".cache" / "mlflow.lock"):
        if uri.startswith("sqlite"):
            _make_database(uri)
            _check_database(uri)
        client = mlflow.MlflowClient(uri, registry_uri=uri)
        found = client.get_experiment_by_name(name)
        if found is not None:
            experiment_id = found.experiment_id
        else:
            # a server knows better where its artifacts go
            place = (root / "mlartifacts").as_uri() if uri.startswith("sqlite") else None
            experiment_id = client.create_experiment(name, artifact_location=place)
        reap(client, experiment_id)
    return Store(root, uri, client, experiment_id)


def _make_database(uri: str) -> None:
    """Create a missing SQLite file under another name and rename it when its tables are whole.

    MLflow cannot go on from a file whose creation was interrupted.
    """
    import mlflow
    from sqlalchemy.engine import make_url

    name = make_url(uri).database
    if not name or Path(name).exists() or not Path(name).parent.is_dir():
        return
    scratch = Path(f"{name}.new")
    scratch.unlink(missing_ok=True)  # left by a creation that was interrupted
    mlflow.MlflowClient(f"sqlite:///{scratch}").search_experiments(max_results=1)
    os.replace(scratch, name)


def _check_database(uri: str) -> None:
    """Raise OSError when a SQLite file cannot be used; MLflow would try again for minutes."""
    from sqlalchemy.engine import make_url

    path = make_url(uri).database
    try:
        with contextlib.closing(sqlite3.connect(path or ":memory:", timeout=20)) as connection:
            connection.execute("begin immediate")  # neither reading nor opening needs the right
            connection.rollback()
    except sqlite3.Error as error:
        raise OSError(f"{path}: {error}") from None


def numbers(tree: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten a nested dictionary to its numbers, keys joined by dots; the rest is left out."""
    return {
        name: float(value)
        for name, value in leaves(tree, prefix).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested dictionary, keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= leaves(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def warn(error: Exception) -> None:
    """Say in one line that MLflow lacks something, and how it gets it later."""
    logger.warning(
        "the stage goes on without MLflow, `python -m specmill.sync` adds results later: %s",
        first_line(error)[:300],
    )


def first_line(error: Exception) -> str:
    """What an error says, without passwords and without the SQL or traceback that follows."""
    return masked((str(error) or type(error).__name__).splitlines()[0])


def tracking_errors() -> tuple[type[Exception], ...]:
    """What MLflow and its database raise; without MLflow, that it is not installed."""
    try:
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError
    except ModuleNotFoundError:
        return (ModuleNotFoundError,)
    # a store whose driver is not installed raises ModuleNotFoundError
    return (MlflowException, SQLAlchemyError, OSError, ModuleNotFoundError)


def _name(text: str) -> str:
    """`text` with what MLflow refuses in a name replaced: `bench@none` becomes `bench_none`."""
    return "".join(c if c.isalnum() or c in "_-./: " else "_" for c in text)


def _now_ms() -> int:
    return int(time.time() * 1000)
