from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specmill import compat
from specmill.files import read_json, write_json
from specmill.head import best_epoch, curves, replayed_lengths, worth
from specmill.medusa import build_heads, export_medusa, load_verifier_head
from specmill.params_heads import Medusa
from specmill.replay_heads import eagle3_runs, load_medusa, medusa_runs
from specmill.replayed import Replayed, chain_runs
from specmill.samples import Sample
from specmill.section import DoesNotFit
from specmill.training import train
from specmill.view import StateView
from specmill.walk import walk
from tests.fakes import sample
from tests.test_training import (
    CHOSEN,
    HIDDEN_SIZE,
    VOCAB_SIZE,
    make_view,
    new_model,
    random_samples,
    stored,
    tables,
    verifier_head,
)

__all__ = ["verifier_head"]

IDENTITY: dict[str, Any] = {"dtype": "bfloat16", "num_layers": 8, "name": "tiny"}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "device", lambda: "cpu")


def test_drafts_are_counted_where_the_table_says() -> None:
    # x0 ... x9 are 50 ... 59, the answer begins with x4 = 54; a draft id is its token less 40
    fed = torch.arange(51, 60)
    answered = torch.arange(1, 10) >= 4
    d2t = torch.full((30,), 40)
    # position 3 is fed x4: its drafts are to equal x5 x6 x7
    right = torch.stack([fed + 1 + step for step in range(3)]) - 40
    runs = chain_runs(right, fed, answered, d2t)
    # starts with x4 ... x8 known; only what was recorded can be right
    assert runs.accepted[:, 2].tolist() == [3, 3, 3, 2, 1]
    assert walk(runs, 3).num_steps == 2
    wrong = right.clone()
    wrong[1, 3] = 0  # the second draft of start 0 hides its third
    wrong[0, 4] = 0
    assert chain_runs(wrong, fed, answered, d2t).accepted[:, 2].tolist() == [1, 0, 3, 2, 1]
    # what is drafted within the prompt does not count
    wrong[:, :3] = 0
    assert chain_runs(wrong, fed, answered, d2t).accepted[:, 2].tolist() == [1, 0, 3, 2, 1]


def head_of(folder: Path, verifier_head: Path, **changes: Any) -> tuple[Path, Any]:
    """A random head that can draft right now and then, as a checkpoint and as speculators' model.

    All weights and states being noise, its drafts are as good as drawn from the four answer ids.
    """
    model = new_model(verifier_head, **changes)
    folder.mkdir()
    config = model.config.to_dict()
    weights = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("verifier_")
    }
    save_file({name: one.contiguous().clone() for name, one in weights.items()},
              folder / "model.safetensors")  # fmt: skip
    write_json(folder / "config.json", config)
    return folder, model.to(torch.bfloat16).eval()


def drafted_alone(model: Any, view: StateView, one: Sample, start: int, most_k: int) -> list[int]:
    """The chain a head drafts from a start, fed its own drafts and nothing that comes later."""
    _, states, _ = view.load(one.sample_key)
    num_prompt = int((one.loss_mask == 0).sum())
    fed = one.input_ids[1 : num_prompt + 1 + start].tolist()
    place = len(fed) - 1
    chain: list[int] = []
    for step in range(most_k):
        tokens = torch.tensor([fed + chain])
        length = tokens.shape[1]
        # states beyond the start are of no use to it: the sample has none yet
        given = torch.zeros(length, 3 * HIDDEN_SIZE, dtype=torch.bfloat16)
        given[: place + 1] = states[: place + 1, :-1].flatten(1)
        with torch.no_grad():
            drafts = model(
                hidden_states=given[None],
                input_ids=tokens,
                document_ids=torch.zeros(1, length, dtype=torch.long),
                position_ids=torch.arange(1, length + 1)[None],
                ttt_steps=step + 1,
            )
        draft = int(drafts[step][0, place])
        chain.append(draft + int(model.d2t[draft]))
    return chain


