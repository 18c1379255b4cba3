"""What every stage does around its work: parameters, log, MLflow run, metrics, clean ending."""

import contextlib
import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from safetensors import SafetensorError

from specmill import paths, processes
from specmill.files import locked, machine_lock, write_json
from specmill.masked import MaskedFormatter, masked
from specmill.params import Params
from specmill.params_file import load_params
from specmill.tracking import Tracker, track

logger = logging.getLogger("specmill.stage")


@dataclass(frozen=True)
class Stage:
    """A running stage."""

    name: str
    params: Params
    tracker: Tracker
    waited_s: float
    """Seconds spent waiting for other work on this machine."""

    def write_metrics(self, path: Path, metrics: dict[str, Any]) -> None:
        """Write the stage's result to `path` (in Git) and to its MLflow run."""
        write_json(path, metrics)
        self.tracker.log_metrics(metrics)
        self.tracker.log_artifact(path)

    def log_section(self, section: str) -> None:
        """Log one more params section to the MLflow run."""
        self.tracker.log_params(self.params.model_dump(mode="json", include={section}))

    def log_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        """Add one point to the run's curves."""
        self.tracker.log_metrics(metrics, step=epoch)


@contextlib.contextmanager
def open_stage(
    name: str, sections: list[str], *, measures: bool = False, spread: bool = False
) -> Iterator[Stage]:
    """Run a stage's body.

    Args:
        name: The stage as dvc.yaml calls it, e.g. `train` or `bench@ngram`.
        sections: The params sections it lists in dvc.yaml; logged to MLflow.
        measures: The stage has the machine alone: no other stage of any repository runs then.
        spread: Run it as `runtime.train_processes` processes; the body is run by each of them, and
            only the first one has an MLflow run (specmill.processes).

    Two executions of one stage wait for each other. SIGTERM raises SystemExit, so that servers are
    stopped and finished work is kept. What a user can mend ends the process with its message and
    status 1, without a traceback.
    """
    show_help()
    is_first = processes.rank() == 0
    _log_to_stderr("INFO" if is_first else "WARNING")
    signal.signal(signal.SIGTERM, _leave)
    asked = started = time.monotonic()
    try:
        params = load_params(paths.PARAMS)
        if spread:
            processes.spread(params.runtime.train_processes, "runtime.train_processes")
        logged = params.model_dump(mode="json", include=set(sections))
        with (
            # what a killed DVC left running must not write beside its successor
            locked(paths.CACHE / "locks" / name) if is_first else contextlib.nullcontext(),
            machine_lock(alone=measures),
        ):
            waited_s = round(time.monotonic() - asked, 1)
            tracking = (
                track(paths.ROOT, name, logged, params.runtime.tracking_uri)
                if is_first
                else contextlib.nullcontext(Tracker(None, "", None))
            )
            with tracking as tracker:
                started = time.monotonic()
                yield Stage(name, params, tracker, waited_s)
    except (ValueError, RuntimeError, OSError, ModuleNotFoundError, SafetensorError) as error:
        logger.debug("traceback", exc_info=True)
        sys.exit(masked(f"{name}: {error}{_way_out(error)}"))
    except KeyboardInterrupt:
        sys.exit(f"{name}: interrupted; finished work is kept, run it again to go on")
    logger.info("%s done in %.0f s", name, time.monotonic() - started)


def _log_to_stderr(level: str) -> None:
    """Tell what happens from this level on, or from SPECMILL_LOG_LEVEL on; secrets are masked."""
    form = "%(asctime)s %(name)s %(levelname)s %(message)s"
    told = logging.StreamHandler(sys.stderr)
    told.setFormatter(MaskedFormatter(form, datefmt="%H:%M:%S"))
    logging.basicConfig(level=os.environ.get("SPECMILL_LOG_LEVEL", level), handlers=[told])
    for chatty in ("httpx", "mlflow", "alembic", "speculators"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def show_help() -> None:
    """Print what the stage that is run says of itself and end, when that is asked for."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.stdout.write(sys.modules["__main__"].__doc__ or "")
        sys.exit()


def _way_out(error: Exception) -> str:
    """What to do about an error of the operating system, whose message only says what happened."""
    if isinstance(error, PermissionError):
        return "; make it writable for this user, then run the same command again"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "; free some disk space, then run the same command again: finished work is kept"
    return ""


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # cleaning up must not be interrupted in turn
    sys.exit(128 + number)
