import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specmill.medusa import (
    MedusaHeads,
    VerifierHead,
    build_heads,
    choose_tables,
    export_medusa,
    load_verifier_head,
)
from specmill.medusa_positions import NOTHING, Positions, align
from specmill.medusa_training import (
    best_epoch,
    check_next_tokens,
    curves,
    evaluate,
    head_losses,
    train,
)
from specmill.methods.medusa import speculative_config
from specmill.params_heads import Medusa
from specmill.samples import Sample
from specmill.section import DoesNotFit, NoSettings
from specmill.shards import FP8, Shard, StateSpec
from specmill.states import stage
from specmill.store import HiddenStateStore
from specmill.view import StateView
from specmill.vocab import tables_digest
from tests.fakes import sample

VOCAB_SIZE, HIDDEN_SIZE = 32, 16
ANSWER_IDS = [1, 7, 9, 30]
SPEC = StateSpec("f", (2, 4, 5, 8), HIDDEN_SIZE, "bfloat16")
VERIFIER = {"name": "tiny", "fingerprint": "f", "hidden_size": 16, "vocab_size": 32}
CHOSEN = Medusa(
    num_heads=2,
    num_layers=1,
    vocabulary="draft",
    epochs=3,
    lr=0.02,
    tokens_per_step=16,
    max_samples=None,
    seed=3,
)


def make_view(
    folder: Path, samples: list[Sample], last: list[torch.Tensor], spec: StateSpec = SPEC
) -> StateView:
    """Samples whose last layer is as given and whose aux layers are noise."""
    noise = torch.Generator().manual_seed(5)
    store = HiddenStateStore(folder / "store")
    with store.writer(spec, 10**6) as writer:
        for number, (one, states) in enumerate(zip(samples, last, strict=True)):
            shape = (len(states), len(spec.layer_ids) - 1, spec.hidden_size)
            every = torch.cat([torch.randn(shape, generator=noise), states[:, None]], dim=1)
            if spec.dtype != FP8:
                every = every.to(getattr(torch, spec.dtype))
            file = folder / f"{number}.safetensors"
            row = stage(file, spec, torch.from_numpy(one.input_ids), every)
            writer.add(next(Shard(spec, (row,)).pieces(file)), staged=True)
    store.write_view(folder / "view", spec, [one.sample_key for one in samples], 10**6)
    return StateView(folder / "view")


def plain_head(lm_head: torch.Tensor) -> VerifierHead:
    return VerifierHead(torch.ones(lm_head.shape[1]), 0.0, lm_head)


def mask_of(ids: list[int]) -> np.ndarray:
    """t2d of these ids."""
    return np.isin(np.arange(VOCAB_SIZE), ids)


def draft_tables() -> tuple[np.ndarray, np.ndarray]:
    return np.array([1, 6, 7, 27]), mask_of(ANSWER_IDS)  # 0 + 1, 1 + 6, 2 + 7, 3 + 27


def test_each_head_is_paired_with_the_token_one_further_on() -> None:
    """The table of specmill.medusa_positions: p0 p1 p2 are 50 51 52, a0 ... a4 are 60 ... 64."""
    ids = np.array([50, 51, 52, 60, 61, 62, 63, 64], dtype=np.int32)
    mask = np.array([0, 0, 0, 1, 1, 1, 1, 1], dtype=np.uint8)
    positions, following, targets = align(ids, mask, 2)
    assert positions.tolist() == [2, 3, 4, 5, 6]
    assert following.tolist() == [60, 61, 62, 63, 64]
    assert targets.tolist() == [
        [61, 62],
        [62, 63],
        [63, 64],
        [64, NOTHING],
        [NOTHING, NOTHING],
    ]


def test_tokens_that_the_verifier_did_not_write_are_no_targets_and_do_not_draft() -> None:
    ids = np.array([50, 60, 61, 51, 62], dtype=np.int32)
    mask = np.array([0, 1, 1, 0, 1], dtype=np.uint8)
    positions, following, targets = align(ids, mask, 2)
    # from position 2 the token 51 came from elsewhere; from position 0 it cannot be head 1's target
    assert positions.tolist() == [0, 1, 3]
    assert following.tolist() == [60, 61, 62]
    assert targets.tolist() == [[61, NOTHING], [NOTHING, 62], [NOTHING, NOTHING]]


