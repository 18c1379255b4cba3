"""DVC as its users use it: experiments, queue, metrics, plots; real DVC, stand-in stages.

A stand-in sleeps for nothing and measures nothing, but its bench and report write what the real
ones write, in a folder whose name has blanks.
"""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.test_wiring import ALWAYS, STAND_IN, ran
from tests.workspace import Workspace

pytestmark = pytest.mark.slow

# what the wiring's stand-in wrote is made readable for DVC's plots, under the stage's own lock
TRAIN = """
rows = [{"epoch": e, "position": p, "loss": 3.0 - e - p / 10, "accuracy": 0.1 * (e + 1)}
        for e in range(2) for p in range(2)]
Path("reports/plots/train.json").write_text(json.dumps(rows))
Path("reports/train.json").write_text(json.dumps({"loss_epoch": params["train"]["lr"]}))
"""

CURVES = """
rows = [{"kind": kind, "k": k, "batch": batch, "step_ms": 10.0 + k + batch}
        for kind, k in (("none", 0), ("eagle3", 3)) for batch in (1, 4)]
Path("reports/plots/curves.json").write_text(json.dumps(rows))
"""

PREDICT = """
rows = [{"method": "eagle3", "num_speculative_tokens": params["spec"]["tokens"],
         "load": "1 in flight", "speedup": 1.1, "speedup_low": 1.05, "speedup_high": 1.2,
         "verdict": "faster"}]
Path("reports/plots/predicted.json").write_text(json.dumps(rows))
"""

BENCH = """
import os, time
from specmill.stage import open_stage
from specmill.summary import without_empty_lists
from specmill import paths

spec, is_none = params["spec"], key == "none"
ks = [0] if is_none else sorted({spec["tokens"], *spec["sweep"]})
def row(k, concurrency, category):
    place = {"num_speculative_tokens": k, "concurrency": concurrency, "rate": None, "context": 0,
             "category": category}
    speed = {"output_tokens_per_s": 50.0 * concurrency + k, "num_requests": 12,
             "ttft_ms_p50": 40.0, "itl_ms_p50": 20.0, "goodput": None,
             "fresh_prompts": True, "one_execution": True}
    beside = {"reference_tokens_per_s": 50.0 * concurrency, "speedup": 1 + k / 10,
              "speedup_low": 0.95 + k / 10, "speedup_high": 1.05 + k / 10, "num_pairs": 6,
              "verdict": "faster" if k else "no difference shown",
              "identical_outputs": 1.0, "first_divergence": None, "largest_gap": None,
              "num_not_rounding": 0}
    acceptance = {"acceptance_length": 1.5 if k else None}
    acceptance |= {f"acceptance_rate_pos_{i}": 0.5 / (i + 1) if i < k else None
                   for i in range(max(ks))}
    return place | speed | beside | acceptance
with open_stage(f"bench@{key}", ["bench"]) as stage:
    # one at a time: another holder of this file would make `open` fail
    alone = paths.CACHE / f"running-{key}"
    os.close(os.open(alone, os.O_CREAT | os.O_EXCL))
    time.sleep(0.3)
    alone.unlink()
    result = {
        "method": key,
        "head": {},
        "num_speculative_tokens": 0 if is_none else spec["tokens"],
        "rows": [row(k, c, category) for k in ks for c in params["bench"]["concurrency"]
                 for category in ("all", "coding", "maths")],
        "engine": without_empty_lists({"method_k0_0": {
            "enforce_eager": "False", "warnings": [], "bound_cores": [0, 1],
            "async_scheduling": None, "model_runner": "V1", "attention_backend": None,
            "cudagraph_mode": None, "compilation_mode": None, "startup_s": 1.0}}),
        "provenance": {"waited_s": stage.waited_s, "busy_cores_before": 0.0},
    }
    stage.write_metrics(paths.BENCH / f"{key}.json", result)
"""

