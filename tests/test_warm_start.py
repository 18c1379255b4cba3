"""Training that goes on from a head: its mapping is kept, its weights are where it begins."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3.core import Eagle3DraftModel

import stages.train
import stages.vocab
from specmill import compat, paths
from specmill.draft_config import Surroundings
from specmill.draft_decoder import surroundings
from specmill.draft_sources import identify_start
from specmill.files import read_json, write_json
from specmill.head import export_head
from specmill.loading import make_loader
from specmill.params import Train
from specmill.params_heads import OutsideHead
from specmill.samples import write_samples
from specmill.speculator import check_head
from specmill.start_head import take_head
from specmill.training import build_draft_model, check_vocabulary, train
from specmill.transfer import StoredSamples
from specmill.vocab import build_tables, load_tables, save_tables, tables_digest
from specmill.warm_start import check_start, load_weights
from tests.test_inspection import D2T, T2D
from tests.test_outside import eagle_head
from tests.test_training import (
    ANSWER_IDS,
    AUX_IDS,
    CHOSEN,
    HIDDEN_SIZE,
    VOCAB_SIZE,
    datasets,
    make_view,
    random_samples,
    tables,
    verifier_head,
)

__all__ = ["datasets", "verifier_head"]  # fixtures

OTHER_IDS = [0, 1, 2, 3]
VERIFIER = {
    "name": "tiny",
    "fingerprint": "f",
    "hidden_size": HIDDEN_SIZE,
    "num_layers": 8,
    "vocab_size": VOCAB_SIZE,
    "dtype": "float32",
    "max_model_len": 64,
}


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "device", lambda: "cpu")


@pytest.fixture(scope="module")
def given(verifier_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of random weights, in speculators' format."""
    folder = tmp_path_factory.mktemp("given")
    d2t, t2d = tables()
    model = build_draft_model(verifier_head, AUX_IDS, d2t, t2d, CHOSEN)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)  # a head's own, where speculators would give the verifier's
    model.save_pretrained(folder / "checkpoint")
    export_head(folder / "checkpoint", folder / "head", "tiny", {"verifier": VERIFIER})
    return folder / "head"


def starting_from(head: Path, **changes: Any) -> Train:
    return CHOSEN.model_copy(update={"from_": OutsideHead(source=f"folder:{head}")} | changes)


def take(
    chosen: Train, verifier_head: Path, folder: Path, size: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    assert chosen.from_ is not None
    return take_head(chosen.from_, size, VERIFIER, verifier_head, folder)


def warm_model(chosen: Train, verifier_head: Path, folder: Path) -> Any:
    """What training builds: the mapping taken, the start checked, the weights put in."""
    found = take(chosen, verifier_head, folder)
    around = surroundings(verifier_head, 4, AUX_IDS)
    check_start(chosen, around, verifier_head, tables_digest(*found), folder)
    model = build_draft_model(verifier_head, AUX_IDS, *found, chosen)
    load_weights(model, folder)
    check_vocabulary(model, *found)
    return model


def loss_of(model: Any, data: StoredSamples) -> float:
    """Of the first batch; the verifier's choice within the draft vocabulary is what it compares."""
    batch = next(iter(make_loader(data, CHOSEN, CHOSEN.tokens_per_step, HIDDEN_SIZE, 3, 0)))
    steps, _ = model.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", ttt_steps=2, ttt_step_loss_decay=1.0
    )
    for name in ("hidden_states", "verifier_last_hidden_states"):
        batch[name] = batch[name].float()
    with torch.no_grad():
        _, loss, _ = model(**batch, **steps)
    return float(loss)


def as_speculators_loads(head: Path, verifier_head: Path, folder: Path) -> Any:
    """The same head by speculators' own from_pretrained, told where the verifier is."""
    shutil.copytree(head, folder)
    config = read_json(folder / "config.json")
    config["speculators_config"]["verifier"]["name_or_path"] = str(verifier_head)
    write_json(folder / "config.json", config)
    loaded = Eagle3DraftModel.config_class.from_pretrained(folder)
    loaded.transformer_layer_config._attn_implementation = "sdpa"
    return Eagle3DraftModel.from_pretrained(folder, config=loaded, dtype=torch.float32)