def test_more_heads_than_answer_tokens_leave_the_later_heads_nothing() -> None:
    ids, mask = np.array([50, 60, 61], dtype=np.int32), np.array([0, 1, 1], dtype=np.uint8)
    assert align(ids, mask, 4)[2].tolist() == [[61] + 3 * [NOTHING], 4 * [NOTHING]]


def test_the_final_norm_is_a_root_mean_square_with_the_verifiers_weight() -> None:
    head = VerifierHead(torch.tensor([1.0, 2.0]), 1.5, torch.zeros(3, 2))
    # mean square of (3, 4) is 12.5; with eps 1.5 its root is the root of 14
    expected = [[3 / 14**0.5, 8 / 14**0.5]]
    assert torch.allclose(head.normed(torch.tensor([[3.0, 4.0]])), torch.tensor(expected))


@pytest.mark.parametrize("dtype", ["bfloat16", FP8])
def test_steps_hold_the_normed_last_layer_packed_across_samples(tmp_path: Path, dtype: str) -> None:
    """State t of sample n is 2 ** n in dimension t alone: normed, 4 there (the root of 16)."""
    samples = [sample([50], [60, 61, 62]), sample([51], [63, 64])]
    last = [2**n * torch.eye(16)[: len(one.input_ids)] for n, one in enumerate(samples)]
    view = make_view(tmp_path, samples, last, replace(SPEC, dtype=dtype))
    chosen = CHOSEN.model_copy(update={"num_heads": 1, "tokens_per_step": 2})
    positions = Positions(samples, view, plain_head(torch.zeros(32, 16)), chosen)
    steps = list(positions.in_order())
    assert positions.num_steps == len(steps) == 3
    assert [step.following.tolist() for step in steps] == [[60, 61], [62, 63], [64]]
    assert [step.targets[:, 0].tolist() for step in steps] == [[61, 62], [NOTHING, 64], [NOTHING]]
    eye = 4 * torch.eye(16)
    for step, rows in zip(steps, ([0, 1], [2, 0], [1]), strict=True):
        assert torch.equal(step.normed, eye[rows])


def written(view: StateView, samples: list[Sample], seed: int, epoch: int) -> list[int]:
    """x_(t+1) in the order of training."""
    chosen = CHOSEN.model_copy(update={"seed": seed, "tokens_per_step": 5})
    positions = Positions(samples, view, plain_head(torch.zeros(32, 16)), chosen)
    steps = list(positions.shuffled(epoch))
    assert len(steps) == positions.num_steps
    return [token for step in steps for token in step.following.tolist()]


