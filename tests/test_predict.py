import json
import re
from pathlib import Path
from typing import Any

import pytest

from specmill.params_file import read_yaml
from specmill.predict import main
from tests.configs import KIMI_K25, LLAMA_8B, MIXTRAL
from tests.test_predicted import curves
from tests.test_step_times import CURVES
from tests.workspace import ROOT


def test_the_prediction_is_made_before_any_bench() -> None:
    stages = read_yaml(ROOT / "dvc.yaml")["stages"]
    made = {
        re.sub(r"/?\$\{.*", "", next(iter(out)) if isinstance(out, dict) else out): name
        for name, stage in stages.items()
        for kind in ("outs", "metrics", "plots")
        for out in stage.get("do", stage).get(kind, [])
    }
    seen, todo = set(), {"predict"}
    while todo:
        name = todo.pop()
        seen.add(name)
        for dep in stages[name].get("do", stages[name]).get("deps", []):
            assert not {"reports/bench", "data/bench"} & {dep, *map(str, Path(dep).parents)}, dep
            todo |= {
                stage for out, stage in made.items()
                if Path(dep).is_relative_to(out) or Path(out).is_relative_to(dep)
            } - seen  # fmt: skip
    assert "bench" not in seen


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


def written(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_the_command_predicts_from_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "curves.json", curves())
    text = said(capsys, "--acceptance", "0.6,0.3,0.1", "--curves", file, "--kind", "eagle3",
                "--tokens", "11", "--concurrency", "1,8")  # fmt: skip
    # K = 3: 130 / (44 + 160 / 2) = 1.05, from 180 to 150; 160 / 86 = 1.86 tokens break even
    assert re.search(r" 3 +2\.00 +1\.05x \[0\.97, 1\.09\], needs 1\.86 +-\n", text)
    # K = 1: 130 / (40 + 120 / 1.6) = 1.130, K = 2: 130 / (42 + 140 / 1.9) = 1.124
    assert re.search(r" best +K = 1 \(1\.01x K = 2\) +-\n", text)
    assert "  -: requests in flight: 8 is outside what was measured (1-4)\n" in text
    assert "answers of 11 tokens after prompts of 200; prefill is counted" in text
    # 130 / 1.25 - 44 = 60 ms are left for ten tokens of 16 ms a step
    assert re.search(r"for 1\.25x +2\.67\n", text)
    assert re.search(r"for 2\.00x +more than 4\n", text)


def test_the_command_says_how_steps_without_drafts_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path / "config.json", LLAMA_8B)
    text = said(capsys, "--acceptance", "0.5", "--coverage", "0.5", "--from-model", config,
                "--concurrency", "1",
                "--bandwidth", "15.009316864e12", "--draft-ms", "1")  # fmt: skip
    # every step takes 1 ms, drafting another one in half of them, for 1.25 tokens
    assert re.search(r" 1 +1\.25 +0\.83x, needs 1\.50\n", text)
    assert "50% of steps draft" in text
    assert "in which only some requests draft costs what it costs when all do" in text


def test_what_drafts_is_a_head_unless_something_else_is_said_or_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "curves.json", curves())
    assert "kind eagle3," in said(capsys, "--acceptance", "0.5", "--curves", file)
    others = [point for point in CURVES["points"] if point["kind"] != "eagle3"]
    file = written(tmp_path / "one.json", curves() | {"points": others})
    text = said(capsys, "--acceptance", "0.5", "--curves", file)
    assert "kind tokens," in text
    assert "K: 1 is outside what was measured (3)" in text
    medusa = [*others, others[-1] | {"kind": "medusa/three"}]
    file = written(tmp_path / "two.json", curves() | {"points": medusa})
    with pytest.raises(SystemExit, match="has medusa/three, tokens: choose one with --kind"):
        main(["--acceptance", "0.5", "--curves", file])


def test_the_command_predicts_for_a_machine_that_is_only_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path / "config.json", KIMI_K25)
    text = said(capsys, "--acceptance", "0.5,0.3,0.1", "--from-model", config,
                "--bandwidth", "12e12", "--gpus", "8", "--concurrency", "1,128")  # fmt: skip
    # bytes of K = 3 over those of none, router included: 67.2 / 33.0 GB, 591.9 / 553.3 GB
    assert re.search(r" 3 +1\.90 +0\.93x, needs 2\.04 +1\.78x, needs 1\.07\n", text)
    for assumed in (
        "arithmetic costs nothing",
        "all-reduces cost nothing",
        "an upper bound",
        "prefill is left out",
        "0 tokens of context, 16 bits a number, 70,272 bytes",
    ):
        assert assumed in text  # fmt: skip


