import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import stages.head
from specmill import compat, paths
from specmill.files import read_json, write_json
from specmill.head_tensors import read_tensors
from specmill.outside import convert, fetch, name_of_verifier
from specmill.params_heads import OutsideHead
from specmill.section import DoesNotFit
from tests.test_inspection import (
    CONFIG,
    DECODER,
    VERIFIER,
    plain_weights,
    verifier_head,
    view_of,
    write_head,
)

__all__ = ["verifier_head"]  # a fixture

EAGLE_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    **{name: value for name, value in DECODER.items() if name != "rope_parameters"},
    "rope_theta": 50000.0,
    "draft_vocab_size": 4,
    "torch_dtype": "bfloat16",
}


def eagle_weights() -> dict[str, torch.Tensor]:
    """The plain head in bfloat16 under the EAGLE authors' names."""
    return {
        name.replace("layers.0.", "midlayer."): (
            weight.bfloat16() if weight.is_floating_point() else weight
        )
        for name, weight in plain_weights().items()
    }


def eagle_head(
    folder: Path,
    weights: dict[str, torch.Tensor | None] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """An EAGLE head with some of it changed; None takes a tensor out."""
    folder.mkdir(parents=True)
    changed = eagle_weights() | (weights or {})
    kept = {name: weight for name, weight in changed.items() if weight is not None}
    save_file(kept, folder / "model.safetensors")
    write_json(folder / "config.json", EAGLE_CONFIG | (config or {}))
    return folder


def converted(
    source: Path, verifier_head: Path, **chosen: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors of what a source is converted to."""
    folder = source.parent / "converted"
    head = OutsideHead(source=f"folder:{source}", **chosen)
    convert(source, head, VERIFIER, verifier_head, folder)
    return read_json(folder / "config.json"), load_file(folder / "model.safetensors")


def assert_arrived(tensors: dict[str, torch.Tensor], *, without: tuple[str, ...] = ()) -> None:
    """The tensors are the EAGLE head's, bit by bit, under speculators' names."""
    expected = {
        name.replace("midlayer.", "layers.0."): weight
        for name, weight in eagle_weights().items()
        if name not in without
    }
    assert tensors.keys() == expected.keys()
    for name, weight in expected.items():
        assert tensors[name].dtype == weight.dtype
        assert torch.equal(tensors[name], weight), name


def test_an_eagle_head_arrives_bit_by_bit_with_what_its_config_says(
    tmp_path: Path, verifier_head: Path
) -> None:
    config, tensors = converted(eagle_head(tmp_path / "eagle"), verifier_head)
    assert_arrived(tensors)
    assert config["speculators_model_type"] == "eagle3"
    assert (config["draft_vocab_size"], config["dtype"]) == (4, "bfloat16")
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # 8 layers: 2, 8 // 2, 8 - 3
    decoder = config["transformer_layer_config"]
    assert (decoder["vocab_size"], decoder["hidden_size"], decoder["head_dim"]) == (32, 16, 8)
    assert decoder["rope_parameters"] == {"rope_type": "default", "rope_theta": 50000.0}
    # portable: the verifier by name, not by the place of its slice
    assert config["speculators_config"]["verifier"]["name_or_path"] == "tiny"
    assert str(tmp_path) not in json.dumps(config)
    assert str(verifier_head) not in json.dumps(config)


def test_weights_of_torch_are_read_and_buffers_that_engines_compute_left_out(
    tmp_path: Path, verifier_head: Path
) -> None:
    source = eagle_head(tmp_path / "eagle")
    (source / "model.safetensors").unlink()
    computed = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    torch.save(eagle_weights() | computed, source / "pytorch_model.bin")
    assert_arrived(converted(source, verifier_head)[1])


def shard(folder: Path) -> None:
    """Split the weights into two files with an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = {name: f"model-0000{1 + (name > names[5])}-of-00002.safetensors" for name in names}
    for file in set(files.values()):
        save_file({n: weights[n].clone() for n in names if files[n] == file}, folder / file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": files})


def test_shards_are_joined_and_a_missing_one_is_told(tmp_path: Path, verifier_head: Path) -> None:
    source = eagle_head(tmp_path / "eagle")
    shard(source)
    assert_arrived(converted(source, verifier_head)[1])
    (source / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks 6 tensors that .*index\.json lists, .* d2t"):
        read_tensors(source)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_are_missing_or_cut_off_are_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="holds no weights"):
        read_tensors(tmp_path)
    save_file(eagle_weights(), tmp_path / "model.safetensors")
    torch.save(eagle_weights(), tmp_path / "pytorch_model.bin")
    for other in {"model.safetensors", "pytorch_model.bin"} - {name}:
        (tmp_path / other).unlink()
    whole = (tmp_path / name).read_bytes()
    for size in (0, 100, len(whole) // 2):
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            read_tensors(tmp_path)


def test_norms_that_the_converter_drops_arrive(tmp_path: Path, verifier_head: Path) -> None:
    norm = {"input_norm.weight": torch.full((48,), 2.0, dtype=torch.bfloat16)}
    source = eagle_head(tmp_path / "eagle", dict(norm), {"norm_before_fc": True})
    config, tensors = converted(source, verifier_head)
    assert config["norm_before_fc"] is True
    assert torch.equal(tensors["input_norm.weight"], norm["input_norm.weight"])


def test_what_the_converter_would_draw_is_left_out(
    tmp_path: Path, verifier_head: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = eagle_head(tmp_path / "eagle", {"midlayer.mlp.up_proj.weight": None})
    _, tensors = converted(source, verifier_head)
    assert_arrived(tensors, without=("midlayer.mlp.up_proj.weight",))
    assert "has no ['layers.0.mlp.up_proj.weight']" in caplog.text


@pytest.mark.parametrize(
    ("weights", "config", "reason"),
    [
        ({"midlayer.mlp.up_proj.weight": None, "midlayer.ffn.up.weight": torch.ones(8, 16)}, {},
         r"has no place for layers\.0\.ffn\.up\.weight"),
        ({"layers.1.mlp.up_proj.weight": torch.ones(8, 16)}, {"num_hidden_layers": 2},
         r"has no place for layers\.1"),
        ({"fc.weight": None}, {}, r"is no EAGLE-3 head: .*'LlamaForCausalLMEagle3'"),
        ({"norm.weight": torch.ones(15)}, {}, r"cannot convert (.|\n)*norm\.weight"),
        ({}, {"speculators_model_type": "mtp"}, "a head of kind mtp, not eagle3"),
    ],
)  # fmt: skip
def test_a_head_that_speculators_cannot_hold_does_not_fit(
    tmp_path: Path,
    verifier_head: Path,
    weights: dict[str, torch.Tensor | None],
    config: dict[str, Any],
    reason: str,
) -> None:
    source = eagle_head(tmp_path / "eagle", weights, config)
    with pytest.raises(DoesNotFit, match=reason):
        converted(source, verifier_head)


def test_a_lost_t2d_follows_from_d2t_and_none_is_kept_where_both_vocabularies_are_one(
    tmp_path: Path, verifier_head: Path
) -> None:
    _, tensors = converted(eagle_head(tmp_path / "a" / "eagle", {"t2d": None}), verifier_head)
    assert_arrived(tensors)
    whole: dict[str, torch.Tensor | None] = {
        "lm_head.weight": torch.ones(32, 16, dtype=torch.bfloat16),
        "d2t": torch.zeros(32, dtype=torch.long),
        "t2d": torch.ones(32, dtype=torch.bool),
    }
    source = eagle_head(tmp_path / "b" / "eagle", whole, {"draft_vocab_size": None})
    config, tensors = converted(source, verifier_head)
    assert config["draft_vocab_size"] == 32
    assert not {"d2t", "t2d"} & tensors.keys()


def test_rotary_embeddings_written_by_transformers_5_are_kept(
    tmp_path: Path, verifier_head: Path
) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0}
    changes = {"rope_parameters": yarn, "rope_theta": None, "torch_dtype": None}
    config, _ = converted(eagle_head(tmp_path / "eagle", None, changes), verifier_head)
    found = config["transformer_layer_config"]["rope_parameters"]
    assert {name: found[name] for name in yarn} == yarn


def test_parameters_say_what_an_eagle_config_does_not(tmp_path: Path, verifier_head: Path) -> None:
    chosen: dict[str, Any] = {"aux_layer_ids": [1, 3, 5], "norm_before_residual": True}
    config, _ = converted(eagle_head(tmp_path / "a" / "eagle"), verifier_head, **chosen)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["norm_before_residual"] is True
    says = {
        "norm_before_residual": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    config, _ = converted(eagle_head(tmp_path / "b" / "eagle", None, says), verifier_head)
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    source = eagle_head(tmp_path / "c" / "eagle", None, says)
    config, _ = converted(source, verifier_head, **chosen)
    # ids that are counted otherwise can be put right; what the config says of the norm stays
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["norm_before_residual"] is False


def test_a_head_of_speculators_keeps_its_tensors_and_loses_paths(
    tmp_path: Path, verifier_head: Path
) -> None:
    named = CONFIG["speculators_config"] | {
        "verifier": {"name_or_path": "/home/someone/models/small", "architectures": ["X"]}
    }
    source = write_head(tmp_path / "head", config={"speculators_config": named})
    config, tensors = converted(source, verifier_head, aux_layer_ids=[3, 5, 6])
    assert config["speculators_config"]["verifier"]["name_or_path"] == "small"
    assert config["eagle_aux_hidden_state_layer_ids"] == [3, 5, 6]
    assert tensors.keys() == plain_weights().keys()
    for name, weight in plain_weights().items():
        assert torch.equal(tensors[name], weight)


def test_the_verifier_of_a_head_is_that_of_its_card_where_nothing_else_says(
    tmp_path: Path,
) -> None:
    source = eagle_head(tmp_path / "eagle")
    assert name_of_verifier(source) is None
    card = source / "README.md"
    for base in ("someone/Large-1", "[someone/Large-1, someone/other]"):
        card.write_text(f"---\nbase_model: {base}\n---\n# Head\n")
        assert name_of_verifier(source) == "someone/Large-1"
    for text in ("# Head\n", "---\nlicense: mit\n---\n", "---\n- a\n- b\n---\n"):
        card.write_text(text)
        assert name_of_verifier(source) is None
    write_json(source / "provenance.json", {"verifier": {"name": "exact"}})
    assert name_of_verifier(source) == "exact"


def test_a_folder_without_a_head_is_named_with_its_parameter(tmp_path: Path) -> None:
    chosen = OutsideHead(source=f"folder:{tmp_path}")
    with pytest.raises(ValueError, match=r"heads\.k2\.source is folder:.* holds no config\.json"):
        fetch(chosen, "heads.k2.source")
    source = eagle_head(tmp_path / "eagle")
    assert fetch(OutsideHead(source=f"folder:{source}"), "x") == (source, "folder")


def test_a_hub_head_is_taken_at_its_commit_and_one_that_cannot_be_had_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "c0ffee" + 34 * "0"
    repository = tmp_path / "models--someone--small-eagle3"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = eagle_head(repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    chosen = OutsideHead(source="hub:someone/small-eagle3", revision="main")
    assert fetch(chosen, "heads.a.source") == (snapshot, f"Hub commit {commit}")
    message = r"heads\.a\.source hub:someone/other at revision v2 cannot be had"
    with pytest.raises(ValueError, match=message):
        fetch(OutsideHead(source="hub:someone/other", revision="v2"), "heads.a.source")


class FakeStage:
    """As much of a stage as the stage's body uses."""

    def __init__(self, heads: dict[str, OutsideHead]):
        self.params = type("Params", (), {"heads": heads})
        self.written: dict[Path, Any] = {}

    def __enter__(self) -> "FakeStage":
        return self

    def __exit__(self, *details: object) -> None:
        pass

    def write_metrics(self, path: Path, metrics: dict[str, Any]) -> None:
        self.written[path] = metrics


@pytest.fixture
def run_stage(tmp_path: Path, verifier_head: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the stage for a source; its metrics."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compat, "device", lambda: "cpu")
    view = view_of(tmp_path / "states")
    monkeypatch.setattr(paths, "HIDDEN_STATES", view.folder)
    monkeypatch.setattr(paths, "VERIFIER_HEAD", verifier_head)
    monkeypatch.setattr(paths, "HEAD_IDENTITY", tmp_path / "identity.json")
    write_json(paths.HEAD_IDENTITY, VERIFIER)
    from specmill.samples import write_samples
    from tests.test_inspection import greedy_samples

    write_samples(Path("data/prepared/heldout.parquet"), greedy_samples())

    def run(source: Path) -> dict[str, Any]:
        stage = FakeStage({"mine": OutsideHead(source=f"folder:{source}")})
        monkeypatch.setattr(stages.head, "open_stage", lambda *_: stage)
        stages.head.main("mine")
        return dict(stage.written[Path("reports/heads/mine.json")])

    return run


def test_the_stage_writes_a_head_that_can_be_served_with_what_was_found(
    tmp_path: Path, run_stage: Any
) -> None:
    found = run_stage(eagle_head(tmp_path / "eagle", None, {"rope_theta": 10000.0}))
    assert (found["refused"], found["findings"], found["trained_for"]) == (None, None, None)
    assert found["offline"]["acceptance_rate_pos_0"] == 1.0
    head = Path("models/heads/mine")
    assert read_json(head / "inspection.json") == found
    provenance = read_json(head / "provenance.json")
    assert provenance["method"] == "eagle3"
    assert (provenance["converted_from"], provenance["trained_for"]) == ("EAGLE", None)
    assert (provenance["verifier"], provenance["origin"]) == (VERIFIER, "folder")
    assert (head / "config.json").is_file()


@pytest.mark.parametrize("at_conversion", [True, False])
def test_a_head_that_does_not_fit_leaves_its_reason_instead_of_failing(
    tmp_path: Path, run_stage: Any, at_conversion: bool
) -> None:
    missing = "fc.weight" if at_conversion else "midlayer.hidden_norm.weight"
    found = run_stage(eagle_head(tmp_path / "eagle", {missing: None}))
    assert ("no EAGLE-3 head" in found["refused"]) == at_conversion
    assert ("lacks layers.0.hidden_norm.weight" in found["refused"]) != at_conversion
    head = Path("models/heads/mine")
    assert read_json(head / "inspection.json") == found
    assert read_json(head / "provenance.json")["verifier"] == VERIFIER


def test_a_source_that_is_not_there_fails_the_stage(tmp_path: Path, run_stage: Any) -> None:
    with pytest.raises(ValueError, match=r"heads\.mine\.source"):
        run_stage(tmp_path / "nowhere")
