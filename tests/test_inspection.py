import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from specmill import compat
from specmill.files import read_json, write_json
from specmill.head_checks import Shapes, aux_ids_of, differences, misfits, rope_of
from specmill.head_facts import head_facts, trained_for
from specmill.inspection import inspect_head, mapping_fault
from specmill.offline import Drafts, clearly_more, expected_shapes, load_draft_model
from specmill.random_tensors import distance_from_drawn, looks_drawn
from specmill.samples import Sample
from specmill.section import DoesNotFit
from specmill.shards import StateSpec
from specmill.view import StateView
from specmill.vocab import build_tables
from tests.fakes import sample
from tests.test_training import make_view

VOCAB_SIZE, WIDTH, AUX_IDS = 32, 16, [2, 4, 5]
ANSWER_IDS = [1, 7, 9, 30]
D2T, T2D = build_tables(Counter(ANSWER_IDS), 4, VOCAB_SIZE)
SPEC = StateSpec("f1", (*AUX_IDS, 8), WIDTH, "float32")
VERIFIER = {
    "name": "tiny",
    "fingerprint": "f1",
    "hidden_size": WIDTH,
    "num_layers": 8,
    "vocab_size": VOCAB_SIZE,
    "dtype": "float32",
    "max_model_len": 64,
}
DECODER = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFIG: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 4,
    "eagle_aux_hidden_state_layer_ids": AUX_IDS,
    "norm_before_residual": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 2}],
        "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": DECODER,
}


def plain_weights() -> dict[str, torch.Tensor]:
    """A head whose draft id is the place, 0 to 3, of the largest value of the first aux state: fc
    copies that state, the decoder layer hardly adds to it, and lm_head reads its first four values.
    """
    almost_nothing = 1e-6
    first_state = torch.zeros(WIDTH, 3 * WIDTH)
    first_state[:, :WIDTH] = torch.eye(WIDTH)
    layer = {
        "self_attn.q_proj": torch.ones(16, 32),
        "self_attn.k_proj": torch.ones(8, 32),
        "self_attn.v_proj": torch.ones(8, 32),
        "self_attn.o_proj": torch.full((16, 16), almost_nothing),
        "mlp.gate_proj": torch.ones(8, 16),
        "mlp.up_proj": torch.ones(8, 16),
        "mlp.down_proj": torch.full((16, 8), almost_nothing),
        "hidden_norm": torch.ones(WIDTH),
        "input_layernorm": torch.ones(WIDTH),
        "post_attention_layernorm": torch.ones(WIDTH),
    }
    return {
        "fc.weight": first_state,
        **{f"layers.0.{name}.weight": weight for name, weight in layer.items()},
        "norm.weight": torch.ones(WIDTH),
        "lm_head.weight": torch.eye(4, WIDTH),
        "d2t": torch.from_numpy(D2T),
        "t2d": torch.from_numpy(T2D),
    }


def write_head(
    folder: Path,
    weights: dict[str, torch.Tensor | None] | None = None,
    config: dict[str, Any] | None = None,
    provenance: dict[str, Any] | None = None,
) -> Path:
    """The plain head with some of it changed; None takes a tensor out."""
    folder.mkdir()
    changed = plain_weights() | (weights or {})
    kept = {name: weight for name, weight in changed.items() if weight is not None}
    save_file(kept, folder / "model.safetensors")
    write_json(folder / "config.json", CONFIG | (config or {}))
    if provenance:
        write_json(folder / "provenance.json", provenance)
    return folder


@pytest.fixture(scope="module")
def verifier_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verifier_head")
    LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    noise = torch.Generator().manual_seed(0)
    save_file(
        {"model.embed_tokens.weight": torch.randn(VOCAB_SIZE, WIDTH, generator=noise)},
        folder / "model.safetensors",
    )
    return folder


def greedy_samples() -> list[Sample]:
    """12 samples: 3 prompt tokens and 9 answer tokens, of which the first is never drafted."""
    generator = np.random.default_rng(0)
    return [
        sample([20 + number, 3, 4], generator.permutation(np.repeat(ANSWER_IDS, 3))[:9].tolist())
        for number in range(11)
    ]


def states_that_tell(samples: list[Sample], layer: int, wrong: set[int]) -> list[torch.Tensor]:
    """States of which one aux layer names the token after next, by its draft id.

    Args:
        samples: 12 tokens each.
        layer: Place of that layer in the stored ones.
        wrong: Positions, the same in every sample, where it names another.
    """
    told = []
    for one in samples:
        states = torch.full((12, 4, WIDTH), 0.5)
        for position in range(10):
            token = int(one.input_ids[position + 2])
            if token in ANSWER_IDS:
                place = (ANSWER_IDS.index(token) + (position in wrong)) % 4
                states[position, layer, place] = 4.0
        told.append(states)
    return told


