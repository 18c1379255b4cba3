"""docs/rented-node.md with the real pipeline: two clones, one remote, no verifier on the node."""

import re
import shutil
from pathlib import Path

import pytest

from specmill.files import file_digest, read_json
from tests.workspace import ROOT, Workspace

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PAGE = (ROOT / "docs/rented-node.md").read_text()


def command(start: str) -> list[str]:
    """The command of the page that begins so, without its comment."""
    (line,) = {line.strip() for line in PAGE.splitlines() if line.strip().startswith(start)}
    return re.sub(r"\s+#.*", "", line).split()


class Clone:
    """A clone that finds its remotes in the same place as the pipeline's own folder."""

    def __init__(self, home: Workspace, folder: Path):
        home.run("git", "clone", "--quiet", str(home.folder), str(folder))
        self.folder = folder
        self.home = home

    def run(self, *words: str, check: bool = True, **more: str) -> str:
        workspace = object.__new__(Workspace)
        workspace.folder = self.folder
        workspace.environment = self.home.environment | more
        done = workspace.run(*words, check=check)
        assert check or done.returncode != 0, done.stdout
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def home(pipeline: Workspace) -> Workspace:
    """The pipeline after `dvc push`, its remotes in a home folder of their own."""
    pipeline.environment["HOME"] = str(pipeline.folder.parent / "home")
    Path(pipeline.environment["HOME"]).mkdir()
    pipeline.run(*command("dvc push data/prepared"))
    return pipeline


def test_a_node_without_verifier_trains_on_what_was_pushed_and_sends_the_head_home(
    home: Workspace, tmp_path: Path
) -> None:
    branch = home.run("git", "branch", "--show-current").stdout.strip()
    node = Clone(home, tmp_path / "node")
    train = command("dvc exp run --pull --allow-missing -s train")
    output = node.run(*train, SPECMILL_NO_EXTRACT="1")
    assert re.findall(r"Running stage '(\S+)'", output) == ["train"]
    assert not (node.folder / "models/verifier").exists()
    assert not list((node.folder / "data/prepared").glob("bench*"))
    head = node.folder / "models/eagle3/model.safetensors"
    trained = file_digest(head)
    assert trained != file_digest(home.folder / "models/eagle3/model.safetensors")
    assert read_json(node.folder / "models/eagle3/provenance.json")["params"]["lr"] == 1e-3
    node.run("dvc", "push", "train")
    node.run("git", "switch", "-q", "-c", "node-a")
    node.run("git", "commit", "-q", "-am", "another rate")
    node.run("git", "push", "-q", "origin", "node-a")
    # home again: the head is served as it came
    home.run("git", "switch", "-q", "node-a")
    home.run("dvc", "pull", "train")
    assert file_digest(home.folder / "models/eagle3/model.safetensors") == trained
    assert home.stages_run("dvc", "repro", "bench@eagle3")[-1] == "bench@eagle3"
    assert read_json(home.folder / "reports/bench/eagle3.json")["rows"]
    home.run("git", "restore", ".")
    home.run("git", "switch", "-q", branch)
    home.reset()


def test_a_part_that_was_pulled_trains_only_when_that_is_asked_for(
    home: Workspace, tmp_path: Path
) -> None:
    node = Clone(home, tmp_path / "node")
    said = node.run("python", "-m", "specmill.store", "pull", "--samples", "5")
    here = {path.name for path in (node.folder / "data/hidden_states").glob("*.safetensors")}
    everything = {path.name for path in (home.folder / "data/hidden_states").glob("*.safetensors")}
    assert here < everything
    assert f"{len(here)} of {len(everything)} shards are here" in said
    assert not (node.folder / "models/verifier").exists()
    # on everything: refused, with what is missing
    params = node.folder / "params.yaml"
    text = params.read_text()
    params.write_text(text.replace("  lr: ", "  lr: 0.5e-3  # "))
    refused = node.run("dvc", "repro", "-s", "train", check=False)
    assert re.search(r"hidden states of \d+ of \d+ samples are missing: \d+ of \d+ shards", refused)
    assert not (node.folder / "models/eagle3").exists()
    # on the part: as asked
    params.write_text(text.replace("max_samples: null", "max_samples: 5"))
    output = node.run("dvc", "repro", "-s", "train")
    assert re.findall(r"Running stage '(\S+)'", output) == ["train"]
    assert read_json(node.folder / "reports/train.json")["num_samples"] == 5


def test_a_shard_missing_in_the_remote_ends_the_node_loudly_and_extracts_nothing(
    home: Workspace, tmp_path: Path
) -> None:
    node = Clone(home, tmp_path / "node")
    bulk = Path(home.environment["HOME"]) / "specmill-remote/bulk/files/md5"
    shard = max(
        (path for path in bulk.rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    shutil.move(shard, tmp_path / "aside")
    try:
        train = command("dvc exp run --pull --allow-missing -s train")
        output = node.run(*train, check=False)
    finally:
        shutil.move(tmp_path / "aside", shard)
    assert "Running stage" not in output
    assert not (node.folder / "models/eagle3").exists()
    # it was a passing trouble: the same command goes on
    output = node.run(*train)
    assert re.findall(r"Running stage '(\S+)'", output) == ["train"]
