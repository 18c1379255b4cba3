import json
import math
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3.data import shift_batch
from transformers import LlamaConfig

from specmill import compat
from specmill.draft_types import TYPES
from specmill.head import accuracies, curves, expected_length, export_head
from specmill.params import Train
from specmill.samples import Sample
from specmill.shards import Shard, StateSpec
from specmill.speculator import check_head
from specmill.states import stage
from specmill.store import HiddenStateStore
from specmill.training import build_draft_model, check_vocabulary, train
from specmill.transfer import StoredSamples
from specmill.view import StateView
from specmill.vocab import build_tables, tables_digest
from tests.fakes import sample

VOCAB_SIZE, HIDDEN_SIZE = 32, 16
ANSWER_IDS = [1, 7, 9, 30]
AUX_IDS = [2, 4, 5]
SPEC = StateSpec("f", (*AUX_IDS, 8), HIDDEN_SIZE, "bfloat16")
VERIFIER = {"name": "tiny", "fingerprint": "f", "vocab_size": VOCAB_SIZE}
CHOSEN = Train(
    type="eagle3",
    epochs=2,
    lr=0.02,
    optimizer="adamw",
    warmup_ratio=0.1,
    ttt_steps=2,
    ttt_step_loss_decay=1.0,
    loss="kl_div",
    max_samples=None,
    tokens_per_step=64,
    num_layers=1,
    sliding_window=64,
    norm_before_fc=True,
    norm_output=True,
    seed=3,
)


def make_view(
    folder: Path, samples: list[Sample], states: list[torch.Tensor], spec: StateSpec = SPEC
) -> StateView:
    store = HiddenStateStore(folder / "store")
    with store.writer(spec, 10**6) as writer:
        for number, (one, its_states) in enumerate(zip(samples, states, strict=True)):
            file = folder / f"{number}.safetensors"
            row = stage(file, spec, torch.from_numpy(one.input_ids), its_states)
            writer.add(next(Shard(spec, (row,)).pieces(file)), staged=True)
    store.write_view(folder / "view", spec, [one.sample_key for one in samples], 10**6)
    return StateView(folder / "view")


def stored(
    samples: list[Sample],
    view: StateView,
    max_len: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    endpoints: list[str] | None = None,
) -> StoredSamples:
    """The samples in a folder of their own beside the view."""
    folder = view.folder.parent / f"samples-{len(list(view.folder.parent.iterdir()))}"
    return StoredSamples(samples, view, folder, max_len, dtype, endpoints or [], 60)


def random_samples(count: int) -> tuple[list[Sample], list[torch.Tensor]]:
    """Samples of 4 + 8 tokens, with states that say nothing."""
    generator = np.random.default_rng(0)
    samples = [
        sample(
            generator.integers(0, VOCAB_SIZE, 4).tolist(),
            generator.choice(ANSWER_IDS, 8).tolist(),
        )
        for _ in range(count)
    ]
    noise = torch.Generator().manual_seed(0)
    states = [torch.randn(12, 4, HIDDEN_SIZE, generator=noise).to(torch.bfloat16) for _ in samples]
    return samples, states


@pytest.fixture(scope="module")
def verifier_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What training needs of a verifier, of random weights."""
    folder = tmp_path_factory.mktemp("verifier_head")
    LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    noise = torch.Generator().manual_seed(0)
    save_file(
        {
            "model.embed_tokens.weight": torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=noise),
            "model.norm.weight": torch.ones(HIDDEN_SIZE),
            "lm_head.weight": torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=noise),
        },
        folder / "model.safetensors",
    )
    return folder


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train where the tests run everywhere."""
    monkeypatch.setattr(compat, "device", lambda: "cpu")


@pytest.fixture
def datasets(tmp_path: Path) -> tuple[StoredSamples, StoredSamples]:
    samples, states = random_samples(12)
    view = make_view(tmp_path, samples, states)
    return (
        stored(samples[:8], view),
        stored(samples[8:], view),
    )


def tables() -> tuple[np.ndarray, np.ndarray]:
    return build_tables(Counter(ANSWER_IDS), 4, VOCAB_SIZE)


