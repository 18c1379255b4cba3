"""What stopped the pipeline once, made again on a twin; no engine is started.

transformers stands for the engine where hidden states are needed.
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specmill import compat
from specmill.incompatibilities import explain
from specmill.layers import states_of
from specmill.methods import speculative_configs
from specmill.params import Method
from specmill.params_file import load_params
from specmill.preflight import Preflight
from specmill.preflight_checks import (
    check_drafts,
    check_honoured,
    check_renders,
    check_states,
    look_at_connector,
    own_states,
)
from specmill.server import Server
from specmill.shrunk import shrunk_config
from specmill.staging import adopt
from specmill.states import stage
from specmill.store import HiddenStateStore
from specmill.twin import MAX_MODEL_LEN, TOKEN, K, draw_samples, write_twin
from specmill.twin_head import (
    DRAFT_VOCAB_SIZE,
    check_exported,
    choose_vocabulary,
    export_twin_head,
    rig,
    train_twin_head,
    two_steps,
)
from specmill.verifier import identify, write_head_slice
from specmill.view import StateView
from tests.verifiers import CLASSES
from tests.workspace import ROOT


@dataclass(frozen=True)
class Made:
    """A twin, its head, and states of its samples."""

    folder: Path
    identity: dict[str, Any]
    states: torch.Tensor
    """float32 [num_layers + 1, num_tokens, hidden_size] of the first sample."""

    @property
    def twin(self) -> Path:
        return self.folder / "twin"

    @property
    def head(self) -> Path:
        return self.folder / "trained"

    def told(self, head: Path, **identity: Any) -> dict[str, Any] | None:
        """What vLLM is told of a head, if nothing is wrong with it."""
        entry = Method(method="eagle3", section="spec", head=str(head), settings={})
        return speculative_configs("row", entry, [K], self.identity | identity)[K]


def make(folder: Path, name: str) -> Made:
    """What preflight does up to the export."""
    twin = folder / "twin"
    write_twin(shrunk_config(CLASSES[name], "float32")[0], twin)
    identity = identify(twin, {"name": name}, MAX_MODEL_LEN, "float32")
    write_head_slice(twin, folder / "slice")
    samples, spec = draw_samples(), states_of(identity, None, "auto")
    (folder / "staging").mkdir()
    own = [own_states(twin, sample.input_ids.tolist()) for sample in samples]
    for number, (sample, states) in enumerate(zip(samples, own, strict=True)):
        kept = states[list(spec.layer_ids)].transpose(0, 1).contiguous()
        ids = torch.from_numpy(sample.input_ids)
        stage(folder / "staging" / f"{number}.safetensors", spec, ids, kept)
    store = HiddenStateStore(folder / "store")
    adopt(folder / "staging", store, 2**24)
    store.write_view(folder / "states", spec, [sample.sample_key for sample in samples], 2**24)
    choose_vocabulary(samples, identity["vocab_size"], folder / "vocab")
    best = train_twin_head(
        folder / "slice", identity, samples, StateView(folder / "states"), folder / "vocab",
        two_steps(load_params(ROOT / "params.yaml").train), folder,
    )  # fmt: skip
    export_twin_head(best, identity, folder / "vocab", folder / "trained")
    return Made(folder, identity, own[0])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("llama"), "llama")


def test_an_epoch_of_the_twins_samples_is_two_steps_and_its_head_is_served(made: Made) -> None:
    draft_id = check_exported(made.head, made.folder / "vocab")
    assert draft_id != TOKEN
    assert draft_id + np.load(made.folder / "vocab/d2t.npy")[draft_id] == TOKEN
    assert made.told(made.head) == {
        "method": "eagle3", "model": str(made.head), "num_speculative_tokens": K,
    }  # fmt: skip
    # 6 samples of 48 tokens, 144 to a step
    trained = two_steps(load_params(ROOT / "params.yaml").train)
    assert 6 * 48 / trained.tokens_per_step == 2


def test_a_rigged_head_says_one_draft_id_of_any_states(made: Made, tmp_path: Path) -> None:
    draft_id = check_exported(made.head, made.folder / "vocab")
    rig(made.head, draft_id, tmp_path / "rigged")
    weights = load_file(tmp_path / "rigged" / "model.safetensors")
    fed = made.states[[2, 3, 4]].transpose(0, 1).flatten(1)  # [num_tokens, 3 * hidden_size]
    passed = fed @ weights["fc.weight"].float().T
    assert torch.allclose(passed, made.states[4], rtol=1e-5)
    drafted = (passed @ weights["lm_head.weight"].float().T).argmax(-1)
    assert set(drafted.tolist()) == {draft_id}
    assert check_exported(tmp_path / "rigged", made.folder / "vocab") == draft_id


def test_states_of_the_layers_asked_for_pass(made: Made) -> None:
    found = made.states[[2, 3, 4, 7]].transpose(0, 1)
    noise = 1e-4 * torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    said = check_states(found + noise, made.states, (2, 3, 4, 7), "float32")
    assert "layers 2, 3, 4, 7 within" in said


@pytest.mark.parametrize(
    ("taken", "message"),
    [
        ([3, 4, 5, 7], r"layer 2 are those of layer 3: off by \+1"),
        ([1, 2, 3, 7], r"layer 2 are those of layer 1: off by -1"),
        ([2, 3, 5, 7], r"layer 4 are those of layer 5: off by \+1"),
        ([2, 3, 4, 6], r"layer 7 are those of layer 6: off by -1"),
        ([4, 3, 2, 7], r"layer 2 are those of layer 4 \("),
    ],
)
def test_aux_layers_that_are_off_by_one_are_found(
    made: Made, taken: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_states(made.states[taken].transpose(0, 1), made.states, (2, 3, 4, 7), "float32")


def test_states_that_are_computed_otherwise_are_found(made: Made) -> None:
    found = made.states[[2, 3, 4, 7]].transpose(0, 1) * 1.01
    with pytest.raises(ValueError, match=r"0\.01 from those of transformers"):
        check_states(found, made.states, (2, 3, 4, 7), "float32")


def changed_head(made: Made, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of the head, its tensors changed."""
    shutil.copytree(made.head, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_a_head_without_d2t_is_refused_before_and_when_it_is_served(
    made: Made, tmp_path: Path
) -> None:
    head = changed_head(made, tmp_path / "head", lambda weights: weights.pop("d2t"))
    with pytest.raises(ValueError, match="head lacks d2t") as refused:
        check_exported(head, made.folder / "vocab")
    assert "falls back to the verifier's whole vocabulary" in (explain(str(refused.value)) or "")
    with pytest.raises(ValueError, match="lacks d2t: ids would be misread"):
        made.told(head)


def test_a_head_with_ids_in_place_of_offsets_is_refused(made: Made, tmp_path: Path) -> None:
    def absolute(weights: dict[str, Any]) -> None:
        weights["d2t"] += torch.arange(DRAFT_VOCAB_SIZE)

    head = changed_head(made, tmp_path / "head", absolute)
    with pytest.raises(ValueError, match="d2t is not the one chosen"):
        check_exported(head, made.folder / "vocab")
    with pytest.raises(ValueError, match="not the same mapping"):
        made.told(head)


def test_a_head_of_the_whole_vocabulary_is_refused(made: Made, tmp_path: Path) -> None:
    def widened(weights: dict[str, Any]) -> None:
        weights["lm_head.weight"] = torch.zeros(512, weights["lm_head.weight"].shape[1])

    head = changed_head(made, tmp_path / "head", widened)
    with pytest.raises(ValueError, match="draft vocabulary of 32, head drafts 512 tokens"):
        check_exported(head, made.folder / "vocab")


def test_a_head_for_another_verifier_is_refused(made: Made) -> None:
    with pytest.raises(ValueError, match="trained was trained for llama, not other"):
        made.told(made.head, fingerprint="of another", name="other")


@pytest.mark.parametrize("nest", ["language_model.{}", "thinker.{}", "vlm.tower.{}"])
def test_a_wrapper_with_another_nesting_is_resolved(made: Made, tmp_path: Path, nest: str) -> None:
    wrapped = renamed(made, tmp_path / "wrapped", nest.format)
    write_head_slice(wrapped, tmp_path / "slice")
    ours = load_file(tmp_path / "slice/model.safetensors")
    plain = load_file(made.folder / "slice/model.safetensors")
    assert {name: tensor.tolist() for name, tensor in ours.items()} == {
        name: tensor.tolist() for name, tensor in plain.items()
    }


def test_a_wrapper_that_calls_its_parts_otherwise_is_refused(made: Made, tmp_path: Path) -> None:
    wrapped = renamed(made, tmp_path / "wrapped", lambda name: name.replace("embed_tokens", "wte"))
    with pytest.raises(ValueError, match=r"wrapped: no embed_tokens\.weight is in the checkpoint"):
        write_head_slice(wrapped, tmp_path / "slice")


def test_a_quantised_lm_head_is_refused_and_quantised_layers_are_not(
    made: Made, tmp_path: Path
) -> None:
    layers = renamed(
        made, tmp_path / "layers", lambda name: name.replace("_proj.weight", "_proj.qweight")
    )
    write_head_slice(layers, tmp_path / "slice")
    head = renamed(
        made, tmp_path / "head", lambda name: name.replace("lm_head.weight", "lm_head.qweight")
    )
    with pytest.raises(ValueError, match=r"lm_head\.qweight is quantised"):
        write_head_slice(head, tmp_path / "other")


def renamed(made: Made, folder: Path, rename: Callable[[str], str]) -> Path:
    """A copy of the twin, its tensors called otherwise."""
    shutil.copytree(made.twin, folder)
    weights = load_file(made.twin / "model.safetensors")
    save_file(
        {rename(name): tensor for name, tensor in weights.items()}, folder / "model.safetensors"
    )
    return folder


def test_a_vllm_that_makes_connectors_otherwise_is_refused_with_every_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other:
        def __init__(self, vllm_config: Any) -> None: ...

        def get_finished(self) -> None: ...

    place = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
    monkeypatch.setattr(f"{place}.ExampleHiddenStatesConnector", Other)
    with pytest.raises(TypeError) as refused:
        look_at_connector()
    said = str(refused.value)
    assert "(specmill/connector.py) takes no kv_cache_config, role any more" in said
    assert "get_finished (specmill/connector.py) takes no finished_req_ids any more" in said
    assert "_on_write_done (specmill/connector.py) is not there" in said
    assert "makes KV connectors in another way" in (explain(said) or "")


def answering(replies: dict[str, tuple[int, dict[str, Any]]]) -> ThreadingHTTPServer:
    """A server with a reply for each path."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = replies[self.path]
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


FORBIDDEN = {
    "error": {
        "message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out "
        "to enable them.",
        "type": "PermissionDeniedError",
        "code": 403,
    }
}


@pytest.mark.parametrize(
    ("rendered", "fault"),
    [
        ((200, {"token_ids": [3, 70, 71, 4]}), None),
        ((403, FORBIDDEN), "/v1/chat/completions/render answered 403: .*Scale-out"),
        (
            (200, {"token_ids": [3, 70, 71]}),
            r"renders \[3, 70, 71\] and answers to \[3, 70, 71, 4\]",
        ),
        ((200, {}), "renders None"),
    ],
)
def test_a_server_without_the_flag_for_rendering_is_found(
    rendered: tuple[int, dict[str, Any]], fault: str | None
) -> None:
    replies = {
        "/v1/chat/completions/render": rendered,
        "/v1/chat/completions": (200, {"prompt_token_ids": [3, 70, 71, 4]}),
    }
    with answering(replies) as http:
        Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        server = Server(f"http://127.0.0.1:{http.server_port}", "key", Path("no.log"), 1.0)
        if fault is None:
            check_renders(server, 5)
        else:
            with pytest.raises(RuntimeError, match=fault) as error:
                check_renders(server, 5)
            known = explain(str(error.value)) or ""
            assert ("--enable-scale-out" in known) == (rendered[0] == 403)
        http.shutdown()


ALL = {"num_drafts": 10, "num_draft_tokens": 30, "num_accepted_tokens": 30,
       "accepted_at_0": 10, "accepted_at_1": 10, "accepted_at_2": 10}  # fmt: skip
NONE = {"num_drafts": 10, "num_draft_tokens": 30, "num_accepted_tokens": 0,
        "accepted_at_0": 0, "accepted_at_1": 0, "accepted_at_2": 0}  # fmt: skip


def test_missing_counters_and_missing_drafts_are_found() -> None:
    with pytest.raises(ValueError, match="exports no speculation counters"):
        check_drafts({}, K)
    with pytest.raises(RuntimeError, match="drafted nothing"):
        check_drafts(dict.fromkeys(ALL, 0), K)


def test_a_draft_id_that_is_read_without_d2t_is_found() -> None:
    check_honoured(check_drafts(ALL, K), [[TOKEN] * 4], 0)
    with pytest.raises(RuntimeError, match=r"drafts id 7, which d2t maps to 301.* 0% of drafts"):
        check_honoured(check_drafts(NONE, K), [[TOKEN] * 4], 7)
    with pytest.raises(RuntimeError, match=r"also said \[7\]: drafts are accepted as they are"):
        check_honoured(check_drafts(ALL, K), [[TOKEN, 7]], 7)


@pytest.mark.slow
def test_an_engine_that_refuses_the_class_fails_its_steps_and_what_needs_them_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "RuntimeError: Model does not support EAGLE3 interface but it was requested"
    refusing = [sys.executable, "-c", f"import sys; sys.exit({reason!r})"]
    monkeypatch.setattr(compat, "server_command", lambda *_: refusing)
    params = load_params(ROOT / "params.yaml")
    preflight = Preflight(CLASSES["llama"], {}, params, tmp_path / "scratch", tmp_path / "logs")
    preflight.run()
    assert {name: step.verdict for name, step in preflight.steps.done.items()} == {
        "twin": "ok",
        "tensor names": "ok",
        "connector": "ok",
        "speculators": "ok",
        "ngram served": "failed",
        "extract": "failed",
        **dict.fromkeys(("aux layers", "vocab", "train", "export", "head served"), "not run"),
    }
    extract = preflight.steps.done["extract"]
    assert extract.note == reason
    assert "hands out no aux hidden states" in (extract.known or "")
