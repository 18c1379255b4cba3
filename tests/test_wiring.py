"""Which stages a change reruns: the real dvc.yaml and params.yaml, real DVC, stand-in stages.

A stand-in writes outputs that depend on exactly what its stage declares (the parameters it lists
and the files it depends on), so a missing or needless dependency shows as a wrong list of stages.
"""

import textwrap
from collections.abc import Iterator

import pytest
from ruamel.yaml import YAML

from tests.workspace import ROOT, Workspace

pytestmark = pytest.mark.slow

STAND_IN = textwrap.dedent(
    '''
    """Stand-in: outputs are digests of what dvc.yaml declares."""
    import hashlib, json, sys
    from pathlib import Path
    from ruamel.yaml import YAML

    name = Path(__file__).stem
    key = sys.argv[1] if len(sys.argv) > 1 else None
    params = YAML(typ="safe").load(Path("params.yaml").read_text())
    pipeline = YAML(typ="safe").load(Path("dvc.yaml").read_text())["stages"]
    section = pipeline[name].get("foreach", "").strip("${}")
    item = params[section][key] if section else {}
    def value(place):
        found = params
        for part in place.split("."):
            found = found[part]
        return found
    def fill(text):
        for field, value in {"key": key, **{f"item.{k}": v for k, v in item.items()}}.items():
            text = text.replace("${%s}" % field, str(value))
        return text
    stage = pipeline[name].get("do", pipeline[name])
    def paths(kind):
        return [fill(e if isinstance(e, str) else next(iter(e))) for e in stage.get(kind, [])]
    def read(path):
        path = Path(path)
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        assert files, f"{name}: dependency {path} is missing"
        return b"".join(p.read_bytes() for p in files)
    sections = {s: value(s) for s in map(fill, stage.get("params", []))}
    wanted = [d for s in pipeline.values() for d in s.get("do", s).get("deps", [])]
    for out in paths("outs") + paths("metrics") + paths("plots"):
        leaves = [Path(d) for d in wanted if d.startswith(out + "/") and "$" not in d]
        leaves = leaves or [Path(out) if Path(out).suffix else Path(out) / "content"]
        for leaf in leaves:
            # the bench prompts do not depend on the training prompts
            own = "bench.jsonl" if leaf.name == "bench.parquet" else "train.jsonl"
            deps = [f"data/prompts/{own}" if d == "reports/sources.json" else d
                    for d in paths("deps")]
            if leaf.name == "curve_kinds.json":  # by the real function: that is its point
                from specmill.curve_kinds import kinds_to_measure
                from specmill.params_file import load_params
                leaf.parent.mkdir(parents=True, exist_ok=True)
                leaf.write_text(json.dumps(kinds_to_measure(load_params(Path("params.yaml")))))
                continue
            # what runs always declares nothing
            deps += ["data/prompts"] if leaf.name == "sources.json" else []
            blob = json.dumps(sections, sort_keys=True).encode() + b"".join(map(read, deps))
            leaf.parent.mkdir(parents=True, exist_ok=True)
            leaf.write_text(json.dumps({"digest": hashlib.sha256(blob).hexdigest()}))
    '''
)


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("wiring") / "a repository")  # with a blank
    for path in (workspace.folder / "stages").glob("[a-z]*.py"):
        path.write_text(STAND_IN)
    workspace.stages_run("dvc", "repro")
    workspace.commit("everything ran")
    return workspace


@pytest.fixture(autouse=True)
def _restored(wired: Workspace) -> Iterator[None]:
    yield
    wired.reset()


PIPELINE = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]
REPLAY = {"replay@none", "replay@ngram", "replay@eagle3"}
IN_THE_END = {"predict", "schedule", "check", "report"}
SAMPLING = {"sampling@none", "sampling@ngram", "sampling@eagle3"}
ALWAYS = {name for name, stage in PIPELINE.items() if stage.get("always_changed")}


def ran(stages: list[str]) -> set[str]:
    """Without what runs always."""
    return set(stages) - ALWAYS


def test_a_second_repro_runs_what_runs_always_and_nothing_else(wired: Workspace) -> None:
    assert set(wired.stages_run("dvc", "repro")) == {"hardware", "sources"}


def test_another_k_reruns_the_speculating_benches_and_the_report(wired: Workspace) -> None:
    stages = wired.stages_run("dvc", "exp", "run", "-S", "spec.tokens=2")
    assert ran(stages) == {"bench@ngram", "bench@eagle3", *IN_THE_END}


def test_another_learning_rate_reruns_train_and_what_serves_its_head(wired: Workspace) -> None:
    stages = wired.stages_run("dvc", "exp", "run", "-S", "train.lr=1e-4")
    assert ran(stages) == {"train", "replay@eagle3", "bench@eagle3", *IN_THE_END}


def test_another_draft_vocabulary_does_not_extract_again(wired: Workspace) -> None:
    stages = wired.stages_run("dvc", "exp", "run", "-S", "vocab.draft_vocab_size=4096")
    again = {"vocab", "train", "curves", "replay@eagle3", "bench@eagle3"}
    assert ran(stages) == again | IN_THE_END


def test_another_shape_of_the_head_trains_again_and_measures_its_step_time(
    wired: Workspace,
) -> None:
    stages = wired.stages_run("dvc", "exp", "run", "-S", "train.draft=file:draft.json")
    assert ran(stages) == {"train", "curves", "replay@eagle3", "bench@eagle3", *IN_THE_END}


def test_a_head_to_start_from_brings_its_vocabulary_and_leaves_step_times_alone(
    wired: Workspace,
) -> None:
    stages = wired.stages_run("dvc", "exp", "run", "-S", "train.from=folder:head")
    assert ran(stages) == {"vocab", "train", "replay@eagle3", "bench@eagle3", *IN_THE_END}