def new_model(verifier_head: Path, **changes: Any) -> Any:
    chosen = CHOSEN.model_copy(update=changes)
    return build_draft_model(verifier_head, AUX_IDS, *tables(), chosen)


def ten_token_view(folder: Path) -> tuple[Sample, StateView]:
    """x0 ... x9 are 50 ... 59; g_i is [10 i + 1, 10 i + 2] by aux layer and y_i is 10 i + 3."""
    one = sample([50, 51, 52], [53, 54, 55, 56, 57, 58, 59])
    spec = StateSpec("f", (2, 4, 8), hidden_size=1, dtype="float32")
    states = torch.tensor([[[10 * i + 1.0], [10 * i + 2.0], [10 * i + 3.0]] for i in range(10)])
    return one, make_view(folder, [one], [states], spec)


def test_a_stored_sample_has_its_aux_states_joined_and_the_last_layer_apart(
    tmp_path: Path,
) -> None:
    one, view = ten_token_view(tmp_path)
    item = stored([one], view, 64, torch.float32)[0]
    assert item["input_ids"].tolist() == list(range(50, 60))
    assert item["hidden_states"].tolist() == [[10 * i + 1, 10 * i + 2] for i in range(10)]
    assert item["verifier_last_hidden_states"].tolist() == [[10 * i + 3] for i in range(10)]
    assert item["loss_mask"].tolist() == [False] * 3 + [True] * 7


def test_the_shift_pairs_each_token_with_what_the_verifier_knew_when_it_chose_it(
    tmp_path: Path,
) -> None:
    one, view = ten_token_view(tmp_path)
    shifted = shift_batch(stored([one], view, 64, torch.float32)[0])
    for position in range(9):
        # x1 g0 y1, x2 g1 y2 ... x9 g8 y9
        assert shifted["input_ids"][position] == 50 + position + 1
        assert shifted["hidden_states"][position].tolist() == [
            10 * position + 1,
            10 * position + 2,
        ]
        assert shifted["verifier_last_hidden_states"][position].tolist() == [
            10 * (position + 1) + 3
        ]
    assert len(shifted["input_ids"]) == 9
    # the loss at a position counts when its token, x1 ... x9, is the verifier's: x3 is the first
    assert shifted["loss_mask"].tolist() == [False] * 2 + [True] * 7


def test_lengths_are_those_of_the_samples_for_packing(
    datasets: tuple[StoredSamples, StoredSamples],
) -> None:
    training, heldout = datasets
    assert (len(training), training.approx_lengths) == (8, [12] * 8)
    assert (len(heldout), heldout.approx_lengths) == (4, [12] * 4)
    assert not set(training.sample_keys) & set(heldout.sample_keys)


def test_missing_states_are_refused_with_their_number_and_the_first_sample(
    tmp_path: Path,
) -> None:
    samples, states = random_samples(4)
    view = make_view(tmp_path, [samples[0], samples[2]], [states[0], states[2]])
    with pytest.raises(
        ValueError, match=f"states of 2 of 4 samples, the first {samples[1].sample_key[:12]}"
    ):
        stored(samples, view)


@pytest.mark.usefixtures("on_cpu")
def test_a_new_draft_model_has_the_vocabulary_and_layers_that_were_chosen(
    verifier_head: Path,
) -> None:
    d2t, t2d = tables()
    model = new_model(verifier_head)
    assert model.draft_vocab_size == 4
    assert (torch.arange(4) + model.d2t).tolist() == ANSWER_IDS
    assert torch.nonzero(model.t2d).flatten().tolist() == ANSWER_IDS
    assert list(model.target_layer_ids) == AUX_IDS
    assert model.fc.weight.shape == (HIDDEN_SIZE, 3 * HIDDEN_SIZE)
    check_vocabulary(model, d2t, t2d)