REPORT = """
from specmill import paths, report, surface
from specmill.files import read_json, write_json
from specmill.stage import open_stage

with open_stage("report", ["methods"]) as stage:
    results = {n: read_json(paths.BENCH / f"{n}.json") for n in params["methods"]}
    machine = {"gpus": [], "cpu_model": "a CPU", "num_usable_cores": 2, "versions": {"vllm": "0"}}
    check = {"num_cells": 0, "num_cells_new": 0, "speed": [], "acceptance": []}
    text = report.comparison(results, check, machine, {"name": "stand-in"}, stage.params.bench, [])
    Path("reports/comparison.md").write_text(text)
    for name, rows in surface.plot_rows(results).items():
        write_json(paths.REPORTS / "plots" / f"{name}.json", rows)
        # a picture without matplotlib, which is slow to import
        svg = f'<svg xmlns="http://www.w3.org/2000/svg"><title>{name}</title></svg>'
        Path(f"reports/{name}.svg").write_text(svg)
    stage.write_metrics(paths.REPORTS / "summary.json", report.summary_metrics(results))
"""


@pytest.fixture(scope="module")
def habits(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("with blanks") / "a repository")
    more = {
        "train": TRAIN,
        "curves": CURVES,
        "predict": PREDICT,
        "bench": BENCH,
        "report": REPORT,
    }
    for path in (workspace.folder / "stages").glob("[a-z]*.py"):
        path.write_text(STAND_IN + more.get(path.stem, ""))
    # no MLflow, whose import takes seconds: stages go on without it
    (workspace.folder / "mlflow.py").write_text("raise ModuleNotFoundError('a stand-in')\n")
    workspace.commit("stand-ins")
    workspace.stages_run("dvc", "repro")
    workspace.commit("everything ran")
    return workspace


@pytest.fixture
def repository(habits: Workspace) -> Iterator[Workspace]:
    """For tests that change it."""
    yield habits
    habits.reset()


@dataclass(frozen=True)
class Views:
    """What DVC shows with K=2 after K=3, and what it says on the way back."""

    ran_at_2: set[str]
    metrics_diff: str
    show_columns: list[str]
    changed_columns: list[str]
    page: str
    warnings: str
    back: str


@pytest.fixture(scope="module")
def views(habits: Workspace) -> Views:
    ran_at_2 = ran(habits.stages_run("dvc", "exp", "run", "-S", "spec.tokens=2"))
    show = ("dvc", "exp", "show", "--csv")
    found = re.search(r"--drop '(.+)'", (habits.folder / "Makefile").read_text())
    assert found, "make show drops no columns"
    dropped = habits.run(*show, "--drop", found.group(1).replace("$$", "$")).stdout
    changed = habits.run(*show, "--only-changed").stdout
    shown = habits.run("dvc", "plots", "show")
    compared = habits.run("dvc", "plots", "diff", "HEAD", "workspace")
    page = (habits.folder / "dvc_plots/index.html").read_text()
    diff = habits.run("dvc", "metrics", "diff").stdout
    back = habits.run("dvc", "exp", "run", "-S", "spec.tokens=3").stdout
    habits.reset()
    # exp show has these in every table as CSV; on a terminal it is one column
    frame = {"Experiment", "rev", "typ", "Created", "parent", "State", "Executor"}
    return Views(
        ran_at_2,
        diff,
        [name for name in dropped.splitlines()[0].split(",") if name not in frame],
        [name for name in changed.splitlines()[0].split(",") if name not in frame],
        page,
        shown.stderr + compared.stderr,
        back,
    )


def read(habits: Workspace, name: str) -> Any:
    return json.loads((habits.folder / name).read_text())


SPECULATING = {"bench@ngram", "bench@eagle3", "predict", "schedule", "check", "report"}
REPLAY = {"replay@none", "replay@ngram", "replay@eagle3"}


def test_another_k_and_back_again_is_served_from_the_run_cache(views: Views) -> None:
    assert views.ran_at_2 == SPECULATING
    for name in ("ngram", "eagle3"):
        assert f"Stage 'bench@{name}' is cached - skipping run" in views.back
    # DVC keeps no run-cache for a stage with plain files in Git; the report takes a second
    assert "Running stage 'report'" in views.back
    assert "Running stage 'bench" not in views.back