def test_the_first_loss_is_that_of_the_head_as_speculators_loads_it(
    given: Path,
    verifier_head: Path,
    datasets: tuple[StoredSamples, StoredSamples],
    tmp_path: Path,
) -> None:
    warm = warm_model(starting_from(given), verifier_head, tmp_path / "taken")
    expected = loss_of(as_speculators_loads(given, verifier_head, tmp_path / "own"), datasets[1])
    assert loss_of(warm, datasets[1]) == pytest.approx(expected, rel=1e-5)
    fresh = build_draft_model(verifier_head, AUX_IDS, *tables(), CHOSEN)
    assert abs(loss_of(fresh, datasets[1]) - expected) > 0.01


def test_a_second_training_begins_where_the_first_ended_with_its_mapping(
    verifier_head: Path, datasets: tuple[StoredSamples, StoredSamples], tmp_path: Path
) -> None:
    model = build_draft_model(verifier_head, AUX_IDS, *tables(), CHOSEN)
    best, epochs = train(model, *datasets, CHOSEN, tmp_path / "first", lambda *_: None)
    ended = epochs[int(best.name)]["loss_epoch"]
    export_head(best, tmp_path / "head", "tiny", {"verifier": VERIFIER})
    still = starting_from(tmp_path / "head", lr=1e-12, epochs=1)
    again, second = train(
        warm_model(still, verifier_head, tmp_path / "taken"),
        *datasets,
        still,
        tmp_path / "second",
        lambda *_: None,
    )
    # bfloat16 rounds what was trained
    assert second[0]["loss_epoch"] == pytest.approx(ended, abs=0.01)
    fresh = CHOSEN.model_copy(update={"lr": 1e-12, "epochs": 1})
    model = build_draft_model(verifier_head, AUX_IDS, *tables(), CHOSEN)
    _, drawn = train(model, *datasets, fresh, tmp_path / "fresh", lambda *_: None)
    assert abs(drawn[0]["loss_epoch"] - ended) > 0.05
    first = load_file(tmp_path / "head" / "model.safetensors")
    weights = load_file(again / "model.safetensors")
    assert int(weights["t2d"].sum()) == 4
    assert torch.equal(weights["t2d"], first["t2d"])
    assert torch.equal(weights["d2t"], first["d2t"])
    provenance = {"verifier": VERIFIER, "vocabulary": tables_digest(*tables())}
    export_head(again, tmp_path / "result", "tiny", provenance)
    check_head(tmp_path / "result", VERIFIER)


def test_the_mapping_is_the_heads_whatever_was_trained_on(
    given: Path, verifier_head: Path, tmp_path: Path
) -> None:
    d2t, t2d = take(starting_from(given), verifier_head, tmp_path / "taken")
    assert np.nonzero(t2d)[0].tolist() == (np.arange(4) + d2t).tolist() == ANSWER_IDS
    assert (d2t.dtype, t2d.dtype) == (np.int64, np.bool_)
    about = read_json(tmp_path / "taken" / "provenance.json")
    assert about["from"]["source"] == f"folder:{given}"
    assert about["vocabulary"] == tables_digest(d2t, t2d)


def test_a_head_of_the_eagle_authors_brings_its_mapping_too(
    verifier_head: Path, tmp_path: Path
) -> None:
    source = eagle_head(tmp_path / "eagle", {"t2d": None})
    d2t, t2d = take(starting_from(source), verifier_head, tmp_path / "taken")
    assert (d2t.tolist(), t2d.tolist()) == (D2T.tolist(), T2D.tolist())
    assert read_json(tmp_path / "taken" / "config.json")["speculators_model_type"] == "eagle3"


