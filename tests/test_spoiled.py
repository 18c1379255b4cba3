import json
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specmill import compat
from specmill.head import export_head
from specmill.params import Train
from specmill.params_heads import SpoiledHead
from specmill.spoiled import FAULTS, shuffled_d2t, spoil
from specmill.training import build_draft_model
from specmill.vocab import build_tables
from tests.test_training import AUX_IDS, CHOSEN, HIDDEN_SIZE, VOCAB_SIZE, verifier_head

__all__ = ["verifier_head"]  # a fixture

ANSWER_IDS = [1, 7, 9, 12, 13, 20, 30, 31]
VERIFIER = {"name": "tiny", "fingerprint": "f1", "chat_template": "c1"}


@pytest.fixture
def head(verifier_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An untrained head of two layers, exported as train does."""
    monkeypatch.setattr(compat, "device", lambda: "cpu")
    chosen: Train = CHOSEN.model_copy(update={"num_layers": 2})
    d2t, t2d = build_tables(Counter(ANSWER_IDS), len(ANSWER_IDS), VOCAB_SIZE)
    build_draft_model(verifier_head, AUX_IDS, d2t, t2d, chosen).save_pretrained(tmp_path / "made")
    provenance = {"method": "eagle3", "verifier": VERIFIER, "data": "d1", "vocabulary": "v1"}
    export_head(tmp_path / "made", tmp_path / "head", "tiny", provenance)
    return tmp_path / "head"


def spoiled(head: Path, fault: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    folder = head.parent / fault
    spoil(head, folder, fault)
    config = json.loads((folder / "config.json").read_text())
    return load_file(folder / "model.safetensors"), config


def changed(head: Path, weights: dict[str, torch.Tensor]) -> set[str]:
    """Names of weights that are not as they were."""
    before = load_file(head / "model.safetensors")
    assert weights.keys() == before.keys()
    return {name for name, weight in weights.items() if not torch.equal(weight, before[name])}


def test_every_fault_that_can_be_asked_for_is_there() -> None:
    assert set(get_args(SpoiledHead.model_fields["fault"].annotation)) == set(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoiled_head_is_the_same_every_time(head: Path, fault: str) -> None:
    spoiled(head, fault)
    again = head.parent / "again"
    spoil(head, again, fault)
    for file in ("model.safetensors", "config.json", "provenance.json"):
        assert (again / file).read_bytes() == (head.parent / fault / file).read_bytes()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_provenance_says_what_was_done_and_no_digest_gives_it_away(
    head: Path, fault: str
) -> None:
    spoiled(head, fault)
    provenance = json.loads((head.parent / fault / "provenance.json").read_text())
    assert provenance == {
        "method": "eagle3",
        "spoiled": fault,
        "trained_for": "tiny",
        "verifier": VERIFIER,
    }


def test_a_head_of_another_type_is_not_spoiled(head: Path) -> None:
    (head / "provenance.json").write_text(json.dumps({"method": "dflash", "verifier": VERIFIER}))
    with pytest.raises(ValueError, match=r"is a head of train\.type dflash"):
        spoil(head, head.parent / "spoiled", "random_layer")
    assert not (head.parent / "spoiled").exists()


def test_a_shuffled_d2t_still_reaches_the_same_target_ids_in_another_order(head: Path) -> None:
    weights, _ = spoiled(head, "shuffled_d2t")
    assert changed(head, weights) == {"d2t"}
    assert weights["d2t"].dtype == torch.int64
    target_ids = (torch.arange(8) + weights["d2t"]).tolist()
    assert sorted(target_ids) == ANSWER_IDS
    assert target_ids != ANSWER_IDS
    assert torch.nonzero(weights["t2d"]).flatten().tolist() == ANSWER_IDS


def test_a_head_with_the_full_vocabulary_has_no_d2t_to_shuffle() -> None:
    with pytest.raises(ValueError, match=r"no d2t to shuffle.*vocab\.draft_vocab_size"):
        shuffled_d2t({"lm_head.weight": torch.ones(2, 2)}, {})


def test_shifted_aux_layers_are_one_deeper_and_the_weights_stay(head: Path) -> None:
    before = json.loads((head / "config.json").read_text())
    weights, config = spoiled(head, "shifted_aux_layers")
    assert changed(head, weights) == set()
    assert AUX_IDS == [2, 4, 5]
    assert config == before | {"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}


def test_a_random_layer_is_drawn_as_a_new_one_is(head: Path) -> None:
    weights, config = spoiled(head, "random_layer")
    matrices = {
        f"layers.{layer}.{name}.weight"
        for layer in (0, 1)
        for name in (
            *(f"self_attn.{part}_proj" for part in "qkvo"),
            *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
        )
    }
    assert changed(head, weights) == matrices
    assert config == json.loads((head / "config.json").read_text())
    drawn = torch.cat([weights[name].float().flatten() for name in sorted(matrices)])
    # 7,168 values or so: their deviation is known to 1 in 120
    assert drawn.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(drawn.mean().item()) < 0.001


def test_a_head_of_the_wrong_width_has_the_shapes_of_a_head_for_a_narrower_verifier(
    head: Path, verifier_head: Path, tmp_path: Path
) -> None:
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    config = json.loads((verifier_head / "config.json").read_text())
    half = HIDDEN_SIZE // 2
    (narrow / "config.json").write_text(json.dumps(config | {"hidden_size": half}))
    save_file(
        {
            "model.embed_tokens.weight": torch.ones(VOCAB_SIZE, half),
            "model.norm.weight": torch.ones(half),
            "lm_head.weight": torch.ones(VOCAB_SIZE, half),
        },
        narrow / "model.safetensors",
    )
    tables = build_tables(Counter(ANSWER_IDS), len(ANSWER_IDS), VOCAB_SIZE)
    chosen = CHOSEN.model_copy(update={"num_layers": 2})
    made = build_draft_model(narrow, AUX_IDS, *tables, chosen)
    expected = {name: tuple(weight.shape) for name, weight in made.state_dict().items()}
    weights, config = spoiled(head, "wrong_width")
    assert config["transformer_layer_config"]["hidden_size"] == half
    for name, weight in weights.items():
        assert tuple(weight.shape) == expected[name], name


def test_every_state_before_fc_is_cut_in_half(head: Path) -> None:
    whole = load_file(head / "model.safetensors")["fc.weight"].float().numpy()
    narrow = spoiled(head, "wrong_width")[0]["fc.weight"].float().numpy()
    # 16 outputs, 3 aux states of 16: the first 8 of each
    columns = [*range(8), *range(16, 24), *range(32, 40)]
    assert np.array_equal(narrow, whole[:8, columns])