def view_of(folder: Path, layer: int = 0, wrong: Iterable[int] = ()) -> StateView:
    samples = greedy_samples()
    folder.mkdir()
    return make_view(folder, samples, states_that_tell(samples, layer, set(wrong)), SPEC)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> StateView:
    """States of layers 2, 4, 5 and 8, the first of which tells every draft."""
    return view_of(tmp_path_factory.mktemp("view") / "states")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "device", lambda: "cpu")


def inspect(head: Path, view: StateView, verifier_head: Path, **verifier: Any) -> dict[str, Any]:
    return inspect_head(head, VERIFIER | verifier, verifier_head, view, greedy_samples())


def test_offline_acceptance_counts_drafts_that_equal_the_token_the_verifier_wrote(
    tmp_path: Path, verifier_head: Path
) -> None:
    # drafted are answer tokens 1 to 8, sample tokens 4 to 11, from states 2 to 9: two are wrong
    view = view_of(tmp_path / "states", wrong={2, 9})
    found = inspect(write_head(tmp_path / "head"), view, verifier_head)
    assert found == {
        "trained_for": "tiny",
        "run_on": "tiny",
        "refused": None,
        "findings": None,
        "offline": {
            "acceptance_rate_pos_0": 0.75,  # 6 of 8
            "num_positions": 11 * 8,
            "layer_ids": AUX_IDS,
        },
    }


def test_states_of_the_prompt_and_of_the_answers_first_token_are_not_counted(
    tmp_path: Path, verifier_head: Path
) -> None:
    view = view_of(tmp_path / "states", wrong={0, 1})
    found = inspect(write_head(tmp_path / "head"), view, verifier_head)
    assert found["offline"]["acceptance_rate_pos_0"] == 1.0


def test_a_shuffled_d2t_is_named_with_what_its_order_would_give(
    tmp_path: Path, verifier_head: Path, view: StateView
) -> None:
    targets = torch.tensor([7, 9, 30, 1])  # each draft id stands for the next one's token
    head = write_head(tmp_path / "head", {"d2t": targets - torch.arange(4)})
    found = inspect(head, view, verifier_head)
    assert found["offline"]["acceptance_rate_pos_0"] == 0.0
    assert found["findings"]["mapping"].startswith(
        "d2t was shuffled or lost: 0.0% of first drafts are right, and 100.0% with d2t made from"
    )


def test_ids_of_layers_that_are_stored_but_not_meant_are_named(
    tmp_path: Path, verifier_head: Path, view: StateView
) -> None:
    # asked for 4, 5 and 8: the first, 4, tells nothing, and 2 tells all
    head = write_head(tmp_path / "head", config={"eagle_aux_hidden_state_layer_ids": [4, 5, 8]})
    found = inspect(head, view, verifier_head)
    assert found["offline"]["layer_ids"] == [4, 5, 8]
    assert found["findings"].keys() == {"aux_layers"}
    assert found["findings"]["aux_layers"].startswith(
        "100.0% of first drafts are right on states of layers [2, 4, 5], and "
    )


def test_ids_of_layers_that_are_not_stored_leave_no_figure_but_a_hint(
    tmp_path: Path, verifier_head: Path, view: StateView
) -> None:
    head = write_head(tmp_path / "head", config={"eagle_aux_hidden_state_layer_ids": [3, 5, 6]})
    found = inspect(head, view, verifier_head)
    assert found["offline"] is None
    assert "config asks for [3, 5, 6], which are not stored" in found["findings"]["aux_layers"]
    # where the stored layers tell nothing either, there is nothing to hint at
    silent = view_of(tmp_path / "silent", layer=3)
    assert inspect(head, silent, verifier_head)["findings"] is None


def test_layers_are_fed_rising_as_vllm_feeds_them(
    tmp_path: Path, verifier_head: Path, view: StateView
) -> None:
    head = write_head(tmp_path / "head", config={"eagle_aux_hidden_state_layer_ids": [5, 4, 2]})
    found = inspect(head, view, verifier_head)
    assert found["offline"]["acceptance_rate_pos_0"] == 1.0
    assert "lists its layers as [5, 4, 2]" in found["findings"]["aux_order"]