def test_the_answer_that_the_docs_show_is_the_one_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path / "config.json", KIMI_K25)
    text = said(capsys, "--acceptance", "0.6,0.4,0.25", "--from-model", config, "--bandwidth",
                "12e12", "--gpus", "8", "--overhead-ms", "12.3",
                "--concurrency", "1,8,64")  # fmt: skip
    docs = (ROOT / "docs/prediction.md").read_text()
    table = text.partition("break even\n")[2].partition("\n\n")[0].splitlines()
    assert len(table) == 5
    for line in table:
        assert f"    {line}\n" in docs


def test_drafting_links_context_and_arithmetic_count_when_they_are_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path / "config.json", LLAMA_8B)
    text = said(capsys, "--acceptance", "0.5", "--from-model", config, "--concurrency", "1",
                "--bandwidth", "15.009316864e12", "--overhead-ms", "1",
                "--draft-ms", "0.5")  # fmt: skip
    # a step takes 2 ms, with a draft 2.5
    assert re.search(r" 1 +1\.50 +1\.20x, needs 1\.25\n", text)
    text = said(capsys, "--acceptance", "0.5", "--from-model", config, "--concurrency", "1",
                "--bandwidth", "15.009316864e12", "--peak", "15.009316864e12", "--gpus", "2",
                "--link-bandwidth", "1e30", "--link-latency-us", "15.625")  # fmt: skip
    # arithmetic takes 1 ms a token, 64 all-reduces take 1 ms: 2 and 3 ms
    assert re.search(r" 1 +1\.50 +1\.00x, needs 1\.50\n", text)
    assert "1 ms of a step of one request, 50% of it" in text


def test_measured_routing_takes_the_place_of_the_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path / "config.json", MIXTRAL)
    windows = [{"batch": 1, "t": t, "ratio": ratio} for t, ratio in ((1, 1.0), (2, 2 / 3.5))]
    measured = {"num_experts": 8, "top_k": 2, "windows": windows}
    routing = written(tmp_path / "routing.json", measured)
    arguments = ("--acceptance", "0.5", "--from-model", config, "--bandwidth", "1e12")
    # two tokens that load the same two experts cost what one does
    text = said(capsys, *arguments, "--routing", routing)
    assert re.search(r" 1 +1\.50 +1\.50x, needs 1\.00 +- +-\n", text)
    assert "times the share that was measured" in text
    other = written(tmp_path / "other.json", measured | {"num_experts": 128})
    with pytest.raises(SystemExit, match="top 2 of 128 experts, this one has top 2 of 8"):
        main([*arguments, "--routing", other])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--acceptance", "0.3,0.5"], "are not unconditional"),
        (["--acceptance", "much"], "could not convert"),
        (["--acceptance", "0.5", "--concurrency", "0"], "no list of numbers from 1 on"),
        (["--acceptance", "0.5", "--kind", "eagle3"], "--kind: only with --curves"),
        (["--acceptance", "0.5", "--bandwidth", "-1"], "--bandwidth is -1; it must be above 0"),
        (["--acceptance", "0.5", "--bandwidth", "1e12", "--draft-ms", "-1"], "cannot be negative"),
        (["--acceptance", "0.5", "--bandwidth", "1e12", "--link-bandwidth", "1"], "together"),
        (["--acceptance", "0.5"], "--from-model needs --bandwidth"),
        (["--acceptance", "0.5", "--bandwidth", "1e12", "--coverage", "2"], "coverage is 2"),
    ],
)
def test_what_is_wrong_is_named_with_its_option(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path / "config.json", LLAMA_8B)
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--from-model", config])
    assert message in f"{stopped.value}{capsys.readouterr().err}"


def test_options_of_a_described_machine_are_refused_beside_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "curves.json", curves())
    with pytest.raises(SystemExit):
        main(["--acceptance", "0.5", "--curves", file, "--gpus", "8"])
    assert "--gpus: only with --from-model" in capsys.readouterr().err