def test_one_more_training_prompt_reruns_prepare_onward_but_no_headless_bench(
    wired: Workspace,
) -> None:
    with (wired.folder / "data/prompts/train.jsonl").open("a") as prompts:
        prompts.write('{"category": "coding", "turns": ["Write a haiku about merge conflicts."]}\n')
    stages = wired.stages_run("dvc", "repro")
    again = {"prepare", "extract", "vocab", "train", "bench@eagle3"}
    # a stand-in's states of the bench's answers follow from everything that it reads
    assert ran(stages) == again | REPLAY | IN_THE_END


def test_another_machine_benches_again_and_trains_nothing(wired: Workspace) -> None:
    replaced = STAND_IN.replace('json.dumps({"digest"', 'json.dumps({"machine": 2, "digest"')
    (wired.folder / "stages/hardware.py").write_text(replaced)
    stages = wired.stages_run("dvc", "repro")
    measured = {"curves", "routing", "bench@none", "bench@ngram", "bench@eagle3"}
    assert ran(stages) == measured | SAMPLING | IN_THE_END


def test_runtime_settings_rerun_nothing(wired: Workspace) -> None:
    params = wired.folder / "params.yaml"
    text = params.read_text()
    assert "request_concurrency: 32" in text
    params.write_text(text.replace("request_concurrency: 32", "request_concurrency: 8"))
    assert ran(wired.stages_run("dvc", "repro")) == set()


def test_editing_one_method_reruns_no_other_bench(wired: Workspace) -> None:
    with (wired.folder / "specmill/methods/ngram.py").open("a") as source:
        source.write("# another line\n")
    stages = wired.stages_run("dvc", "repro")
    again = {"bench@ngram", "sampling@ngram", "replay@ngram", "curves"}
    assert ran(stages) == again | IN_THE_END


def test_a_window_of_one_row_reruns_that_row(wired: Workspace) -> None:
    """No step time: what drafts cost there does not hang on where they are looked up."""
    window = "methods.ngram.settings.prompt_lookup_max=5"
    stages = wired.stages_run("dvc", "exp", "run", "-S", window)
    again = {"bench@ngram", "sampling@ngram", "replay@ngram"}
    assert ran(stages) == again | IN_THE_END


def test_a_new_row_runs_what_it_serves_itself_and_the_report(wired: Workspace) -> None:
    stages = wired.stages_run(
        *("dvc", "exp", "run", "-S", "+draft_models.few.num_layers=6"),
        *("-S", "+methods.few={method: draft_model, section: spec, head: models/draft/few}"),
    )
    new = {"draft_model@few", "bench@few", "sampling@few", "replay@few", "curves"}
    assert ran(stages) == new | IN_THE_END


@pytest.mark.long
def test_another_learning_rate_of_eagle3_leaves_medusa_alone(wired: Workspace) -> None:
    (wired.folder / "params.yaml").write_text(
        (wired.folder / "profiles/all-methods.yaml").read_text()
    )
    stages = ran(wired.stages_run("dvc", "repro"))
    assert {"train_medusa@three_heads", "draft_model@first_layers", "foreign_head@noised",
            "spoiled_head@wrong_width", "bench@medusa", "bench@noised",
            "sampling@medusa"} <= stages  # fmt: skip
    assert stages.isdisjoint({"train", "bench@none", "bench@ngram", "bench@eagle3", *SAMPLING})
    wired.run("git", "commit", "--quiet", "--all", "-m", "every row")
    try:
        stages = ran(wired.stages_run("dvc", "exp", "run", "-S", "train.lr=3e-4"))
        spoiled = {"shuffled_d2t", "shifted_aux_layers", "random_layer", "wrong_width"}
        assert stages == (
            {"train", "foreign_head@noised", "bench@eagle3", "bench@noised"}
            | {"replay@eagle3", "replay@noised", *IN_THE_END}
            | {
                f"{stage}@{name}"
                for stage in ("train_sibling", "bench", "replay")
                for name in ("peagle", "dflash")
            }
            | {
                f"{stage}@{name}"
                for stage in ("spoiled_head", "bench", "replay")
                for name in spoiled
            }
        )
    finally:
        wired.run("git", "reset", "--quiet", "--hard", "HEAD~1")


def test_another_load_benches_again_and_samples_nothing(wired: Workspace) -> None:
    stages = wired.stages_run("dvc", "exp", "run", "-S", "bench.rates=[2.5]")
    assert ran(stages) == {"bench@none", "bench@ngram", "bench@eagle3"} | REPLAY | IN_THE_END


def test_a_row_of_another_tool_brings_in_that_row_and_the_report(wired: Workspace) -> None:
    imported = "+imported.rented={source: a.json, reference: null, num_speculative_tokens: 3}"
    stages = wired.stages_run("dvc", "exp", "run", "-S", imported)
    assert ran(stages) == {"imported@rented", "check", "report"}


def test_an_experiment_in_a_temporary_folder_leaves_the_workspace_alone(wired: Workspace) -> None:
    before = (wired.folder / "params.yaml").read_text()
    stages = wired.stages_run("dvc", "exp", "run", "--temp", "-S", "spec.tokens=4")
    assert ran(stages) == {"bench@ngram", "bench@eagle3", *IN_THE_END}
    assert (wired.folder / "params.yaml").read_text() == before


def test_every_stand_in_stage_exists() -> None:
    assert {path.stem for path in (ROOT / "stages").glob("[a-z]*.py")} == set(PIPELINE)