def test_metrics_diff_after_another_k_is_the_summary_and_nothing_else(views: Views) -> None:
    lines = [line.split()[:2] for line in views.metrics_diff.splitlines()[1:]]
    others = {f"reports/{name}.json" for name in ("predicted", "schedule", "check", "decision")}
    assert {path for path, _ in lines} - others == {"reports/summary.json"}
    lines = [line for line in lines if line[0] not in others]
    assert [metric for _, metric in lines if metric.startswith("eagle3")] == [
        "eagle3.c1.output_tokens_per_s",
        "eagle3.c1.speedup",
        "eagle3.c1.speedup_high",
        "eagle3.c1.speedup_low",
        "eagle3.c8.output_tokens_per_s",
        "eagle3.c8.speedup",
        "eagle3.c8.speedup_high",
        "eagle3.c8.speedup_low",
        "eagle3.num_speculative_tokens",
    ]
    assert len(lines) == 18


def test_make_show_has_about_a_dozen_columns(views: Views) -> None:
    assert views.show_columns == [
        "eagle3.c1.acceptance_length",
        "eagle3.c1.speedup",
        "eagle3.c8.acceptance_length",
        "eagle3.c8.speedup",
        "ngram.c1.acceptance_length",
        "ngram.c1.speedup",
        "ngram.c8.acceptance_length",
        "ngram.c8.speedup",
        "vocab.draft_vocab_size",
        "train.lr",
        "spec.tokens",
    ]


def test_exp_show_of_what_changed_is_the_summary_the_parameter_and_two_folders(
    views: Views,
) -> None:
    folders = {name for name in views.changed_columns if "." not in name}
    assert folders == {"data/bench", "reports/bench"}
    assert "spec.tokens" in views.changed_columns
    figures = [name for name in views.changed_columns if name.split(".")[0] in ("ngram", "eagle3")]
    assert len(figures) == 18


def test_every_chart_is_on_the_page_with_both_revisions_and_no_warning(views: Views) -> None:
    assert "WARNING" not in views.warnings
    assert "ERROR" not in views.warnings
    for title in (
        "none, throughput by prompt type",
        "ngram, throughput by prompt type",
        "eagle3, throughput by prompt type",
        "Acceptance by position",
        "Accepted share of drafts by prompt type and position, %",
        "Speed-up by prompt type, with 95% intervals",
        "Speed-up against load, with 95% intervals",
        "Change of speed by K and load, %",
        "Predicted change of speed by K and load, %",
        "Step time by requests in flight and K",
        "Held-out accuracy",
        "held-out loss",
    ):
        assert f'"{title}"' in views.page, title
    assert "<DVC_METRIC_" not in views.page
    for revision in ("HEAD", "workspace"):
        assert f'"rev": "{revision}"' in views.page
        for picture in ("acceptance", "acceptance_by_category", "speedup", "speedup_by_load",
                        "speedup_by_k"):  # fmt: skip
            assert f"{revision}_reports_{picture}.svg" in views.page


def test_a_sweep_is_in_rows_and_table_while_the_summary_keeps_the_headline(
    repository: Workspace,
) -> None:
    stages = repository.stages_run("dvc", "exp", "run", "-S", "spec.sweep=[1,2]")
    assert ran(stages) == SPECULATING
    rows = read(repository, "reports/bench/eagle3.json")["rows"]
    assert {row["num_speculative_tokens"] for row in rows} == {1, 2, 3}
    assert read(repository, "reports/summary.json")["eagle3"]["num_speculative_tokens"] == 3
    table = (repository.folder / "reports/comparison.md").read_text().split("\n## ")[0]
    assert [line for line in table.splitlines() if line.startswith("| eagle3")] == [
        "| eagle3 | 1 | **+10% (+5% to +15%)** | **+10% (+5% to +15%)** |",
        "| eagle3 | 2 | **+20% (+15% to +25%)** | **+20% (+15% to +25%)** |",
        "| eagle3 | 3 | **+30% (+25% to +35%)** | **+30% (+25% to +35%)** |",
    ]
    done = repository.run("dvc", "plots", "show")
    assert "WARNING" not in done.stderr


def test_an_experiment_from_a_temporary_folder_can_be_applied_and_branched(
    repository: Workspace,
) -> None:
    command = ("dvc", "exp", "run", "--temp", "--name", "apart", "-S", "spec.tokens=1")
    assert ran(repository.stages_run(*command)) == SPECULATING
    assert read(repository, "reports/summary.json")["ngram"]["num_speculative_tokens"] == 3
    repository.run("dvc", "exp", "branch", "apart", "branched")
    summary = repository.run("git", "show", "branched:reports/summary.json").stdout
    assert json.loads(summary)["ngram"]["num_speculative_tokens"] == 1
    repository.run("dvc", "exp", "apply", "apart")
    assert read(repository, "reports/bench/ngram.json")["num_speculative_tokens"] == 1
    # applied is as good as run
    assert ran(repository.stages_run("dvc", "repro")) == set()


