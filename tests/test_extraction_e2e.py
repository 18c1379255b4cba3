"""Hidden states from real engines: shared, killed, damaged, online; of the pipeline's samples."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from specmill.files import read_json
from specmill.params_file import load_params
from specmill.samples import read_samples
from specmill.shards import FP8, read_shard
from specmill.states import restore
from specmill.store import HiddenStateStore
from specmill.view import StateView
from tests.test_server import ends
from tests.workspace import Workspace

pytestmark = pytest.mark.e2e

EXTRACT = """
import logging, sys
from pathlib import Path
from specmill import paths
from specmill.engines import engines
from specmill.extract import extract_missing
from specmill.files import read_json
from specmill.layers import states_of
from specmill.params_file import load_params
from specmill.params_parallel import Parallel
from specmill.samples import read_samples
from specmill.store import HiddenStateStore

def main():
    logging.basicConfig(level="INFO")
    folder, urls = Path(sys.argv[1]), sys.argv[2:]
    verifier = read_json(paths.IDENTITY)
    runtime = load_params(paths.PARAMS).runtime.model_copy(update={"extract_endpoints": urls})
    samples = [sample for split in ("train", "heldout", "bench")
               for sample in read_samples(paths.PREPARED / f"{split}.parquet")]
    spec = states_of(verifier, None, "auto")
    run = engines(spec, paths.VERIFIER, folder / "staging", verifier, Parallel(), runtime)
    extract_missing(samples, spec, HiddenStateStore(folder / "store"), run, shard_bytes=2**21,
                    staging=folder / "staging", window=2048)

if __name__ == "__main__":
    main()