def changed_head(given: Path, folder: Path, **weights: torch.Tensor | None) -> Path:
    """The given head with some tensors replaced; None takes one out."""
    shutil.copytree(given, folder)
    changed = load_file(given / "model.safetensors") | {
        name.replace("__", "."): weight for name, weight in weights.items()
    }
    kept = {name: weight for name, weight in changed.items() if weight is not None}
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"fc__weight": None}, r"it lacks fc\.weight"),
        ({"fc__weight": torch.ones(16, 96)}, r"its fc takes 96 values a token, as of a model of"),
        ({"norm__weight": torch.ones(8)}, r"its norm\.weight is \(8,\), and its config says \(16"),
        ({"odd__weight": torch.ones(8)}, r"vLLM has no place for its odd\.weight"),
        ({"d2t": None}, "it drafts 4 of 32 tokens and has no d2t"),
        ({"d2t": torch.tensor([1, 7, 9, 30])}, "d2t leads to ids outside the verifier's 0 to 31"),
        ({"d2t": torch.tensor([6, 0, 7, 27])}, "d2t and t2d disagree on 2 of 4 draft ids"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_refused_by_tensor(
    given: Path, verifier_head: Path, tmp_path: Path, weights: dict[str, Any], message: str
) -> None:
    head = changed_head(given, tmp_path / "head", **weights)
    with pytest.raises(ValueError, match=rf"train\.from folder:.*{message}"):
        take(starting_from(head), verifier_head, tmp_path / "taken")


def test_another_draft_vocabulary_than_the_heads_is_refused(
    given: Path, verifier_head: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"has 4 tokens and vocab\.draft_vocab_size is 8: write 4"):
        take(starting_from(given), verifier_head, tmp_path / "taken", size=8)


def around_tiny() -> Surroundings:
    config = {"hidden_size": HIDDEN_SIZE, "vocab_size": VOCAB_SIZE}
    return Surroundings(config, "tiny", 4, AUX_IDS, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 32}, r"train\.sliding_window is 32 and the head's 64"),
        ({"sliding_window": None}, r"train\.sliding_window is null and the head's 64"),
        ({"norm_output": False}, r"train\.norm_output is false and the head's true"),
        ({"norm_before_fc": False},
         r"train\.norm_before_fc is false and the head's true; the head's input_norm\.weight has"),
        ({"num_layers": 2},
         r"train\.num_layers is 2 and the head's 1; the head has no layers\.1\.input_layernorm"),
    ],
)  # fmt: skip
def test_a_draft_model_of_another_kind_than_the_head_is_refused_with_both_values(
    given: Path, verifier_head: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    digest = tables_digest(*take(starting_from(given), verifier_head, tmp_path / "taken"))
    check_start(starting_from(given), around_tiny(), verifier_head, digest, tmp_path / "taken")
    with pytest.raises(ValueError, match=message):
        check_start(
            starting_from(given, **changes),
            around_tiny(),
            verifier_head,
            digest,
            tmp_path / "taken",
        )


def test_a_given_geometry_has_to_be_the_heads_and_its_rope_need_not_be_the_verifiers(
    given: Path, verifier_head: Path, tmp_path: Path
) -> None:
    head = tmp_path / "head"
    shutil.copytree(given, head)
    config = read_json(head / "config.json")
    decoder = config["transformer_layer_config"] | {"head_dim": 32, "rope_parameters": None}
    decoder |= {"rope_theta": 777.0, "intermediate_size": 24}
    config["transformer_layer_config"] = decoder
    write_json(head / "config.json", config)
    weights = load_file(head / "model.safetensors")
    for name, shape in {
        "self_attn.q_proj": (64, 32), "self_attn.k_proj": (32, 32), "self_attn.v_proj": (32, 32),
        "self_attn.o_proj": (16, 64), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16),
        "mlp.down_proj": (16, 24),
    }.items():  # fmt: skip
        weights[f"layers.0.{name}.weight"] = torch.randn(shape)
    save_file(weights, head / "model.safetensors")
    chosen = starting_from(head, draft=f"file:{head / 'config.json'}")
    model = warm_model(chosen, verifier_head, tmp_path / "taken")
    assert model.layers[0].mlp.up_proj.weight.shape == (24, 16)
    assert model.config.transformer_layer_config.rope_parameters["rope_theta"] == 777.0
    with pytest.raises(
        ValueError,
        match=r"like-verifier: intermediate_size is 32 and the head's 24; head_dim is 8 and .* 32.*"
        r"layers\.0\.mlp\.down_proj\.weight is \(16, 32\) and the head's \(16, 24\)",
    ):
        warm_model(starting_from(head), verifier_head, tmp_path / "again")