def test_the_order_of_positions_is_drawn_from_the_seed_and_the_epoch(tmp_path: Path) -> None:
    samples = [sample([50], [100 * n, 100 * n + 1, 100 * n + 2]) for n in range(12)]
    view = make_view(tmp_path, samples, 12 * [torch.ones(4, 16)])
    order = written(view, samples, 3, 0)
    assert order == written(view, samples, 3, 0)
    assert order != written(view, samples, 3, 1)
    assert order != written(view, samples, 4, 0)
    assert sorted(order) == sorted(100 * n + i for n in range(12) for i in range(3))
    # positions of a sample are apart: whole samples would come as at most 12 runs
    assert sum(one // 100 != other // 100 for one, other in pairwise(order)) > 20


def test_a_pool_of_whole_samples_is_shuffled_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specmill.medusa_positions._POOL", 6)
    samples = [sample([50], [100 * n, 100 * n + 1, 100 * n + 2]) for n in range(11)]
    view = make_view(tmp_path, samples, 11 * [torch.ones(4, 16)])
    order = written(view, samples, 3, 0)
    pools = [{token // 100 for token in order[at : at + 6]} for at in range(0, 33, 6)]
    assert [len(pool) for pool in pools] == [2, 2, 2, 2, 2, 1]
    assert set.union(*pools) == set(range(11))


def test_missing_and_online_states_are_refused(tmp_path: Path) -> None:
    samples = [sample([50], [60, 61]), sample([51], [62, 63])]
    view = make_view(tmp_path, samples[:1], [torch.ones(3, 16)])
    head = plain_head(torch.zeros(32, 16))
    with pytest.raises(ValueError, match="no hidden states of 1 of 2 samples"):
        Positions(samples, view, head, CHOSEN)
    view.online = True
    with pytest.raises(ValueError, match=r"set extract\.mode to store"):
        Positions(samples[:1], view, head, CHOSEN)


def test_an_untrained_head_says_what_the_verifier_says_next() -> None:
    noise = torch.Generator().manual_seed(0)
    lm_head = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=noise)
    normed = torch.randn(20, HIDDEN_SIZE, generator=noise)
    chosen = CHOSEN.model_copy(update={"num_layers": 2})
    heads = build_heads(plain_head(lm_head), draft_tables()[1], chosen)
    for head in range(2):
        assert torch.equal(heads.logits(head, normed), normed @ lm_head[ANSWER_IDS].T)


def test_a_head_is_residual_blocks_before_the_lm_head() -> None:
    """By hand, of one dimension: y = 2, W = 0.5: 2 + silu(1); then W = -1."""
    heads = MedusaHeads(torch.tensor([[1.0], [-3.0]]), torch.tensor([4, 6]), 1, 2)
    with torch.no_grad():
        heads.blocks[0][:, 0, 0] = torch.tensor([0.5, -1.0])
    first = 2 + 1 / (1 + np.exp(-1))
    second = first - first / (1 + np.exp(first))
    assert torch.allclose(
        heads.logits(0, torch.tensor([[2.0]])), torch.tensor([[second, -3 * second]]).float()
    )


def knowing(folder: Path, count: int) -> tuple[list[Sample], StateView, VerifierHead]:
    """Samples of random answers whose state at t tells x_(t+2) and x_(t+3), and nothing else.

    In dimensions 0 ... 3 and 4 ... 7, one for each of ANSWER_IDS.
    """
    generator = np.random.default_rng(1)
    samples, last = [], []
    for _ in range(count):
        tokens = [int(token) for token in generator.choice(ANSWER_IDS, 15)]
        samples.append(sample(tokens[:3], tokens[3:12]))  # x12 ... x14 are not kept
        states = torch.zeros(12, HIDDEN_SIZE)
        places = [ANSWER_IDS.index(token) for token in tokens]
        states[range(12), places[2:14]] = 1
        states[range(12), [4 + place for place in places[3:15]]] = 1
        last.append(states)
    noise = torch.Generator().manual_seed(0)
    lm_head = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=noise)
    return samples, make_view(folder, samples, last), plain_head(lm_head)


def parts(folder: Path, chosen: Medusa = CHOSEN) -> tuple[MedusaHeads, Positions, Positions]:
    samples, view, head = knowing(folder, 48)
    heads = build_heads(head, draft_tables()[1], chosen)
    return (
        heads,
        Positions(samples[:40], view, head, chosen),
        Positions(samples[40:], view, head, chosen),
    )


@pytest.mark.slow
def test_training_learns_what_only_the_state_of_the_right_position_tells(tmp_path: Path) -> None:
    """Were anything shifted by one, a head would be right by chance, 0.25."""
    heads, training, heldout = parts(tmp_path)
    epochs = train(heads, training, heldout, CHOSEN, tmp_path / "checkpoints", lambda *_: None)
    assert min(epochs[-1][f"accuracy_head_{head}"] for head in range(2)) > 0.9
    assert epochs[-1]["chain_accuracy_1"] > 0.85
    assert epochs[-1]["loss"] < epochs[0]["loss"]


def test_training_reports_every_epoch_and_leaves_the_best_epochs_weights(tmp_path: Path) -> None:
    """States are noise, so that the held-out accuracy is luck: here best in the third epoch."""
    noise = torch.Generator().manual_seed(9)
    samples = [
        sample([n], np.random.default_rng(n).choice(ANSWER_IDS, 9).tolist()) for n in range(20)
    ]
    states = [torch.randn(10, HIDDEN_SIZE, generator=noise) for _ in samples]
    view = make_view(tmp_path, samples, states)
    head = plain_head(torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=noise))
    heads = build_heads(head, draft_tables()[1], CHOSEN)
    training, heldout = (
        Positions(part, view, head, CHOSEN) for part in (samples[:10], samples[10:])
    )
    reported: list[tuple[int, dict[str, float]]] = []
    chosen = CHOSEN.model_copy(update={"epochs": 4})
    epochs = train(
        heads,
        training,
        heldout,
        chosen,
        tmp_path / "checkpoints",
        lambda *point: reported.append(point),
    )
    assert reported == list(enumerate(epochs))
    lengths = [metrics["expected_length"] for metrics in epochs]
    assert best_epoch(epochs) == lengths.index(max(lengths)) == 2
    assert evaluate(heads, heldout) == epochs[best_epoch(epochs)]