"""


class Extraction:
    """Extracts the pipeline's samples into a store of its own, in a process of its own."""

    def __init__(self, pipeline: Workspace, folder: Path):
        self.pipeline, self.folder = pipeline, folder
        folder.mkdir()
        (folder / "extract.py").write_text(EXTRACT)

    def start(self, *urls: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["python", self.folder / "extract.py", self.folder, *urls],
            cwd=self.pipeline.folder,
            env=self.pipeline.environment | {"PYTHONPATH": str(self.pipeline.folder)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *urls: str) -> None:
        done = self.start(*urls)
        _, errors = done.communicate(timeout=600)
        assert done.returncode == 0, errors[-4000:]

    def contents(self) -> dict[str, str]:
        return HiddenStateStore(self.folder / "store").contents()

    def finished(self) -> set[str]:
        """Keys of samples that are in a shard, or staged as a whole."""
        store = HiddenStateStore(self.folder / "store")
        keys = {key for here in store.places.values() for key in here}
        for path in (self.folder / "staging").glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # filed meanwhile
                keys.add(read_shard(path, named=False).rows[0].sample_key)
        return keys

    def wait_for(self, count: int, process: "subprocess.Popen[str]") -> None:
        """Wait until so many samples are finished, or the process has ended."""
        deadline = time.monotonic() + 300
        while len(self.finished()) < count and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture(scope="module")
def contents(pipeline: Workspace) -> dict[str, str]:
    """What the undisturbed pipeline has extracted."""
    store = HiddenStateStore(pipeline.folder / ".cache/hidden_states")
    found = store.contents()
    assert len(found) >= 40
    return found


class VerifierServer:
    """`python -m specmill.serve_states` on a free port."""

    def __init__(self, pipeline: Workspace, staging: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = staging.parent / f"server-{port}.log"
        command = ["python", "-m", "specmill.serve_states", "--port", str(port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--staging", str(staging)],
                cwd=pipeline.folder,
                env=pipeline.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        deadline = time.monotonic() + 300
        while True:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            try:
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.5)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def shared(pipeline: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An extraction and two servers that stage where it looks."""
    extraction = Extraction(pipeline, tmp_path_factory.mktemp("shared") / "extraction")
    servers = [VerifierServer(pipeline, extraction.folder / "staging") for _ in range(2)]
    for server in servers:
        server.wait()
    yield extraction, *servers
    for server in servers:
        server.kill()


@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_an_extractor_killed_at_many_moments_loses_and_repeats_nothing(
    shared: Any, contents: dict[str, str], num_kills: int
) -> None:
    extraction, server, _ = shared
    chance = random.Random(4)
    kills = 0
    for _ in range(num_kills):
        finished: set[str] = set()
        while kills < num_kills:
            process = extraction.start(server.url)
            # a moment within the work: so many samples more than before
            extraction.wait_for(len(finished) + chance.randrange(1, 12), process)
            time.sleep(chance.uniform(0, 0.3))
            over = process.poll() is not None
            process.kill()
            process.communicate()
            if over:
                break
            kills += 1
            now = extraction.finished()
            assert now >= finished
            finished = now
        extraction.run(server.url)
        assert extraction.contents() == contents
        assert list((extraction.folder / "staging").iterdir()) == []
        rows = HiddenStateStore(extraction.folder / "store").shards.values()
        assert sum(len(shard.rows) for shard in rows) == len(contents)  # none twice
        subprocess.run(["rm", "-rf", extraction.folder / "store"], check=True)
        if kills >= num_kills:
            return


def test_two_servers_share_the_work_and_one_takes_over_when_the_other_dies(
    shared: Any, contents: dict[str, str]
) -> None:
    extraction, first, second = shared
    process = extraction.start(first.url, second.url)
    extraction.wait_for(5, process)
    first.kill()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-4000:]
    assert f"{first.url} is gone" in errors
    assert extraction.contents() == contents
    rows = HiddenStateStore(extraction.folder / "store").shards.values()
    assert sum(len(shard.rows) for shard in rows) == len(contents)


@pytest.mark.long
def test_training_online_gives_the_head_that_training_from_the_store_gives(
    shared: Any, pipeline: Workspace
) -> None:
    extraction, _, server = shared
    folder = pipeline.folder
    staging = folder / ".cache/staging"  # where alone a training reads what a server names
    shutil.rmtree(staging)
    staging.symlink_to(extraction.folder / "staging")
    weights = folder / "models/eagle3/model.safetensors"
    few = ("-S", "train.epochs=1", "-S", "train.max_samples=12")
    pipeline.run("dvc", "exp", "run", *few, "train")
    stored = weights.read_bytes()
    online = ("-S", "extract.mode=online", "-S", f"runtime.extract_endpoints=['{server.url}']")
    stages = pipeline.stages_run("dvc", "exp", "run", *few, *online, "train")
    assert "train" in stages
    assert not list((folder / "data/hidden_states").glob("*.safetensors"))
    assert weights.read_bytes() == stored
    staging.unlink()
    pipeline.reset()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engine_cores(pid: int) -> list[int]:
    """Processes below `pid` in which vLLM computes."""
    found = [
        child
        for child in children(pid)
        if b"EngineCore" in Path(f"/proc/{child}/cmdline").read_bytes()
        or "EngineCore" in Path(f"/proc/{child}/comm").read_text()
    ]
    assert found, children(pid)
    return found


def test_an_extractor_that_is_killed_outright_leaves_no_engine_behind(
    pipeline: Workspace, tmp_path: Path
) -> None:
    extraction = Extraction(pipeline, tmp_path / "extraction")
    process = extraction.start()
    extraction.wait_for(4, process)
    cores = engine_cores(process.pid)
    workers = [worker for core in cores for worker in children(core)]
    assert workers
    process.kill()
    process.communicate(timeout=60)
    assert all(ends(pid) for pid in (*cores, *workers))


@pytest.mark.long
def test_an_engine_killed_twice_costs_nothing_that_was_finished(
    pipeline: Workspace, tmp_path: Path, contents: dict[str, str]
) -> None:
    extraction = Extraction(pipeline, tmp_path / "extraction")
    finished: set[str] = set()
    for _ in range(2):
        process = extraction.start()
        extraction.wait_for(len(finished) + 4, process)
        for pid in engine_cores(process.pid):
            os.kill(pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
        assert process.returncode != 0
        assert "the engine died" in errors
        assert extraction.finished() >= finished
        finished = extraction.finished()
        assert len(finished) < len(contents)
    extraction.run()
    assert extraction.contents() == contents
    rows = HiddenStateStore(extraction.folder / "store").shards.values()
    assert sum(len(shard.rows) for shard in rows) == len(contents)


@pytest.fixture
def hard_linked(pipeline: Workspace) -> Iterator[Workspace]:
    """Store, DVC's cache and workspace are one file, as docs/rented-node.md advises."""
    again = ("dvc", "repro", "--force", "--single-item", "extract")
    pipeline.run("dvc", "config", "--local", "cache.type", "hardlink")
    # nothing is missing: no engine is started, only the view is written again
    pipeline.run(*again)
    # what DVC had copied into its cache before goes, so that it links what the stage has linked
    view = list((pipeline.folder / "data/hidden_states").glob("*.safetensors"))
    inodes = {path.stat().st_ino for path in view}
    cached = {
        path: path.read_bytes()
        for path in (pipeline.folder / ".dvc/cache/files/md5").rglob("*")
        if path.is_file() and path.stat().st_ino in inodes
    }
    for path in cached:
        path.unlink()
    pipeline.run(*again)
    yield pipeline
    (pipeline.folder / ".dvc/config.local").unlink()
    for path, content in cached.items():
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    pipeline.reset()


@pytest.mark.long
def test_a_bit_flipped_in_place_is_found_and_only_its_sample_is_extracted_again(
    hard_linked: Workspace, contents: dict[str, str]
) -> None:
    folder = hard_linked.folder
    store = HiddenStateStore(folder / ".cache/hidden_states")
    (spec,) = store.places
    key, piece = list(store.places[spec].items())[3]
    file = folder / "data/hidden_states" / piece.file.name
    assert file.samefile(piece.file)
    assert file.stat().st_nlink == 3
    file.chmod(0o644)
    with file.open("r+b") as handle:
        handle.seek(piece.offset + 1000)
        byte = handle.read(1)[0]
        handle.seek(piece.offset + 1000)
        handle.write(bytes([byte ^ 4]))
    for view in ((), ("data/hidden_states",)):
        verify = hard_linked.run("python", "-m", "specmill.store", "verify", *view, check=False)
        assert verify.returncode == 1
        assert f"lost: sample {key}" in verify.stdout
        assert verify.stdout.count("lost: ") == 1
    done = hard_linked.run("dvc", "repro", "extract")
    assert "Running stage 'extract'" in done.stdout
    assert f"1 of {len(contents)} samples are to be extracted" in done.stderr
    again = HiddenStateStore(folder / ".cache/hidden_states")
    assert again.contents() == contents
    assert hard_linked.run("python", "-m", "specmill.store", "verify").returncode == 0
    StateView(folder / "data/hidden_states").require([key])


@pytest.mark.long
def test_fp8_states_are_half_the_bytes_and_close(pipeline: Workspace) -> None:
    folder = pipeline.folder
    exact = StateView(folder / "data/hidden_states")
    kept = {sample.sample_key: exact.load(sample.sample_key)[1].clone()
            for sample in read_samples(folder / "data/prepared/heldout.parquet")}  # fmt: skip
    pipeline.run(
        "dvc", "exp", "run", "-S", "extract.dtype=fp8_e4m3", "-S", "train.epochs=1", "train"
    )
    view = StateView(folder / "data/hidden_states")
    assert view.spec.dtype == FP8
    report = read_json(folder / "reports/extract.json")
    # 4 layers of 576 one-byte values, 4 scales and the id, of 4 bytes each
    assert report["bytes_per_token"] == 4 * 576 + 4 * 4 + 4
    size = sum(
        path.stat().st_size for path in (folder / "data/hidden_states").glob("*.safetensors")
    )
    assert size == pytest.approx(report["num_tokens"] * report["bytes_per_token"], rel=0.01)
    for key, states in kept.items():
        _, stored, scales = view.load(key)
        back = restore(stored, scales, torch.float32)
        error = (back - states.float()).norm(dim=(0, 2)) / states.float().norm(dim=(0, 2))
        assert error.max() < 1 / 16
    params = load_params(folder / "params.yaml")
    assert params.extract.dtype == "fp8_e4m3"
    pipeline.reset()