def test_the_other_place_of_the_residual_is_tried(
    tmp_path: Path, verifier_head: Path, view: StateView
) -> None:
    # before the residual this norm turns every sign, and the largest value becomes the least
    negative = {"layers.0.hidden_norm.weight": -torch.ones(WIDTH)}
    head = write_head(tmp_path / "head", negative, {"norm_before_residual": True})
    found = inspect(head, view, verifier_head)
    assert found["offline"]["acceptance_rate_pos_0"] == 0.0
    assert found["findings"].keys() == {"norm_before_residual"}
    assert (
        "norm_before_residual True, as it is served, and 100.0% with False"
        in (found["findings"]["norm_before_residual"])
    )


def test_a_head_no_better_than_the_most_frequent_token_is_told(
    tmp_path: Path, verifier_head: Path
) -> None:
    found = inspect(write_head(tmp_path / "head"), view_of(tmp_path / "s", layer=1), verifier_head)
    assert found["findings"].keys() == {"chance"}
    counted = Counter(token for one in greedy_samples() for token in one.answer_token_ids[1:])
    most = counted.most_common(1)[0][1] / 88
    assert f"the most frequent token would give {most:.1%}" in found["findings"]["chance"]


def test_a_head_of_the_whole_vocabulary_is_run_without_a_mapping(
    tmp_path: Path, verifier_head: Path, view: StateView
) -> None:
    rows = torch.full((VOCAB_SIZE, WIDTH), -1.0)
    rows[ANSWER_IDS] = torch.eye(4, WIDTH)
    weights = {"lm_head.weight": rows, "d2t": None, "t2d": None}
    head = write_head(tmp_path / "head", weights, {"draft_vocab_size": VOCAB_SIZE})
    found = inspect(head, view, verifier_head)
    assert (found["refused"], found["offline"]["acceptance_rate_pos_0"]) == (None, 1.0)


@pytest.mark.parametrize(
    ("weights", "config", "reason"),
    [
        ({"fc.weight": torch.ones(16, 24)}, {}, "fc takes 24 values a token, as of a model of hid"),
        (
            {},
            {"eagle_aux_hidden_state_layer_ids": [2, 4]},
            "takes 48 values .* 2 layers .* give 32",
        ),
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, r"\[2, 4, 9\], .* the ids 0 to 8"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 4, 4]}, "takes 48 .* 2 layers .* give 32"),
        ({"d2t": None}, {}, "drafts 4 of 32 tokens and has no d2t"),
        ({"norm.weight": None}, {}, r"lacks norm\.weight, which vLLM would serve uninitialised"),
        ({"layers.0.x": torch.ones(2)}, {}, r"no place for its layers\.0\.x"),
        ({"lm_head.weight": torch.ones(5, 16)}, {}, r"lm_head\.weight is \(5, 16\), .* \(4, 16\)"),
        ({"norm.weight": torch.full((WIDTH,), torch.nan)}, {}, r"NaN or infinity in norm\.weight"),
        ({"d2t": torch.tensor([0, 0, 0, 29])}, {}, "ids outside the verifier's 0 to 31"),
        ({}, {"speculators_model_type": "dflash"}, "a head of kind dflash, not eagle3"),
        ({}, {"norm_before_fc": True}, r"lacks input_norm\.weight"),
        ({}, {"norm_before_fc": True, "fc_norm": True}, "its config makes no head"),
        ({}, {"transformer_layer_config": DECODER | {"vocab_size": 31}}, "knows no id from 31 on"),
    ],
)
def test_a_head_that_cannot_be_served_is_refused_with_the_reason(
    tmp_path: Path,
    verifier_head: Path,
    view: StateView,
    weights: dict[str, torch.Tensor | None],
    config: dict[str, Any],
    reason: str,
) -> None:
    head = write_head(tmp_path / "head", weights, config)
    found = inspect(head, view, verifier_head)
    assert (found["offline"], found["findings"]) == (None, None)
    assert re.search(reason, found["refused"])


def test_all_reasons_are_told_at_once() -> None:
    shapes: Shapes = {"fc.weight": (8, 24), "lm_head.weight": (4, 8)}
    config = CONFIG | {"transformer_layer_config": DECODER | {"hidden_size": 8, "vocab_size": 20}}
    found = misfits(config, shapes, shapes, VERIFIER)
    assert found == [
        "its fc takes 24 values a token, as of a model of hidden size 8, and 3 layers of tiny "
        "(hidden size 16) give 48",
        "it is 8 wide and brings no embeddings of its own; those of tiny are 16",
        "its vocabulary has 20 tokens and that of tiny 32: it was made for another tokenizer and "
        "knows no id from 20 on",
        "it drafts 4 of 20 tokens and has no d2t, so vLLM would read draft id i as token i; where "
        "it has t2d, d2t is nonzero(t2d) - arange",
    ]