def test_the_first_of_equally_good_epochs_is_the_best() -> None:
    lengths = [1.1, 1.4, 1.4, 1.2]
    assert best_epoch([{"expected_length": length} for length in lengths]) == 1


@pytest.mark.slow
def test_an_interrupted_training_goes_on_and_equals_an_undisturbed_one(tmp_path: Path) -> None:
    heads, training, heldout = parts(tmp_path)
    whole = train(heads, training, heldout, CHOSEN, tmp_path / "whole", lambda *_: None)

    def interrupt(epoch: int, _: dict[str, float]) -> None:
        if epoch == 1:
            raise KeyboardInterrupt

    def fresh() -> MedusaHeads:
        return MedusaHeads(heads.lm_head, heads.token_ids, 2, 1)

    with pytest.raises(KeyboardInterrupt):
        train(fresh(), training, heldout, CHOSEN, tmp_path / "cut", interrupt)
    resumed = fresh()
    trained_again: list[int] = []
    epochs = train(
        resumed,
        training,
        heldout,
        CHOSEN,
        tmp_path / "cut",
        lambda epoch, _: trained_again.append(epoch),
    )
    assert trained_again == [2]
    assert epochs == whole
    for one, other in zip(resumed.blocks, heads.blocks, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 0.01, 0.5, 0.999])
def test_an_epoch_that_was_cut_is_trained_again_from_the_one_before(
    tmp_path: Path, left: float
) -> None:
    heads, training, heldout = parts(tmp_path)
    trained: list[int] = []

    def run() -> list[dict[str, float]]:
        fresh = MedusaHeads(heads.lm_head, heads.token_ids, 2, 1)
        return train(
            fresh,
            training,
            heldout,
            CHOSEN,
            tmp_path / "kept",
            lambda epoch, _: trained.append(epoch),
        )

    whole, path = run(), tmp_path / "kept/1.pt"
    os.truncate(path, int(left * path.stat().st_size))
    assert run() == whole
    assert trained == [0, 1, 2, 1]


def test_heads_that_diverged_are_refused(tmp_path: Path) -> None:
    heads, _, heldout = parts(tmp_path)
    with torch.no_grad():
        heads.blocks[1].fill_(torch.inf)
    with pytest.raises(ValueError, match="held-out loss is nan: training diverged; lower lr"):
        evaluate(heads, heldout)


def guessing(folder: Path) -> tuple[MedusaHeads, Positions]:
    """One held-out answer 7 8 7 7 7 3 and untrained heads that always guess the token 7.

    The draft vocabulary is 7, 8 and 9. Six positions draft:

        position         0  1  2  3  4  5
        written          7  8  7  7  7  3
        target, head 0   8  7  7  7  3  -      right at 1, 2, 3: 3 of 5
        target, head 1   7  7  7  3  -  -      right at 0, 1, 2: 3 of 4; both right at 1, 2: 2 of 4
    """
    one = sample([5], [7, 8, 7, 7, 7, 3])
    view = make_view(folder, [one], [torch.ones(7, 16)])
    lm_head = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    lm_head[7] = 1
    head = plain_head(lm_head)
    return build_heads(head, mask_of([7, 8, 9]), CHOSEN), Positions([one], view, head, CHOSEN)


def test_accuracy_counts_what_the_verifier_wrote_inside_the_draft_vocabulary_or_not(
    tmp_path: Path,
) -> None:
    metrics = evaluate(*guessing(tmp_path))
    assert metrics["accuracy_head_0"] == pytest.approx(3 / 5)
    assert metrics["accuracy_head_1"] == pytest.approx(3 / 4)
    assert metrics["chain_accuracy_0"] == pytest.approx(3 / 5)
    assert metrics["chain_accuracy_1"] == pytest.approx(2 / 4)
    assert metrics["expected_length"] == pytest.approx(1 + 3 / 5 + 2 / 4)
    # the logit of 7 is 16, of 8 and 9 it is 0; token 3 has no loss, so head 0 has four: of 8, 7, 7
    # and 7, and head 1 three, of 7
    normaliser = np.log(np.exp(16) + 2)
    assert metrics["loss_0"] == pytest.approx((normaliser + 3 * (normaliser - 16)) / 4)
    assert metrics["loss_1"] == pytest.approx(normaliser - 16, abs=1e-6)
    assert metrics["loss"] == pytest.approx(metrics["loss_0"] + metrics["loss_1"])