def draft_model(**changes: Any) -> Any:
    """What `check_vocabulary` looks at, as it should be unless changed."""
    d2t, t2d = tables()
    parts = {
        "draft_vocab_size": 4,
        "lm_head": SimpleNamespace(weight=torch.zeros(4, 2)),
        "d2t": torch.from_numpy(d2t),
        "t2d": torch.from_numpy(t2d),
    }
    return SimpleNamespace(**(parts | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": VOCAB_SIZE}, "asked for a draft vocabulary of 4, .* has 32"),
        ({"lm_head": SimpleNamespace(weight=torch.zeros(32, 2))}, "asked for a draft vocabulary"),
        ({"d2t": torch.tensor(ANSWER_IDS)}, "d2t is not the one chosen"),
        ({"d2t": None}, "d2t is not the one chosen"),
        ({"t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool)}, "t2d is not the one chosen"),
        ({"t2d": None}, "t2d is not the one chosen"),
    ],
)
def test_a_model_with_another_vocabulary_is_refused(changes: dict[str, Any], message: str) -> None:
    check_vocabulary(draft_model(), *tables())
    with pytest.raises(ValueError, match=message):
        check_vocabulary(draft_model(**changes), *tables())


def test_a_model_with_the_full_vocabulary_needs_no_tables() -> None:
    full = build_tables(Counter(), 4, 4)
    check_vocabulary(draft_model(d2t=None, t2d=None), *full)


def test_expected_length_is_one_plus_the_accuracies_by_position() -> None:
    metrics = {
        "full_acc_0_epoch": 0.5,
        "full_acc_1_epoch": 0.25,
        "cond_acc_0_epoch": 0.5,
        "cond_acc_1_epoch": 0.5,
        "loss_epoch": 3.0,
    }
    assert expected_length(metrics) == 1.75
    assert expected_length({"loss_epoch": 3.0}) == 1


def test_curves_have_one_rounded_row_per_epoch_and_position() -> None:
    epochs = [
        {
            "full_acc_0_epoch": 0.41236,
            "full_acc_1_epoch": 0.125,
            "loss_0_epoch": 2.00006,
            "loss_1_epoch": 3.0,
            "cond_acc_1_epoch": 0.9,
            "loss_epoch": 5.0,
        },
        {
            "full_acc_0_epoch": 0.5,
            "full_acc_1_epoch": 0.25,
            "loss_0_epoch": 1.5,
            "loss_1_epoch": 2.5,
        },
    ]
    assert curves(epochs) == [
        {"epoch": 0, "position": 0, "accuracy": 0.4124, "loss": 2.0001},
        {"epoch": 0, "position": 1, "accuracy": 0.125, "loss": 3.0},
        {"epoch": 1, "position": 0, "accuracy": 0.5, "loss": 1.5},
        {"epoch": 1, "position": 1, "accuracy": 0.25, "loss": 2.5},
    ]


@pytest.mark.usefixtures("on_cpu")
def test_training_reports_every_epoch_and_returns_the_one_with_the_longest_expectation(
    verifier_head: Path, datasets: tuple[StoredSamples, StoredSamples], tmp_path: Path
) -> None:
    reported = []
    best, epochs = train(
        new_model(verifier_head),
        *datasets,
        CHOSEN.model_copy(update={"epochs": 4}),
        tmp_path / "checkpoints",
        lambda epoch, metrics: reported.append((epoch, metrics)),
    )
    assert reported == list(enumerate(epochs))
    assert len(epochs) == 4
    lengths = [1 + one["full_acc_0_epoch"] + one["full_acc_1_epoch"] for one in epochs]
    assert len(set(lengths)) > 1
    assert lengths[int(best.name)] == max(lengths)
    assert (best / "model.safetensors").is_file()


@pytest.mark.usefixtures("on_cpu")
def test_an_epoch_that_was_not_validated_is_trained_again(
    verifier_head: Path, datasets: tuple[StoredSamples, StoredSamples], tmp_path: Path
) -> None:
    chosen = CHOSEN.model_copy(update={"epochs": 1})
    reported = []

    def run(checkpoints: Path) -> list[dict[str, float]]:
        model = new_model(verifier_head)
        return train(
            model, *datasets, chosen, checkpoints, lambda epoch, _: reported.append(epoch)
        )[1]

    whole = run(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "0" / "epoch.json").unlink()
    assert run(tmp_path / "checkpoints") == whole
    assert reported == [0, 0]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("type_", TYPES)
def test_an_interrupted_training_goes_on_and_equals_an_undisturbed_one(
    verifier_head: Path, datasets: tuple[StoredSamples, StoredSamples], tmp_path: Path, type_: str
) -> None:
    chosen = CHOSEN.model_copy(update={"epochs": 3, "optimizer": "muon", "type": type_})
    whole, whole_epochs = train(
        new_model(verifier_head, type=type_), *datasets, chosen, tmp_path / "whole", lambda *_: None
    )

    def interrupt(epoch: int, _: dict[str, float]) -> None:
        if epoch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(new_model(verifier_head, type=type_), *datasets, chosen, tmp_path / "cut", interrupt)
    trained_again = []
    resumed, epochs = train(
        new_model(verifier_head, type=type_),
        *datasets,
        chosen,
        tmp_path / "cut",
        lambda epoch, _: trained_again.append(epoch),
    )
    assert trained_again == [2]
    assert epochs == whole_epochs
    assert resumed.name == whole.name
    last = [folder / "2" / "model.safetensors" for folder in (tmp_path / "whole", tmp_path / "cut")]
    assert last[0].read_bytes() == last[1].read_bytes()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "cut",
    ["model.safetensors", "optimizer_state_dict.pt", "scheduler_state_dict.pt", "epoch.json"],
)
def test_a_checkpoint_that_was_cut_is_recognised_and_the_one_before_it_gone_on_from(
    verifier_head: Path, datasets: tuple[StoredSamples, StoredSamples], tmp_path: Path, cut: str
) -> None:
    chosen = CHOSEN.model_copy(update={"epochs": 3})
    trained: list[int] = []

    def run() -> tuple[Path, list[dict[str, float]]]:
        return train(
            new_model(verifier_head),
            *datasets,
            chosen,
            tmp_path / "kept",
            lambda epoch, _: trained.append(epoch),
        )

    _, whole = run()
    last = (tmp_path / "kept/2/model.safetensors").read_bytes()
    file = tmp_path / "kept/1" / cut
    os.truncate(file, file.stat().st_size // 2)
    assert run()[1] == whole
    assert trained == [0, 1, 2, 1, 2]
    assert (tmp_path / "kept/2/model.safetensors").read_bytes() == last


def test_a_fresh_draft_model_is_drawn_from_the_seed(verifier_head: Path) -> None:
    first, second = new_model(verifier_head), new_model(verifier_head)
    assert torch.equal(first.fc.weight, second.fc.weight)
    other = new_model(verifier_head, seed=CHOSEN.seed + 1)
    assert not torch.equal(first.fc.weight, other.fc.weight)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("type_", "num_samples"), [("eagle3", 40), ("peagle", 40), ("dflash", 120)]
)
@pytest.mark.slow
def test_training_learns_what_only_the_states_of_the_right_position_tell(
    verifier_head: Path, tmp_path: Path, type_: str, num_samples: int
) -> None:
    """Answers are random. g_i tells x_(i+2) and y_i, through the lm_head, x_(i+1): beside the token
    x_(i+1) that the verifier has chosen the draft model is shown the one after it, and would not be
    if anything were shifted by one. Nothing is told of the tokens after that.
    """
    lm_head = load_file(verifier_head / "model.safetensors")["lm_head.weight"]
    generator = np.random.default_rng(1)
    samples, states = [], []
    for _ in range(num_samples + 8):
        tokens = [int(token) for token in generator.choice(ANSWER_IDS, 14)]  # x12, x13 are not kept
        samples.append(sample(tokens[:3], tokens[3:12]))
        its_states = torch.zeros(12, 4, HIDDEN_SIZE)
        its_states[:, 0] = torch.eye(HIDDEN_SIZE)[[ANSWER_IDS.index(x) for x in tokens[2:]]]
        chosen = lm_head[tokens[1:13]]
        its_states[:, 3] = 4 * chosen / chosen.norm(dim=1, keepdim=True)
        states.append(its_states.to(torch.bfloat16))
    view = make_view(tmp_path, samples, states)
    chosen_type = CHOSEN.model_copy(update={"epochs": 4, "type": type_})
    _, epochs = train(
        new_model(verifier_head, type=type_),
        stored(samples[:num_samples], view),
        stored(samples[num_samples:], view),
        chosen_type,
        tmp_path / "checkpoints",
        lambda *_: None,
    )
    first, second = accuracies(epochs[-1])
    assert first > 0.9  # by chance 0.25
    assert second < 0.5  # by chance 0.25 of the first


def make_checkpoint(folder: Path, **weights: torch.Tensor) -> Path:
    """A checkpoint as speculators writes it, as far as exporting looks."""
    d2t, t2d = tables()
    folder.mkdir()
    parts = {
        "d2t": torch.from_numpy(d2t),
        "t2d": torch.from_numpy(t2d),
        "lm_head.weight": torch.ones(4, 2, dtype=torch.bfloat16),
    }
    save_file(parts | weights, folder / "model.safetensors")
    config = {
        "draft_vocab_size": 4,
        "speculators_config": {"verifier": {"name_or_path": str(folder), "architectures": ["L"]}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "optimizer_state_dict.pt").write_bytes(b"large")
    return folder


def test_an_exported_head_names_the_verifier_and_no_path_of_this_machine(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "7")
    provenance = {"verifier": VERIFIER, "vocabulary": tables_digest(*tables())}
    head = tmp_path / "models" / "eagle3"
    export_head(checkpoint, head, "tiny", provenance)
    config = json.loads((head / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "tiny",
        "architectures": ["L"],
    }
    assert config["draft_vocab_size"] == 4
    assert json.loads((head / "provenance.json").read_text()) == provenance
    assert sorted(path.name for path in head.iterdir()) == [
        "config.json",
        "model.safetensors",
        "provenance.json",
    ]
    for path in head.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes()
    assert config["dtype"] == "bfloat16"
    trained = load_file(checkpoint / "model.safetensors")
    exported = load_file(head / "model.safetensors")
    assert exported.keys() == trained.keys()
    for name, weight in trained.items():
        expected = weight.to(torch.bfloat16) if weight.is_floating_point() else weight
        assert torch.equal(exported[name], expected)
    check_head(head, VERIFIER)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_checkpoint_with_a_weight_that_is_no_number_is_not_exported(
    tmp_path: Path, value: float
) -> None:
    bad = torch.ones(3, dtype=torch.bfloat16)
    bad[1] = value
    checkpoint = make_checkpoint(tmp_path / "7", **{"fc.weight": bad})
    with pytest.raises(ValueError, match=r"weight fc\.weight of .* holds NaN or infinity"):
        export_head(checkpoint, tmp_path / "head", "tiny", {})
    assert not (tmp_path / "head" / "model.safetensors").exists()


def test_the_step_timer_is_borrowed_and_given_back_even_after_an_error() -> None:
    before = torch.accelerator.synchronize

    def fail() -> None:
        with compat.trainable_without_accelerator():
            torch.accelerator.synchronize()  # an error without an accelerator, otherwise
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed"):
        fail()
    assert torch.accelerator.synchronize is before


def test_steps_that_leave_a_sample_no_trained_token_are_refused(tmp_path: Path) -> None:
    one, view = ten_token_view(tmp_path)  # three tokens of prompt, seven of answer
    assert len(stored([one], view, 4, torch.float32)) == 1
    with pytest.raises(ValueError, match=r"train\.tokens_per_step is 3, which leaves no trained"):
        stored([one], view, 3, torch.float32)


@pytest.mark.usefixtures("on_cpu")
def test_a_training_that_diverges_ends_and_names_its_learning_rate(
    verifier_head: Path, datasets: tuple[StoredSamples, StoredSamples], tmp_path: Path
) -> None:
    model = new_model(verifier_head)
    with torch.no_grad():
        model.fc.weight.fill_(math.nan)
    with pytest.raises(ValueError, match=r"diverged; lower train\.lr"):
        train(model, *datasets, CHOSEN, tmp_path / "checkpoints", lambda *_: None)