def test_replayed_runs_are_those_of_a_head_that_is_fed_its_own_drafts(
    tmp_path: Path, verifier_head: Path
) -> None:
    samples, states = random_samples(6)
    view = make_view(tmp_path, samples, states)
    head, model = head_of(tmp_path / "head", verifier_head)
    found = eagle3_runs(head, IDENTITY, verifier_head, view, samples, 3)
    total = 0
    for one, runs in zip(samples, found, strict=True):
        answer = one.answer_token_ids
        assert len(runs.accepted) == len(answer) - 1
        for start in range(len(answer) - 1):
            chain = drafted_alone(model, view, one, start, 3)
            following = answer[start + 1 :]
            right = 0
            while right < min(3, len(following)) and chain[right] == following[right]:
                right += 1
            assert runs.accepted[start].tolist() == [min(right, k) for k in (1, 2, 3)]
            total += right
    assert total > 5  # it was right often enough for the comparison to mean something


def test_answers_of_any_length_are_replayed_beside_a_gpu_whose_training_packs_blocks(
    tmp_path: Path, verifier_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention refuses lengths between its blocks; this sample has fewer tokens than one."""
    monkeypatch.setattr(compat, "draft_attention", lambda _: "simple_flex_attention")
    samples, states = random_samples(1)
    assert len(samples[0].input_ids) % 128 != 1
    view = make_view(tmp_path, samples, states)
    head, _ = head_of(tmp_path / "head", verifier_head)
    (runs,) = eagle3_runs(head, IDENTITY, verifier_head, view, samples, 3)
    assert len(runs.accepted) == len(samples[0].answer_token_ids) - 1


def test_a_head_that_is_fed_layers_that_are_not_kept_cannot_be_replayed(
    tmp_path: Path, verifier_head: Path
) -> None:
    samples, states = random_samples(1)
    view = make_view(tmp_path, samples, states)
    head, _ = head_of(tmp_path / "head", verifier_head)
    config = read_json(head / "config.json")
    write_json(head / "config.json", config | {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]})
    with pytest.raises(DoesNotFit, match=r"layers \[2, 4, 6\], and those of \[6\] are not kept"):
        eagle3_runs(head, IDENTITY, verifier_head, view, samples, 2)


def medusa_head(folder: Path, verifier_head: Path, vocabulary: str) -> tuple[Path, Any]:
    _, t2d = tables()
    t2d = t2d if vocabulary == "draft" else np.ones(VOCAB_SIZE, dtype=bool)
    chosen = Medusa(
        num_heads=3, num_layers=2, vocabulary="draft", epochs=1, lr=0.1, tokens_per_step=8,
        max_samples=None, seed=1,
    )  # fmt: skip
    heads = build_heads(load_verifier_head(verifier_head, torch.bfloat16, "cpu"), t2d, chosen)
    noise = torch.Generator().manual_seed(2)
    for block in heads.blocks:
        block.data = torch.randn(block.shape, generator=noise)
    export_medusa(heads, VOCAB_SIZE, folder, {})
    return folder, heads


@pytest.mark.parametrize("vocabulary", ["draft", "full"])
def test_medusa_heads_are_read_back_and_each_drafts_one_token_further(
    tmp_path: Path, verifier_head: Path, vocabulary: str
) -> None:
    samples, states = random_samples(4)
    view = make_view(tmp_path, samples, states)
    folder, heads = medusa_head(tmp_path / "medusa", verifier_head, vocabulary)
    read = load_medusa(folder, "cpu")
    assert read.token_ids.tolist() == heads.token_ids.tolist()
    norm = load_verifier_head(verifier_head, torch.bfloat16, "cpu")
    found = medusa_runs(folder, IDENTITY, verifier_head, view, samples, 3)
    for one, its_states, runs in zip(samples, states, found, strict=True):
        prompt = len(one.prompt_token_ids)
        for start in range(len(one.answer_token_ids) - 1):
            position = prompt - 1 + start  # of the state from which the known token came
            right = 0
            for number in range(3):
                logits = read.logits(number, norm.normed(its_states[position, -1]))
                guess = int(read.token_ids[logits.argmax()])
                target = position + 2 + number
                if target >= len(one.input_ids) or guess != one.input_ids[target]:
                    break
                right += 1
            assert runs.accepted[start, 2] == right


def test_more_drafts_than_medusa_heads_are_refused(tmp_path: Path, verifier_head: Path) -> None:
    samples, states = random_samples(1)
    view = make_view(tmp_path, samples, states)
    folder, _ = medusa_head(tmp_path / "medusa", verifier_head, "draft")
    with pytest.raises(DoesNotFit, match="it has 3 heads, fewer than K 4"):
        medusa_runs(folder, IDENTITY, verifier_head, view, samples, 4)


def test_training_reports_replayed_lengths_of_every_epoch_and_keeps_the_longest(
    tmp_path: Path, verifier_head: Path
) -> None:
    samples, states = random_samples(12)
    view = make_view(tmp_path, samples, states)
    model = new_model(verifier_head, epochs=3)
    best, epochs = train(
        model,
        stored(samples[:8], view),
        stored(samples[8:], view),
        CHOSEN.model_copy(update={"epochs": 3}),
        tmp_path / "checkpoints",
        lambda *_: None,
    )
    lengths = [replayed_lengths(metrics) for metrics in epochs]
    assert all(1 <= found[1] <= 2 and found[1] <= found[2] <= 3 for found in lengths)
    longest = max(found[2] for found in lengths)
    assert lengths[int(best.name)][2] == longest
    link = tmp_path / "checkpoints" / "checkpoint_best"
    assert link.resolve() == best.resolve()
    assert [row["replayed_length"] for row in curves(epochs)] == [
        round(found[k], 4) for found in lengths for k in (1, 2)
    ]


def test_packed_documents_are_replayed_one_by_one() -> None:
    class Model(torch.nn.Module):
        d2t = None

        def forward(self, **given: torch.Tensor) -> Any:
            # drafts that are always right within a document, and run on into the next one
            following = torch.roll(given["input_ids"], -1, 1)
            return [following, torch.roll(following, -1, 1)], None, {}

    model = Model()
    given = {
        "input_ids": torch.tensor([[11, 12, 13, 14, 21, 22, 23, 0]]),
        "loss_mask": torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1]]),
        "document_ids": torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1]]),
    }
    with Replayed(model) as replayed:
        model(**given)
    model(**given)  # outside the block nothing is read
    assert [one.accepted.tolist() for one in replayed.runs] == [[[1, 2], [1, 1]], [[1, 1]]]
    # 12 is known, 13 is right, 14 too; 22 is known, 23 is right: 3 tokens in 2 steps
    assert replayed.lengths() == {"replayed_length_k1": 1.5, "replayed_length_k2": 1.5}


def test_epochs_are_ranked_by_the_replayed_length_with_the_largest_k() -> None:
    epochs = [
        {"replayed_length_k1": 1.5, "replayed_length_k2": 1.6, "full_acc_0_epoch": 0.9},
        {"replayed_length_k1": 1.4, "replayed_length_k2": 1.7, "full_acc_0_epoch": 0.1},
    ]
    assert [worth(metrics) for metrics in epochs] == [1.6, 1.7]
    assert best_epoch(epochs) == 1
    assert worth({"full_acc_0_epoch": 0.5}) == 1.5


def test_an_answer_of_one_token_is_not_replayed() -> None:
    one = sample([1, 2], [3])
    runs = chain_runs(torch.zeros(2, 2, dtype=torch.long),
                      torch.from_numpy(one.input_ids[1:]).long(),
                      torch.from_numpy(one.loss_mask[1:] == 1), None)  # fmt: skip
    assert runs.accepted.shape == (0, 2)