def test_a_token_outside_the_draft_vocabulary_is_no_target(tmp_path: Path) -> None:
    heads, positions = guessing(tmp_path)
    (step,) = positions.in_order()
    assert len(head_losses(heads, 0, step)) == 4
    step.targets[:] = 31  # beyond the last id of the vocabulary
    assert len(head_losses(heads, 0, step)) == 0


def test_held_out_answers_too_short_for_a_head_are_named(tmp_path: Path) -> None:
    one = sample([5], [7, 8])
    view = make_view(tmp_path, [one], [torch.ones(3, 16)])
    head = plain_head(torch.ones(VOCAB_SIZE, HIDDEN_SIZE))
    heads = build_heads(head, np.ones(VOCAB_SIZE, dtype=bool), CHOSEN)
    with pytest.raises(ValueError, match=r"token that head 1 can learn; lower num_heads"):
        evaluate(heads, Positions([one], view, head, CHOSEN))


def test_states_that_do_not_give_the_verifiers_own_tokens_are_refused(tmp_path: Path) -> None:
    """State t is the direction of x_(t+1) but for the last, so 3 of 4 tokens follow."""
    one = sample([5], [7, 8, 9, 10])
    lm_head = torch.eye(16).repeat(2, 1)
    states = torch.eye(16)[[7, 8, 9, 11, 0]]
    view = make_view(tmp_path, [one], [states])
    positions = Positions([one], view, plain_head(lm_head), CHOSEN)
    with pytest.raises(ValueError, match="give 3 of 4 held-out tokens"):
        check_next_tokens(positions, plain_head(lm_head))
    right = plain_head(lm_head.index_copy(0, torch.tensor([10]), lm_head[11:12] * 2))
    assert check_next_tokens(positions, right) == 1


def test_curves_have_one_rounded_row_per_epoch_and_position() -> None:
    first = {"chain_accuracy_0": 0.41236, "chain_accuracy_1": 0.125, "loss_0": 2.00006, "loss_1": 3}
    assert curves([first, first | {"loss_1": 2.5}], 2) == [
        {"epoch": 0, "position": 0, "accuracy": 0.4124, "loss": 2.0001},
        {"epoch": 0, "position": 1, "accuracy": 0.125, "loss": 3},
        {"epoch": 1, "position": 0, "accuracy": 0.4124, "loss": 2.0001},
        {"epoch": 1, "position": 1, "accuracy": 0.125, "loss": 2.5},
    ]


def verifier_head_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-5} | config))
    save_file(
        {
            "model.embed_tokens.weight": torch.zeros(3, 2),
            "model.norm.weight": torch.tensor([1.0, 2.0]),
            "lm_head.weight": torch.ones(3, 2),
        },
        folder / "model.safetensors",
    )
    return folder


def test_the_verifiers_norm_and_lm_head_are_read_in_its_dtype(tmp_path: Path) -> None:
    head = load_verifier_head(verifier_head_folder(tmp_path / "v"), torch.bfloat16, "cpu")
    assert head.norm.tolist() == [1, 2]
    assert head.lm_head.tolist() == 3 * [[1, 1]]
    assert head.norm.dtype == head.lm_head.dtype == torch.bfloat16
    assert head.eps == 1e-5


def test_a_verifier_head_with_another_norm_or_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    folder = verifier_head_folder(tmp_path / "v")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        load_verifier_head(folder, torch.float32, "cpu")
    (folder / "config.json").write_text(json.dumps({"layer_norm_eps": 1e-5}))
    with pytest.raises(ValueError, match="no rms_norm_eps"):
        load_verifier_head(folder, torch.float32, "cpu")


def test_the_full_vocabulary_maps_every_token_to_itself() -> None:
    d2t, t2d = draft_tables()
    assert choose_tables("draft", d2t, t2d) == (d2t, t2d)
    full = choose_tables("full", d2t, t2d)
    assert full[0].tolist() == VOCAB_SIZE * [0]
    assert full[1].tolist() == VOCAB_SIZE * [True]


def exported(folder: Path, vocabulary: str = "draft") -> tuple[Path, MedusaHeads]:
    """Heads with random weights, as the stage exports them."""
    noise = torch.Generator().manual_seed(0)
    lm_head = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=noise).to(torch.bfloat16)
    tables = choose_tables(vocabulary, *draft_tables())
    heads = build_heads(plain_head(lm_head), tables[1], CHOSEN)
    with torch.no_grad():
        for block in heads.blocks:
            block.copy_(torch.randn(block.shape, generator=noise))
    provenance = {
        "verifier": {"name": "tiny", "fingerprint": "f"},
        "vocabulary": tables_digest(*tables),
    }
    export_medusa(heads, VOCAB_SIZE, folder / "head", provenance)
    return folder / "head", heads


