"""What holds for every test."""

import os
import signal
from pathlib import Path

import pytest

from tests.workspace import Workspace

# before MLflow is imported: it opens its telemetry then
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["DO_NOT_TRACK"] = "true"
# a shell's background job ignores it, and so would every process that a test interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)


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
