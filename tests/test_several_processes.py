import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specmill import processes, shares
from specmill.shares import SharedBatches, deal
from tests.fakes import sample
from tests.test_training import ANSWER_IDS, HIDDEN_SIZE, VOCAB_SIZE, make_view, verifier_head
from tests.workspace import ROOT

__all__ = ["verifier_head"]
NUM_TRAINING, NUM_HELDOUT = 21, 7


def test_a_batch_is_dealt_out_by_length_and_each_sample_once() -> None:
    # 9, 7 and 5 to one each; 4 to the third (5), 3 to the second (7), 2 to the first (9)
    assert deal(np.array([5, 9, 4, 7, 3, 2]), 3) == [[1, 5], [3, 4], [0, 2]]
    assert deal(np.array([5, 9, 4]), 1) == [[0, 1, 2]]
    assert deal(np.array([5]), 3) == [[0], [], []]


def test_shares_are_padded_to_what_nine_in_ten_batches_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # ten batches of four samples of 100 tokens: two for each of two processes, 200, rounded to 256
    batches = SharedBatches(400, [100] * 40, seed=0)
    assert batches.usual_length() == 400
    monkeypatch.setattr(shares, "get_world_size", lambda: 2)
    assert batches.usual_length() == 256
    # a sample that fills a batch has a share that is all of it: batches of one in ten are whole
    assert SharedBatches(400, [100] * 40 + [400], seed=0).usual_length() == 256
    assert SharedBatches(400, [400] * 40, seed=0).usual_length() == 400


def prepare(folder: Path, head: Path) -> None:
    """Samples of 7 to 19 tokens with states, as the program of the tests reads them."""
    generator = np.random.default_rng(4)
    noise = torch.Generator().manual_seed(4)
    samples, states = [], []
    for _ in range(NUM_TRAINING + NUM_HELDOUT):
        num_answered = int(generator.integers(3, 16))
        samples.append(
            sample(
                generator.integers(0, VOCAB_SIZE, 4).tolist(),
                generator.choice(ANSWER_IDS, num_answered).tolist(),
            )
        )
        drawn = torch.randn(4 + num_answered, 4, HIDDEN_SIZE, generator=noise)
        states.append(drawn.to(torch.bfloat16))
    folder.mkdir()
    make_view(folder, samples, states)
    split = samples[:NUM_TRAINING], samples[NUM_TRAINING:]
    (folder / "samples.pickle").write_bytes(pickle.dumps(split))
    shutil.copytree(head, folder / "verifier_head")


