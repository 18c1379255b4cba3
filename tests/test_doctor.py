"""The doctor as a whole, on constructed machines: what it judges, prints and ends with."""

import json
from pathlib import Path
from typing import Any

import pytest

from specmill import doctor
from specmill.budget import NOT_ESTIMATED, Cost
from specmill.doctor import Examination, as_data, examine, main, text
from specmill.finding import Finding
from specmill.params import Params
from specmill.params_file import load_params
from tests.patients import ENGINE, ROOT, SMOLLM, card, h200, machine, params, seen
from tests.targets import TARGETS

LARGE = "data/prompts/large.jsonl"

PROFILES = [
    ROOT / "params.yaml",
    *(file for file in sorted((ROOT / "profiles").glob("*.yaml")) if file.stem not in TARGETS),
]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def levels(answer: Any, check: str) -> set[str]:
    return {one.level for one in answer.findings if one.check == check}


def with_prompts_that_git_has(chosen: Params) -> Params:
    """Without the large set, which `make prompts` writes first."""
    kept = [one for one in chosen.prepare.dataset if one.source != f"file:{LARGE}"]
    return chosen.model_copy(
        update={"prepare": chosen.prepare.model_copy(update={"dataset": kept})}
    )


@pytest.mark.parametrize("file", PROFILES, ids=lambda path: path.stem)
def test_every_profile_is_examined_and_costed_on_a_healthy_machine(file: Path) -> None:
    chosen = with_prompts_that_git_has(load_params(file))
    answer = examine(chosen, seen(), [])
    assert [one.line for one in answer.findings if one.level == "problem"] == []
    stages = {cost.stage for cost in answer.costs}
    assert {"prepare", "extract", "curves"} <= stages
    assert {f"bench@{name}" for name in chosen.methods} <= stages
    assert all(cost.seconds for cost in answer.costs if cost.starts)
    assert sum(cost.seconds or 0.0 for cost in answer.costs) < 24 * 3600


def test_a_large_set_that_was_not_made_is_a_problem_that_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = load_params(ROOT / "profiles/demo-h200.yaml")
    monkeypatch.chdir(tmp_path)
    (found,) = [one for one in examine(chosen, seen(), []).findings if one.check == "prompts"]
    assert found.level == "problem"
    assert "is not there" in found.found
    assert "`make prompts` writes data/prompts/large.jsonl" in found.do


def test_a_finding_is_a_line_with_what_was_found_and_what_to_do() -> None:
    finding = Finding("problem", "disk", "1 GB free", "another disk")
    assert finding.line == "problem  disk: 1 GB free; another disk"


def test_a_verifier_that_cannot_be_read_is_a_problem_and_the_rest_is_still_examined() -> None:
    answer = examine(params(), seen(card=ValueError("no such folder")), [])
    assert levels(answer, "verifier") == {"problem"}
    assert levels(answer, "versions") == {"ok"}
    assert answer.costs == []


def test_a_vllm_that_cannot_be_imported_is_a_problem() -> None:
    answer = examine(params(), seen(engine="ImportError: libcudart"), [])
    assert levels(answer, "engine") == {"problem"}
    assert answer.costs


def test_weights_that_are_not_counted_are_a_warning_and_cost_nothing() -> None:
    answer = examine(params(), seen(card=card(SMOLLM | {"model_type": "rwkv"})), [])
    assert levels(answer, "size") == {"warning"}
    assert answer.costs == []


def test_rows_that_no_stage_can_serve_are_a_problem() -> None:
    rows = {"x": {"method": "ngram", "section": "spec", "head": "models/none_such"}}
    assert levels(examine(params(methods=rows), seen(), []), "methods") == {"problem"}


def test_too_few_prompts_are_a_problem() -> None:
    answer = examine(params(prepare={"limit": 100_000}), seen(), [])
    assert levels(answer, "prompts") == {"problem"}


def test_the_command_ends_with_1_exactly_when_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specmill.doctor_services.check_all", lambda _: [])
    for what, status in ((seen(), 0), (seen(machine=machine(compiler=None)), 1)):
        monkeypatch.setattr(doctor, "see", lambda _, what=what: what)
        with pytest.raises(SystemExit) as ended:
            main(["--json", "--dollars-per-hour", "3.6", "--params", "profiles/smoke.yaml"])
        assert ended.value.code == status
        said = json.loads(capsys.readouterr().out)
        assert said["ok"] == (status == 0)
        for cost in said["costs"]:
            seconds = cost["seconds"]
            expected = None if seconds is None else pytest.approx(seconds / 1000)
            assert cost["dollars"] == expected


def test_a_params_file_that_is_not_valid_ends_it_before_anything_is_looked_at(
    tmp_path: Path,
) -> None:
    (tmp_path / "x.yaml").write_text("verifier: {}\n")
    with pytest.raises(SystemExit, match=r"problem  params: .*is not valid"):
        main(["--params", str(tmp_path / "x.yaml")])


def test_without_a_price_no_money_is_named() -> None:
    answer = examine(params(), seen(), [])
    assert "$" not in text(answer, None)
    assert "$" in text(answer, 2.0)
    assert all("dollars" not in row for row in as_data(answer, None)["costs"])
    assert text(answer, None).endswith("no problem found\n")


def test_on_a_gpu_every_k_of_the_curves_has_an_engine_of_its_own() -> None:
    chosen = params()
    on_cpu = {cost.stage: cost for cost in examine(chosen, seen(), []).costs}
    on_gpu = {cost.stage: cost for cost in examine(chosen, seen(machine=h200()), []).costs}
    # none, and two kinds (tokens, eagle3) at K 1, 3 and 8; tokens without a draft as well
    assert on_cpu["curves"].starts == 1 + 2
    assert on_gpu["curves"].starts == 1 + 2 * 3 + 1


def test_a_drifted_interface_is_a_problem_that_quotes_it() -> None:
    engine = ENGINE | {"drift": ["vllm:LLM (specmill/engines.py) needs colour too"]}
    answer = examine(params(), seen(engine=engine), [])
    assert [one.found for one in answer.findings if one.check == "interfaces"] == engine["drift"]
    assert answer.is_ill


def test_what_was_never_measured_has_no_minutes_and_no_price_and_is_not_in_the_sum() -> None:
    costs = [
        Cost("train", 0, 90.0, 90.0, 2_000_000_000, "estimated"),
        Cost("spoiled_head@with_a_long_name_here", 0, 0.0, None, 0, NOT_ESTIMATED),
    ]
    lines = [" ".join(line.split()) for line in text(Examination([], costs), 40.0).splitlines()]
    assert lines[1:5] == [
        "stage engines minutes GB $",
        "train 0 1.5 2.00 1.00 estimated",
        "spoiled_head@with_a_long_name_here 0 - 0.00 - not estimated: no measured rate",
        "all of these 0 1.5 2.00 1.00 but 1 without a rate",
    ]
    rows = as_data(Examination([], costs), 40.0)["costs"]
    assert [(row["seconds"], row["dollars"]) for row in rows] == [(90.0, 1.0), (None, None)]


@pytest.mark.parametrize("price", ["nan", "-3", "inf", "much"])
def test_a_price_that_is_none_is_refused(price: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([f"--dollars-per-hour={price}"])
    assert ended.value.code == 2
    assert f"{price} is no price, a number from 0 on" in capsys.readouterr().err