@pytest.mark.parametrize(
    ("d2t", "t2d", "fault"),
    [
        (D2T, T2D, None),
        (D2T, None, None),
        (np.array(ANSWER_IDS), T2D, "outside"),
        (np.array([0, 0, 0, 0]), T2D, "d2t is all zeros"),
        (np.array([7, 0, 7, 27]), T2D, "disagree on 2 of 4"),
        (D2T, np.ones(VOCAB_SIZE, dtype=bool), "t2d marks 32 tokens and the head drafts 4"),
    ],
)
def test_a_mapping_that_contradicts_itself_is_described(
    d2t: np.ndarray, t2d: np.ndarray | None, fault: str | None
) -> None:
    if fault == "outside":  # 3 + 30 = 33
        with pytest.raises(DoesNotFit, match="outside the verifier's 0 to 31"):
            mapping_fault(d2t, t2d, VOCAB_SIZE)
        assert "holds target ids" in str(mapping_fault(d2t, t2d, VOCAB_SIZE + 2))
    elif fault:
        assert fault in str(mapping_fault(d2t, t2d, VOCAB_SIZE))
    else:
        assert mapping_fault(d2t, t2d, VOCAB_SIZE) is None


def test_what_differs_without_being_wrong_is_told() -> None:
    assert differences(CONFIG, DECODER, VERIFIER) == {}
    assert rope_of({"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 64}}) == {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 64,
    }
    assert rope_of({"rope_theta": 1e4, "rope_scaling": None}) == rope_of({}) == rope_of(DECODER)
    found = differences(CONFIG, DECODER | {"rope_parameters": {"rope_theta": 100000.0}}, VERIFIER)
    assert found.keys() == {"rope"}
    assert (
        "is type default, theta 10000.0, the verifier's type default, theta 100000.0"
        in (found["rope"])
    )
    long = differences(CONFIG, DECODER, VERIFIER | {"max_model_len": 129, "vocab_size": 31})
    assert long.keys() == {"positions", "vocabulary"}
    assert "knows 128 positions, and engines are started with 129" in long["positions"]


def test_a_head_that_names_no_layers_gets_the_default_ones() -> None:
    assert aux_ids_of({}, 30) == aux_ids_of({"eagle_aux_hidden_state_layer_ids": None}, 30)
    assert aux_ids_of({}, 30) == [2, 15, 27]


def drawn(shape: tuple[int, int], kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.empty(shape)
    if kind == "uniform":
        weight.uniform_(-0.3, 0.3, generator=generator)
    elif kind == "cut":
        torch.nn.init.trunc_normal_(weight, std=0.02, a=-0.02, b=0.02, generator=generator)
    else:
        weight.normal_(0, 0.02, generator=generator)
    return weight.to(torch.bfloat16)


@pytest.mark.parametrize("kind", ["normal", "uniform", "cut"])
@pytest.mark.parametrize("shape", [(128, 576), (576, 128), (300, 200)])
@pytest.mark.slow
def test_matrices_as_they_were_drawn_look_so(shape: tuple[int, int], kind: str) -> None:
    distances = [distance_from_drawn(drawn(shape, kind, seed)) for seed in range(5)]
    assert max(distances) < 4.5


@pytest.mark.parametrize("change", ["direction", "rows", "columns"])
@pytest.mark.slow
def test_a_matrix_that_training_touched_does_not_look_drawn(change: str) -> None:
    weight = drawn((256, 384), "normal", 1).float()
    if change == "direction":  # a rank-one step as large as twice the noise's edge
        edge = 0.02 * (math.sqrt(256) + math.sqrt(384))
        left, right = torch.ones(256) / 16, torch.ones(384) / math.sqrt(384)
        weight = weight + 2 * edge * torch.outer(left, right)
    elif change == "rows":  # some outputs matter more
        weight[:64] *= 1.5
    else:
        weight[:, :96] *= 1.5
    assert not looks_drawn(weight)


def test_matrices_too_small_to_tell_and_orthogonal_ones_do_not_look_drawn() -> None:
    assert not looks_drawn(drawn((127, 400), "normal", 2))
    assert not looks_drawn(drawn((16384, 1), "normal", 2)[:, 0])
    orthogonal = torch.linalg.qr(drawn((256, 256), "normal", 2).float())[0]
    assert not looks_drawn(orthogonal)


def test_drawn_and_zero_tensors_are_named(tmp_path: Path, verifier_head: Path) -> None:
    decoder = DECODER | {"hidden_size": 128, "intermediate_size": 256}
    head = write_head(tmp_path / "head", config={"transformer_layer_config": decoder})
    weights = {name: torch.ones(shape) for name, shape in expected_shapes(head).items()}
    weights |= {name: tensor for name, tensor in plain_weights().items() if name in ("d2t", "t2d")}
    weights["lm_head.weight"] = torch.zeros(4, 128)
    weights["layers.0.mlp.up_proj.weight"] = drawn((256, 128), "normal", 3).float()
    save_file(weights, head / "model.safetensors")
    online: Any = SimpleNamespace(online=True)  # no states are kept
    found = inspect(head, online, verifier_head, hidden_size=128)
    assert (found["refused"], found["offline"]) == (None, None)
    assert found["findings"].keys() == {"zeros", "drawn"}
    assert found["findings"]["zeros"].startswith("all zeros: lm_head.weight;")
    assert "values: layers.0.mlp.up_proj.weight;" in found["findings"]["drawn"]


def test_clearly_more_is_three_standard_errors_of_the_positions_that_differ() -> None:
    def hits(*right: int) -> torch.Tensor:
        return torch.tensor([bool(one) for one in right])

    ten = [1] * 10
    assert clearly_more(hits(*ten), hits(*[0] * 10))  # 10 > 3 sqrt(10) = 9.49
    assert not clearly_more(hits(*ten[:8]), hits(*[0] * 8))  # 8 < 8.49
    # 10 gained and 1 lost: 9 < 3 sqrt(11); positions where both are right change nothing
    assert not clearly_more(hits(*ten, 0, 1, 1), hits(*[0] * 10, 1, 1, 1))
    assert not clearly_more(hits(*[0] * 10), hits(*ten))


def test_hits_add_the_offset_of_the_draft_id() -> None:
    drafts = Drafts(torch.tensor([0, 1, 3, 3]), torch.tensor([1, 7, 30, 9]))
    assert drafts.hits(torch.from_numpy(D2T)).tolist() == [True, True, True, False]
    assert drafts.hits(None).tolist() == [False] * 4
    assert Drafts(torch.tensor([5]), torch.tensor([5])).hits(None).tolist() == [True]


def test_a_head_says_for_whom_it_was_made_in_its_provenance_or_config(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    assert trained_for(head) == "tiny"
    write_json(head / "provenance.json", {"verifier": {"name": "huge"}})
    assert trained_for(head) == "huge"
    # from outside: `verifier` is the one it is to run on
    write_json(head / "provenance.json", {"verifier": {"name": "huge"}, "trained_for": None})
    assert trained_for(head) is None
    (head / "provenance.json").unlink()
    config = read_json(head / "config.json")
    config["speculators_config"]["verifier"]["name_or_path"] = "/home/me/models/small-v2"
    write_json(head / "config.json", config)
    assert trained_for(head) == "small-v2"


def test_facts_for_the_row_come_from_the_inspection_or_else_from_provenance(tmp_path: Path) -> None:
    assert head_facts(tmp_path / "identity.json", VERIFIER) == {}
    assert head_facts(tmp_path, VERIFIER) == {}
    write_json(tmp_path / "provenance.json", {"verifier": {"name": "older"}})
    assert head_facts(tmp_path, VERIFIER) == {"trained_for": "older", "run_on": "tiny"}
    inspection: dict[str, Any] = {
        "trained_for": None, "run_on": "tiny", "refused": None, "findings": None, "offline": None,
    }  # fmt: skip
    write_json(tmp_path / "inspection.json", inspection)
    assert head_facts(tmp_path, VERIFIER) == {"trained_for": None, "run_on": "tiny"}
    inspection |= {
        "findings": {"rope": "differs"},
        "offline": {"acceptance_rate_pos_0": 0.25, "num_positions": 8, "layer_ids": [2]},
    }
    write_json(tmp_path / "inspection.json", inspection)
    assert head_facts(tmp_path, VERIFIER) == {
        "trained_for": None,
        "run_on": "tiny",
        "findings": {"rope": "differs"},
        "offline_acceptance_pos_0": 0.25,
    }


def test_the_embeddings_of_the_head_go_before_the_verifiers(
    tmp_path: Path, verifier_head: Path
) -> None:
    theirs = load_file(verifier_head / "model.safetensors")["model.embed_tokens.weight"]
    shared = load_draft_model(write_head(tmp_path / "a"), verifier_head, torch.float32)
    assert torch.equal(shared.embed_tokens.weight, theirs)
    own = {"embed_tokens.weight": torch.ones(VOCAB_SIZE, WIDTH)}
    model = load_draft_model(write_head(tmp_path / "b", dict(own)), verifier_head, torch.float32)
    assert torch.equal(model.embed_tokens.weight, own["embed_tokens.weight"])