def run(
    folder: Path, num_processes: int, *, type_: str = "eagle3", tokens: int = 40, epochs: int = 2
) -> list[dict[str, Any]]:
    """What each process wrote; [] when the training was interrupted."""
    program = ["-m", "tests.trained_apart", str(folder), type_, str(tokens), str(epochs)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    done = subprocess.run(
        [sys.executable, *(torchrun if num_processes > 1 else []), *program],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if (folder / "stop_after").is_file():
        assert "KeyboardInterrupt" in done.stderr
        return []
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]


@pytest.fixture(scope="module")
def folders(verifier_head: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same samples for one process and for two."""
    root = tmp_path_factory.mktemp("apart")
    for number in (1, 2):
        prepare(root / str(number), verifier_head)
    return {number: root / str(number) for number in (1, 2)}


@pytest.fixture(scope="module")
def alone(folders: dict[int, Path]) -> dict[str, Any]:
    (found,) = run(folders[1], 1)
    return found


@pytest.fixture(scope="module")
def together(folders: dict[int, Path]) -> list[dict[str, Any]]:
    return run(folders[2], 2)


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one_and_read_each_sample_once_an_epoch(
    alone: dict[str, Any], together: list[dict[str, Any]], folders: dict[int, Path]
) -> None:
    assert Counter(alone["read"]) == dict.fromkeys(range(NUM_TRAINING), 2)
    apart = [Counter(one["read"]) for one in together]
    assert apart[0] + apart[1] == Counter(alone["read"])
    assert all(len(one) > NUM_TRAINING / 4 for one in apart)
    assert len(alone["steps"]) == len(together[0]["steps"]) > 10
    for one, two in zip(alone["steps"], together[0]["steps"], strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    losses = [step["loss"] for step in alone["steps"]]
    assert max(losses) > 1.05 * min(losses)  # a curve, and no line that all would have


@pytest.mark.slow
def test_two_processes_validate_replay_and_choose_as_one_does(
    alone: dict[str, Any], together: list[dict[str, Any]]
) -> None:
    assert alone["best"] == together[0]["best"] == together[1]["best"]
    for one, two in zip(alone["epochs"], together[0]["epochs"], strict=True):
        assert two == pytest.approx(one, rel=1e-3)
        assert "replayed_length_k2" in one


@pytest.mark.slow
def test_checkpoints_of_two_processes_are_those_of_one(
    alone: dict[str, Any], together: list[dict[str, Any]], folders: dict[int, Path]
) -> None:
    one, two = (folders[number] / "checkpoints" for number in (1, 2))
    names = [sorted(str(path.relative_to(root)) for path in root.rglob("*")) for root in (one, two)]
    assert names[0] == names[1]
    first, second = (load_file(root / "1" / "model.safetensors") for root in (one, two))
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert torch.allclose(weight.float(), second[name].float(), atol=1e-4), name
    kept = [torch.load(root / "1" / "optimizer_state_dict.pt") for root in (one, two)]
    assert [list(state["state"]) for state in kept[0]] == [
        list(state["state"]) for state in kept[1]
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_training_goes_on_with_another_number_of_processes(
    verifier_head: Path, alone: dict[str, Any], tmp_path: Path, before: int, after: int
) -> None:
    folder = tmp_path / "cut"
    prepare(folder, verifier_head)
    (folder / "stop_after").write_text("0")
    run(folder, before)
    (folder / "stop_after").unlink()
    resumed = run(folder, after)[0]
    assert len(resumed["steps"]) == len(alone["steps"]) // 2
    for one, two in zip(alone["steps"][-len(resumed["steps"]) :], resumed["steps"], strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    for one, two in zip(alone["epochs"], resumed["epochs"], strict=True):
        assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("type_", ["peagle", "dflash"])
def test_types_that_draw_at_random_train_with_two_processes_too(
    verifier_head: Path, tmp_path: Path, type_: str
) -> None:
    folder = tmp_path / "apart"
    prepare(folder, verifier_head)
    first, second = run(folder, 2, type_=type_, epochs=1)
    assert sorted(first["read"] + second["read"]) == list(range(NUM_TRAINING))
    assert first["epochs"] == second["epochs"]


@pytest.mark.slow
@pytest.mark.long
def test_a_batch_of_fewer_samples_than_processes_is_trained_on_too(
    verifier_head: Path, tmp_path: Path
) -> None:
    results = []
    for num_processes in (1, 2):
        folder = tmp_path / str(num_processes)
        prepare(folder, verifier_head)
        results.append(run(folder, num_processes, tokens=20, epochs=1)[0])
    assert len(results[0]["steps"]) > NUM_TRAINING / 2  # of one or two samples each
    for one, two in zip(results[0]["steps"], results[1]["steps"], strict=True):
        assert two == pytest.approx(one, rel=1e-4)


def test_more_processes_than_gpus_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert processes.visible_gpus() == ["3", "5"]
    with pytest.raises(ValueError, match=r"runtime\.train_processes asks for 4 GPUs, and 2 can"):
        processes.spread(4, "runtime.train_processes")


def test_one_process_is_left_alone_and_so_is_one_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(os, "execv", started)
    processes.spread(1, "key")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "5")
    processes.spread(2, "key")
    assert (processes.rank(), processes.local_rank()) == (5, 1)
