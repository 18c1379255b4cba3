"""Preflight of classes of verifiers with the installed engine: three starts each."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specmill.params_file import load_params
from specmill.preflight import Preflight
from specmill.twin_head import rig
from tests.verifiers import CLASSES
from tests.workspace import ROOT

pytestmark = pytest.mark.e2e


def run(name: str, folder: Path) -> Preflight:
    params = load_params(ROOT / "params.yaml")
    preflight = Preflight(CLASSES[name], {}, params, folder / "scratch", folder / "logs")
    preflight.run()
    return preflight


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "qwen3", "deepseek")),
    ],
)
def test_a_class_that_works_goes_through_every_step(tmp_path: Path, name: str) -> None:
    preflight = run(name, tmp_path)
    assert {
        step.name: step.note for step in preflight.steps.done.values() if step.verdict != "ok"
    } == {}
    assert len(preflight.steps.done) == 11
    assert preflight.steps.ended_well
    assert "layers 2, 3, 4, 7 within" in preflight.steps.done["aux layers"].note


def test_a_class_without_aux_hidden_states_is_told_as_the_known_incompatibility(
    tmp_path: Path,
) -> None:
    done = run("mixtral", tmp_path).steps.done
    assert done["extract"].verdict == "failed"
    assert "does not support EAGLE3 interface" in done["extract"].note
    assert "hands out no aux hidden states" in (done["extract"].known or "")
    assert done["ngram served"].verdict == "ok"  # which needs none
    assert done["head served"].verdict == "not run"


@pytest.mark.long
def test_an_engine_that_reads_draft_ids_without_d2t_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rigged_without_d2t(head: Path, draft_id: int, folder: Path) -> None:
        rig(head, draft_id, folder)
        weights = load_file(folder / "model.safetensors")
        weights["d2t"].zero_()
        save_file(weights, folder / "model.safetensors")

    monkeypatch.setattr("specmill.twin_head.rig", rigged_without_d2t)
    monkeypatch.setattr("specmill.speculator.check_head", lambda *_: None)  # it would refuse it
    served = run("llama", tmp_path).steps.done["head served"]
    assert served.verdict == "failed"
    assert "0% of drafts are accepted: the engine reads draft ids without d2t" in served.note


def test_the_report_of_a_config_alone_ends_with_status_1_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specmill.preflight import main

    config = tmp_path / "config.json"
    config.write_text(json.dumps(CLASSES["llama"] | {"model_type": "gnarl"}))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["preflight", "--config", str(config)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert "known: transformers does not know this class" in shown
    assert shown.count("not run") >= 8