def test_from_a_sub_folder_dvc_works_and_what_runs_stages_needs_to_be_sent_up(
    repository: Workspace,
) -> None:
    below = ("env", "-C", "data", "dvc")
    stages = repository.stages_run(*below, "repro", "../dvc.yaml")
    assert ran([stage.removeprefix("../dvc.yaml:") for stage in stages]) == set()
    # `exp run -S` looks for params.yaml where it stands
    assert repository.run(*below, "exp", "run", "-S", "spec.tokens=2", check=False).returncode != 0
    repository.run(*below, "--cd", "..", "exp", "run", "-S", "spec.tokens=2")
    assert read(repository, "reports/summary.json")["ngram"]["num_speculative_tokens"] == 2
    assert "../reports/summary.json" in repository.run(*below, "metrics", "diff").stdout
    for command in (("plots", "diff"), ("exp", "show", "--csv"), ("queue", "status")):
        assert "ERROR" not in repository.run(*below, *command).stderr
    assert "Speed-up" in (repository.folder / "data/dvc_plots/index.html").read_text()
    shutil.rmtree(repository.folder / "data/dvc_plots")


@pytest.fixture
def queue(repository: Workspace) -> Iterator[Workspace]:
    """No worker is left behind, whatever happens."""
    yield repository
    repository.run("dvc", "queue", "stop", "--kill")
    pids = [
        int(path.read_text().split()[0])
        for path in (repository.folder / ".dvc/tmp/exps/celery").glob("*.pid")
    ]
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "workers to end")


def wait_for(is_done: Callable[[], bool], what: str) -> None:
    """Far longer than it takes here: celery starts slowly on a busy machine."""
    deadline = time.monotonic() + 300
    while not is_done():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(2)  # asking takes a second of a core, too


def run_queue(queue: Workspace, workers: int, *overrides: str) -> list[tuple[int, set[str]]]:
    """Queue a grid and work it off: K of each experiment, and what was executed for it."""
    settings = [word for override in overrides for word in ("-S", override)]
    queued = queue.run("dvc", "exp", "run", "--queue", *settings).stdout
    names = re.findall(r"Queued experiment '(\S+)'", queued)
    queue.run("dvc", "queue", "start", "-j", str(workers))

    def status() -> dict[str, str]:
        lines = [line.split() for line in queue.run("dvc", "queue", "status").stdout.splitlines()]
        return {line[1]: line[-1] for line in lines if len(line) > 3 and line[1] in names}

    wait_for(lambda: set(status().values()) <= {"Success", "Failed"}, "the queue")
    logs = {name: queue.run("dvc", "queue", "logs", name).stdout for name in names}
    assert set(status().values()) == {"Success"}, logs
    found = []
    for name in names:
        ref = queue.run("git", "for-each-ref", "--format=%(refname)", f"refs/exps/**/{name}").stdout
        summary = queue.run("git", "show", f"{ref.strip()}:reports/summary.json").stdout
        stages = set(re.findall(r"Running stage '(\S+)'", logs[name]))
        found.append((json.loads(summary)["eagle3"]["num_speculative_tokens"], stages - ALWAYS))
    return sorted(found)


@pytest.mark.long
def test_one_worker_takes_a_queue_of_three_and_runs_benches_and_report_only(
    queue: Workspace,
) -> None:
    done = run_queue(queue, 1, "spec.tokens=1,2,3", "spec.sweep=[4]")
    assert done == [(1, SPECULATING), (2, SPECULATING), (3, SPECULATING)]
    assert read(queue, "reports/summary.json")["eagle3"]["num_speculative_tokens"] == 3


@pytest.mark.long
def test_two_workers_never_run_one_stage_at_the_same_time(queue: Workspace) -> None:
    # another `max_tokens` makes both of them run bench@none with the same inputs
    done = run_queue(queue, 2, "spec.tokens=1,2", "bench.max_tokens=72")
    assert [k for k, _ in done] == [1, 2]
    for _, stages in done:
        assert SPECULATING <= stages <= SPECULATING | {"bench@none"} | REPLAY
