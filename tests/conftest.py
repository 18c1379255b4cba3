"""What holds for every test."""

import functools
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from threadpoolctl import threadpool_limits
from xdist.scheduler import LoadScopeScheduling

from specmill import tracking
from tests.workspace import Workspace

# before MLflow is imported: it opens its telemetry then
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["DO_NOT_TRACK"] = "true"
if "PYTEST_XDIST_WORKER" in os.environ:
    # before torch is imported: threads that spin while they wait take the other process's cores, so
    # that matrix products of both get a tenth as far
    os.environ["OMP_WAIT_POLICY"] = "passive"
# a shell's background job ignores it, and so would every process that a test interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
# what is imported stays; looking for garbage among it takes a third of the time of collecting tests
gc.disable()


@functools.cache
def _wants_pipeline(file: Path) -> bool:
    return "pipeline: Workspace" in file.read_text()


class Sharing(LoadScopeScheduling):
    """Tests of one file in one process, and all that want `pipeline` in the same.

    (xdist's own groups have no effect with pytest 9.2, whose tests do not take another name.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "pipeline" if _wants_pipeline(self.config.rootpath / file) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Sharing:
    """What `pytest -n 2` deals tests out by."""
    return Sharing(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: what wants `pipeline`, then what starts engines, then other processes."""

    def length(item: pytest.Item) -> int:
        shares = _wants_pipeline(item.path)
        assert shares or "pipeline" not in getattr(item, "fixturenames", ()), item.path
        marks = [item.get_closest_marker(name) is not None for name in ("long", "e2e", "slow")]
        return 0 if shares else 1 + [*marks, True].index(True)

    items.sort(key=length)  # stable: otherwise as collected


def pytest_collection_finish() -> None:
    """Imports are done: leave them out of garbage collections, and small matrices to one thread.

    Threads wait for each other by spinning, so that on a busy machine a step of a model of 16
    numbers takes ten times as long with two. Only this process: engines and stages that tests
    start have all cores.
    """
    gc.freeze()
    gc.enable()
    threadpool_limits(1)  # of OpenMP and BLAS, as far as they are loaded
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_unconfigure() -> None:
    """Let modules that look for leaks when the interpreter ends find none."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables and nothing else, to be copied; making one takes seconds.

    By the code of specmill that makes it.
    """
    path = tmp_path_factory.mktemp("pristine") / "mlflow.db"
    tracking._make_database(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """The whole pipeline on the real verifier, run once at smoke settings."""
    workspace = Workspace(tmp_path_factory.mktemp("pipeline") / "repository")
    # smoke settings, with enough samples for a head that is right now and then
    smoke = (workspace.folder / "profiles/smoke.yaml").read_text()
    assert "limit: 10\n" in smoke
    (workspace.folder / "params.yaml").write_text(smoke.replace("limit: 10\n", "limit: 40\n"))
    workspace.commit("smoke settings")
    workspace.stages_run("dvc", "repro")
    workspace.commit("everything ran")
    return workspace


@pytest.fixture(scope="session")
def folder(pipeline: Workspace) -> Path:
    """Where it ran."""
    return pipeline.folder
