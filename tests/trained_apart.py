"""A training as one of the processes that torchrun starts, or alone; a program of the tests.

Run      python -m tests.trained_apart FOLDER TYPE TOKENS EPOCHS
         torchrun --standalone --nproc-per-node=2 -m tests.trained_apart ...

FOLDER has `verifier_head` and `view.pickle`; checkpoints are kept in it, and RANK.json is written:
the samples that were read, and of the first process every step's loss and what epochs reached.
"""

import json
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from specmill import compat, processes, shares
from specmill.distributed import one_after_the_first, process_group
from specmill.training import train
from specmill.transfer import StoredSamples
from specmill.view import StateView
from tests.test_training import CHOSEN, new_model

read: list[int] = []
steps: list[dict[str, Any]] = []


class Noted(StoredSamples):
    """Samples that note which of them were read."""

    def __getitem__(self, index: int) -> Any:
        read.append(int(index))
        return super().__getitem__(index)


class Steps(logging.Handler):
    """Keeps what speculators reports of every step."""

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict) and "train" in record.msg:
            steps.append(record.msg["train"])


def main(folder: Path, type_: str, tokens: int, num_epochs: int) -> None:
    compat.device = lambda: "cpu"
    shares._BLOCK = 8  # so that batches of 40 tokens have shares of two lengths
    logger = logging.getLogger("speculators.metrics")
    logger.setLevel(logging.INFO)
    logger.addHandler(Steps())
    chosen = CHOSEN.model_copy(
        update={"type": type_, "tokens_per_step": tokens, "epochs": num_epochs, "optimizer": "muon"}
    )
    training, heldout = pickle.loads((folder / "samples.pickle").read_bytes())
    view = StateView(folder / "view")
    with process_group():
        with one_after_the_first():
            how: Any = (view, folder / "scratch", tokens, torch.float32, [], 60)
            datasets = Noted(training, *how), StoredSamples(heldout, *how)
        model = new_model(folder / "verifier_head", type=type_)
        stop_after = folder / "stop_after"

        def stop(epoch: int, _: dict[str, float]) -> None:
            if stop_after.is_file() and epoch == int(stop_after.read_text()):
                raise KeyboardInterrupt

        best, epochs = train(model, *datasets, chosen, folder / "checkpoints", stop)
    found = {"read": read, "steps": steps, "epochs": epochs, "best": best.name}
    (folder / f"{processes.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
