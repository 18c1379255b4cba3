"""The siblings of EAGLE-3: what is built, what its held-out figures mean, and how it is served."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file

from specmill import compat, paths
from specmill.draft_types import TYPES, mask_token
from specmill.files import read_json, write_json
from specmill.head import accuracies, curves, expected_length
from specmill.methods import METHODS
from specmill.params_heads import HeadType, Sibling
from specmill.samples import write_samples
from specmill.section import NoSettings
from specmill.train_head import train_head
from specmill.vocab import save_tables
from tests.test_training import (
    ANSWER_IDS,
    AUX_IDS,
    CHOSEN,
    VERIFIER,
    make_view,
    new_model,
    random_samples,
    tables,
    verifier_head,
)

__all__ = ["verifier_head"]  # a fixture


def test_every_type_that_params_allow_is_one_and_is_served_by_a_method_of_its_name() -> None:
    assert set(get_args(HeadType)) == set(TYPES)
    assert set(TYPES) <= set(METHODS)


def test_a_p_eagle_head_has_a_state_to_learn_for_tokens_without_one(verifier_head: Path) -> None:
    model = new_model(verifier_head, type="peagle", ttt_steps=3)
    assert model.mask_hidden.shape == (1, 1, model.fc.in_features)
    assert model.mask_hidden.requires_grad
    assert model.embed_tokens.weight.requires_grad
    assert list(model.target_layer_ids) == AUX_IDS
    assert model.config.mask_token_id == mask_token(verifier_head)


def test_a_dflash_block_holds_the_verifiers_token_and_those_to_draft(verifier_head: Path) -> None:
    model = new_model(verifier_head, type="dflash", ttt_steps=3, num_layers=2)
    assert model.block_size == 4
    assert len(model.layers) == 2
    assert not model.embed_tokens.weight.requires_grad  # served from the verifier's own
    assert list(model.target_layer_ids) == AUX_IDS
    assert (torch.arange(4) + model.d2t).tolist() == ANSWER_IDS


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pad_token_id": 7, "eos_token_id": 2}, 7),
        ({"pad_token_id": None, "eos_token_id": [3, 4]}, 3),
        ({"eos_token_id": 0}, 0),
        ({"text_config": {"pad_token_id": 5}, "pad_token_id": 6}, 5),
    ],
)
def test_drafts_are_masked_with_padding_or_else_with_the_end_of_text(
    tmp_path: Path, config: dict[str, Any], expected: int
) -> None:
    write_json(tmp_path / "config.json", config)
    assert mask_token(tmp_path) == expected


def test_a_verifier_without_such_a_token_is_refused_with_a_way_out(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"vocab_size": 10})
    with pytest.raises(ValueError, match=r"names no pad_token_id .* train\.type eagle3 needs none"):
        mask_token(tmp_path)


def test_accuracies_of_positions_alone_are_multiplied() -> None:
    peagle = {
        "position_1_acc_epoch": 0.5,
        "position_0_acc_epoch": 0.8,
        "position_2_acc_epoch": 0.25,
        "full_acc_epoch": 0.6,  # over all positions
        "loss_epoch": 2.0,
    }
    assert accuracies(peagle) == pytest.approx([0.8, 0.4, 0.1])
    assert expected_length(peagle) == pytest.approx(2.3)
    assert curves([peagle]) == [
        {"epoch": 0, "position": 0, "accuracy": 0.8, "loss": 2.0},
        {"epoch": 0, "position": 1, "accuracy": 0.4, "loss": 2.0},
        {"epoch": 0, "position": 2, "accuracy": 0.1, "loss": 2.0},
    ]


def test_dflash_counts_the_length_itself_and_its_first_draft_is_position_0() -> None:
    dflash = {
        "position_1_acc_epoch": 0.5,
        "position_2_acc_epoch": 0.5,
        "full_acc_epoch": 0.5,
        "eal_epoch": 1.9,  # 1 + 0.5 + 0.4: positions agree together
        "loss_epoch": 2.0,
    }
    assert accuracies(dflash) == [0.5, 0.25]
    assert expected_length(dflash) == 1.9
    assert [row["position"] for row in curves([dflash])] == [0, 1]


def test_more_than_ten_positions_keep_their_order() -> None:
    metrics = {f"full_acc_{i}_epoch": 1 - i / 20 for i in (10, 2, 11, *range(2), *range(3, 10))}
    assert accuracies(metrics) == [1 - i / 20 for i in range(12)]


@pytest.fixture
def workspace(tmp_path: Path, verifier_head: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with all that training reads: 8 samples, 4 of them held out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compat, "device", lambda: "cpu")
    monkeypatch.setattr(paths, "CACHE", tmp_path / ".cache")
    samples, states = random_samples(12)
    make_view(tmp_path, samples, states)
    paths.HIDDEN_STATES.parent.mkdir()
    (tmp_path / "view").rename(paths.HIDDEN_STATES)
    write_samples(paths.PREPARED / "train.parquet", samples[:8])
    write_samples(paths.PREPARED / "heldout.parquet", samples[8:])
    save_tables(paths.VOCAB, *tables())
    paths.VERIFIER_HEAD.mkdir()
    for file in verifier_head.iterdir():
        (paths.VERIFIER_HEAD / file.name).symlink_to(file)
    write_json(paths.HEAD_IDENTITY, VERIFIER | {"dtype": "bfloat16"})
    return tmp_path


def a_stage() -> Any:
    runtime = SimpleNamespace(extract_endpoints=[], request_timeout_s=60, data_workers=0)
    return SimpleNamespace(
        params=SimpleNamespace(runtime=runtime),
        log_epoch=lambda *_: None,
        write_metrics=write_json,
    )


SERVED: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "dflash": {"method": "dflash"},
}


@pytest.mark.parametrize("type_", TYPES)
def test_a_trained_head_is_portable_served_by_its_own_method_and_refused_by_the_others(
    workspace: Path, type_: str
) -> None:
    sibling = Sibling.model_validate(
        {"type": type_, "epochs": 2, "lr": 0.01, "num_layers": 1, "max_samples": 6}
    )
    chosen = CHOSEN.model_copy(update=sibling.model_dump() | {"ttt_steps": 3})
    head = Path("models/siblings/one")
    train_head(a_stage(), chosen, head, Path("plots.json"), Path("metrics.json"))
    assert list((workspace / ".cache" / "checkpoints").iterdir()) == []
    metrics = read_json(Path("metrics.json"))
    assert metrics["num_samples"] == 6
    assert metrics["num_epochs"] == 2
    assert {(row["epoch"], row["position"]) for row in read_json(Path("plots.json"))} == {
        (epoch, position) for epoch in range(2) for position in range(3)
    }
    provenance = read_json(head / "provenance.json")
    assert (provenance["method"], provenance["params"]["lr"]) == (type_, 0.01)
    assert str(workspace) not in (head / "config.json").read_text()
    config = read_json(head / "config.json")
    assert config["speculators_config"]["verifier"]["name_or_path"] == "tiny"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    weights = load_file(head / "model.safetensors")
    assert ("embed_tokens.weight" in weights) == (type_ != "dflash")
    assert ("mask_hidden" in weights) == (type_ == "peagle")

    make = METHODS[type_].speculative_config
    assert make(2, NoSettings(), head, VERIFIER) == SERVED[type_] | {
        "model": str(workspace / head),
        "num_speculative_tokens": 2,
    }
    with pytest.raises(ValueError, match="at most 3"):
        make(4, NoSettings(), head, VERIFIER)
    for other in {"peagle", "dflash"} - {type_}:
        with pytest.raises(ValueError, match=f"serve it with method {type_}"):
            METHODS[other].speculative_config(2, NoSettings(), head, VERIFIER)


def test_a_training_that_goes_on_finds_its_samples_and_its_epochs(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = CHOSEN.model_copy(update={"type": "peagle", "epochs": 2})
    stage, reported = a_stage(), []

    def stop(epoch: int, _: dict[str, float]) -> None:
        reported.append(epoch)
        if reported == [0]:
            raise KeyboardInterrupt

    stage.log_epoch = stop
    outputs = Path("head"), Path("plots.json"), Path("metrics.json")
    with pytest.raises(KeyboardInterrupt):
        train_head(stage, chosen, *outputs)
    samples = {
        file: file.stat().st_mtime_ns
        for file in (workspace / ".cache").rglob("*.arrow")
        if file.is_file()
    }
    assert len(samples) == 2
    left = {}
    monkeypatch.setattr(
        "specmill.train_head.export_head",
        lambda *_: left.update({file: file.stat().st_mtime_ns for file in samples}),
    )
    train_head(stage, chosen, *outputs)
    assert left == samples
    assert reported == [0, 1]
    assert json.loads(Path("metrics.json").read_text())["num_epochs"] == 2