def test_another_mapping_than_the_heads_and_a_stale_head_are_refused(
    given: Path, verifier_head: Path, tmp_path: Path
) -> None:
    chosen, folder = starting_from(given), tmp_path / "taken"
    with pytest.raises(ValueError, match="holds no head: run `dvc repro vocab`"):
        check_start(chosen, around_tiny(), verifier_head, "", folder)
    take(chosen, verifier_head, folder)
    other = tables_digest(*build_tables(Counter(OTHER_IDS), 4, VOCAB_SIZE))
    with pytest.raises(ValueError, match=r"mapping is not that of train\.from .* other tokens"):
        check_start(chosen, around_tiny(), verifier_head, other, folder)
    moved = chosen.model_copy(update={"from_": OutsideHead(source="hub:org/head")})
    with pytest.raises(ValueError, match=r"is hub:org/head, and .* holds folder:.*dvc repro vocab"):
        check_start(moved, around_tiny(), verifier_head, other, folder)


def test_what_a_start_is_known_by_and_what_is_refused_before_anything_runs(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert identify_start(CHOSEN, 4) == {"source": None}
    head = tmp_path / "head"
    shutil.copytree(given, head)
    before = identify_start(starting_from(head), 4)
    with pytest.raises(ValueError, match=r"has a draft vocabulary of 4, .* is 8: write 4"):
        identify_start(starting_from(head), 8)
    (head / "model.safetensors").write_bytes(b"other")
    assert identify_start(starting_from(head), 4) != before
    with pytest.raises(ValueError, match=r"train\.from is folder:.* holds no config\.json"):
        identify_start(starting_from(tmp_path / "none"), 4)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="which training replaces"):
        identify_start(starting_from(paths.EAGLE3), 4)


class FakeStage:
    """Parameters and results of a stage, without params.yaml and MLflow."""

    def __init__(self, chosen: Train):
        self.params = SimpleNamespace(
            train=chosen,
            vocab=SimpleNamespace(draft_vocab_size=4),
            runtime=SimpleNamespace(extract_endpoints=[], request_timeout_s=60, data_workers=0),
        )
        self.written: dict[Path, Any] = {}

    def write_metrics(self, path: Path, metrics: dict[str, Any]) -> None:
        self.written[path] = metrics

    def log_epoch(self, _epoch: int, _metrics: dict[str, float]) -> None:
        pass


@pytest.mark.slow
def test_the_stages_train_two_steps_from_a_head_and_the_result_says_so(
    given: Path, verifier_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, states = random_samples(12)
    make_view(tmp_path / "states", samples, states)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    shutil.copytree(verifier_head, paths.VERIFIER_HEAD)
    write_json(paths.HEAD_IDENTITY, VERIFIER)
    paths.HIDDEN_STATES.parent.mkdir(exist_ok=True)
    shutil.copytree("states/view", paths.HIDDEN_STATES)
    write_samples(paths.PREPARED / "train.parquet", samples[:8])
    write_samples(paths.PREPARED / "heldout.parquet", samples[8:])
    stage = FakeStage(starting_from(given, epochs=1))

    @contextmanager
    def opened(*_: Any, **__: Any) -> Iterator[FakeStage]:
        yield stage

    for module in (stages.vocab, stages.train):
        monkeypatch.setattr(module, "open_stage", opened)
        module.main()
    about = read_json(paths.EAGLE3 / "provenance.json")
    assert about["start"] == read_json(paths.START / "provenance.json")
    assert about["params"]["from"]["source"] == f"folder:{given}"
    assert about["vocabulary"] == about["start"]["vocabulary"]
    check_head(paths.EAGLE3, VERIFIER)
    assert stage.written[paths.REPORTS / "train.json"]["num_epochs"] == 1
    assert stage.written[paths.REPORTS / "vocab.json"]["draft_vocab_size"] == 4
    save_tables(paths.VOCAB, *build_tables(Counter(OTHER_IDS), 4, VOCAB_SIZE))
    (paths.PREPARED / "train.parquet").unlink()  # refused before a sample is read
    with pytest.raises(ValueError, match=r"mapping is not that of train\.from"):
        stages.train.main()
    assert load_tables(paths.VOCAB)[0].tolist() == [0, 0, 0, 0]
    assert json.dumps(about).count(str(tmp_path)) == 0