@pytest.mark.parametrize(("vocabulary", "size"), [("draft", 4), ("full", 32)])
def test_the_checkpoint_read_as_vllm_reads_it_drafts_what_the_heads_draft(
    tmp_path: Path, vocabulary: str, size: int
) -> None:
    """In numpy, after vLLM's model_executor/models/medusa.py."""
    folder, heads = exported(tmp_path, vocabulary)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    assert config["original_lm_head"] is True
    assert (config["num_heads"], config["num_hidden_layers"]) == (2, 1)
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (32, size)
    assert ("token_map" in weights) == ("quantization_config" in config) == (size < 32)
    lm_head = weights["lm_heads.0.weight"].float().numpy()
    assert lm_head.shape == (size, HIDDEN_SIZE)
    normed = torch.randn(50, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    for head in range(2):
        weight = weights[f"blocks.{head}.layers.0.weight"].float().numpy()
        inner = normed.numpy() @ weight.T
        best = ((normed.numpy() + inner / (1 + np.exp(-inner))) @ lm_head.T).argmax(-1)
        drafted = weights["token_map"].numpy()[best] if size < 32 else best
        ours = heads.token_ids[heads.logits(head, normed).argmax(-1)].numpy()
        assert (drafted == ours).mean() >= 0.9  # bfloat16 decides near ties


def test_weights_that_are_not_finite_are_not_exported(tmp_path: Path) -> None:
    _, heads = exported(tmp_path)
    with torch.no_grad():
        heads.blocks[1][0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"blocks\.1\.layers\.0\.weight holds NaN"):
        export_medusa(heads, VOCAB_SIZE, tmp_path / "other", {})


def served(k: int, head: Path, **verifier: Any) -> dict[str, Any]:
    return speculative_config(k, NoSettings(), head, VERIFIER | verifier)


def test_medusa_takes_k_up_to_the_number_of_heads(tmp_path: Path) -> None:
    head, _ = exported(tmp_path)
    assert served(2, head) == {
        "method": "medusa",
        "model": str(head.absolute()),
        "num_speculative_tokens": 2,
    }
    assert served(1, head)["num_speculative_tokens"] == 1
    with pytest.raises(ValueError, match=r"spec\.tokens or spec\.sweep asks for 3 .* has 2 heads"):
        served(3, head)


def test_heads_over_the_full_vocabulary_need_no_map(tmp_path: Path) -> None:
    head, _ = exported(tmp_path, "full")
    assert served(2, head)["method"] == "medusa"


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ({"hidden_size": 8}, "has hidden_size 16, the verifier 8"),
        ({"vocab_size": 64}, "has vocab_size 32, the verifier 64"),
        ({"fingerprint": "g", "name": "huge"}, "was trained for tiny, not huge"),
    ],
)
def test_heads_of_another_verifier_do_not_fit(
    tmp_path: Path, difference: dict[str, Any], message: str
) -> None:
    head, _ = exported(tmp_path)
    with pytest.raises(DoesNotFit, match=message):
        served(2, head, **difference)


@pytest.mark.parametrize("name", ["lm_heads.0.weight", "blocks.1.layers.0.weight", "token_map"])
def test_a_checkpoint_without_one_of_its_tensors_is_refused(tmp_path: Path, name: str) -> None:
    head, _ = exported(tmp_path)
    weights = load_file(head / "model.safetensors")
    del weights[name]
    save_file(weights, head / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} is None, config.json says"):
        served(2, head)


def test_a_map_that_the_heads_were_not_trained_with_is_refused(tmp_path: Path) -> None:
    head, _ = exported(tmp_path)
    weights = load_file(head / "model.safetensors")
    weights["token_map"] = torch.tensor([1, 7, 8, 30])
    save_file(weights, head / "model.safetensors")
    with pytest.raises(ValueError, match="token_map is not the vocabulary"):
        served(2, head)


def test_a_path_that_vllm_takes_for_another_method_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "Eagle3-tries"
    folder.mkdir()
    head, _ = exported(folder)
    with pytest.raises(ValueError, match="'eagle3' in it for another method's head"):
        served(2, head)
