"""The repository's promises: dvc.yaml, params.yaml, README and code agree with each other."""

import ast
import re
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
from ruamel.yaml import YAML

from specmill import paths
from specmill.methods import METHODS, check_methods
from specmill.params import Params
from specmill.params_file import load_params
from specmill.section import Section
from specmill.state import FOREACH
from tests.workspace import ROOT

FRAME = {
    "specmill/liveness.py",
    "specmill/masked.py",
    "specmill/params.py",
    "specmill/params_bench.py",
    "specmill/params_curves.py",
    "specmill/params_data.py",
    "specmill/params_file.py",
    "specmill/params_heads.py",
    "specmill/params_imported.py",
    "specmill/params_parallel.py",
    "specmill/params_scheduled.py",
    "specmill/params_urls.py",
    "specmill/paths.py",
    "specmill/processes.py",
    "specmill/revision.py",
    "specmill/section.py",
    "specmill/stage.py",
    "specmill/state.py",
    "specmill/sync.py",
    "specmill/tracking.py",
}
"""Modules around a stage that cannot change its outputs: log, MLflow, exit status; and those that
check params.yaml and say where things lie, whose values dvc.yaml tracks by themselves: a section
for a new stage must not train again."""

TARGETS = ("kimi-k2.5-8x-rtx-pro-6000", "kimi-k2.5-b200", "qwen3-8b-1x-h200")
"""Profiles for real verifiers; tests/test_targets.py has more of them."""

PIPELINE: dict[str, Any] = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())
STAGES: dict[str, dict[str, Any]] = {
    name: stage.get("do", stage) for name, stage in PIPELINE["stages"].items()
}


def tracked_files() -> list[str]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], check=True, capture_output=True, text=True
    )
    return listed.stdout.splitlines()


def is_main_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def imported_modules(path: Path) -> set[str]:
    """Files of this repository that a file imports, or names as a string like specmill.x."""
    found = set()
    tree = ast.parse(path.read_text())
    # what a module does as a program of its own, no stage that imports it does
    tree.body = [node for node in tree.body if not is_main_block(node) or "stages" in path.parts]
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if re.fullmatch(r"specmill(\.\w+)+", node.value) else []
        for name in names:
            module = ROOT / (name.replace(".", "/") + ".py")
            if name.startswith("specmill") and module.is_file():
                found.add(str(module.relative_to(ROOT)))
            if name == "specmill.methods":
                found |= {f"specmill/methods/{method}.py" for method in METHODS}
    return found


def closure(path: str) -> set[str]:
    seen: set[str] = set()
    todo = {path}
    while todo:
        seen |= todo
        todo = set().union(*(imported_modules(ROOT / name) for name in todo)) - seen
    return seen - FRAME


@pytest.mark.parametrize("name", sorted(set(STAGES) - {"hardware", "sources"}))
def test_a_stage_depends_on_exactly_the_modules_it_imports(name: str) -> None:
    listed = {dep for dep in STAGES[name]["deps"] if dep.endswith(".py")}
    assert len(set(STAGES[name]["deps"])) == len(STAGES[name]["deps"])
    expected = closure(f"stages/{name}.py")
    if name in ("bench", "bench_scheduled", "sampling", "replay"):
        # each method depends on its own file, so that adding one reruns none
        expected = {f for f in expected if not f.startswith("specmill/methods/")}
        expected.add("specmill/methods/${item.method}.py")
    if name == "curves":  # depends on their folder, so that a new one is listed nowhere
        expected = {f for f in expected if not f.startswith("specmill/methods/")}
        assert "specmill/methods" in STAGES[name]["deps"]
    assert listed == expected


def test_every_stage_is_a_file_with_the_same_name() -> None:
    assert {path.stem for path in (ROOT / "stages").glob("[a-z]*.py")} == set(STAGES)
    for name, stage in STAGES.items():
        assert stage["cmd"].split()[:3] == ["python", "-m", f"stages.{name}"]


def test_a_stage_reads_only_the_params_sections_it_lists() -> None:
    for name, stage in STAGES.items():
        source = (ROOT / "stages" / f"{name}.py").read_text()
        read = set(re.findall(r"stage\.params\.(\w+)", source)) - {"runtime", "method"}
        listed = {
            s.replace("${item.section}", "spec").split(".")[0] for s in stage.get("params", [])
        }
        assert read <= listed, name
        assert listed <= set(Params.model_fields), name


def test_every_parameter_is_read_somewhere() -> None:
    code = "\n".join(
        path.read_text()
        for folder in ("specmill", "stages")
        for path in (ROOT / folder).rglob("*.py")
        if not path.name.startswith("params")
    )
    for section, field in Params.model_fields.items():
        # an entry of a section such as `medusa` is the model
        model = (get_args(field.annotation) or (field.annotation,))[-1]
        if isinstance(model, type) and issubclass(model, Section):
            for key in model.model_fields:
                assert re.search(rf"\.{key}\b", code), f"{section}.{key} is read nowhere"


@pytest.mark.parametrize(
    "profile",
    [
        "params.yaml",
        *(f"profiles/{name}.yaml" for name in ("smoke", "all-methods", "demo-h200", *TARGETS)),
    ],
)
def test_params_files_are_valid_and_all_their_rows_can_be_made(profile: str) -> None:
    params = load_params(ROOT / profile)
    check_methods(params)
    assert {"none", "ngram", "eagle3"} <= set(params.methods)


def test_the_profile_of_all_methods_has_a_row_for_each_and_the_sections_of_the_default() -> None:
    every = load_params(ROOT / "profiles/all-methods.yaml")
    assert {row.method for row in every.methods.values()} == set(METHODS)
    default = load_params(ROOT / "params.yaml")
    # so that going back to params.yaml reruns nothing but the report
    for section in ("verifier", "prepare", "extract", "vocab", "train", "spec", "bench"):
        assert getattr(every, section) == getattr(default, section), section
    assert all(every.methods[name] == row for name, row in default.methods.items())


def test_the_profile_of_a_mixture_of_experts_serves_nothing_that_has_to_be_trained() -> None:
    params = load_params(ROOT / "profiles/demo-moe.yaml")
    check_methods(params)
    assert params.verifier.experts is not None
    assert {row.method for row in params.methods.values()} == {"none", "ngram"}
    assert {row.head for row in params.methods.values()} == {str(paths.IDENTITY)}
    assert sorted([params.spec.tokens, *params.spec.sweep]) == [1, 3, 8]


def test_the_profile_of_one_gpu_checks_predictions_at_points_that_no_curve_has() -> None:
    params = load_params(ROOT / "profiles/demo-h200.yaml")
    assert {params.spec.tokens, *params.spec.sweep} - set(params.curves.tokens) == {2, 5}
    assert set(params.bench.concurrency) - set(params.curves.batch) == {8, 32}


def test_no_profile_is_left_untested() -> None:
    assert {path.name for path in (ROOT / "profiles").glob("*.yaml")} == {
        "all-methods.yaml", "demo-h200.yaml", "demo-moe.yaml", "smoke.yaml",
        *(f"{name}.yaml" for name in TARGETS),  # tests/test_targets.py
    }  # fmt: skip


def test_methods_depend_on_spec_exactly_when_they_speculate() -> None:
    profiles = (f"profiles/{name}.yaml" for name in ("all-methods", "demo-h200", "demo-moe"))
    for profile in ("params.yaml", *profiles, *(f"profiles/{name}.yaml" for name in TARGETS)):
        for name, row in load_params(ROOT / profile).methods.items():
            assert row.section == ("bench" if row.method == "none" else "spec"), name


def test_outputs_are_never_persistent_and_only_report_keeps_files_in_git() -> None:
    for name, stage in STAGES.items():
        for out in stage.get("outs", []):
            flags = next(iter(out.values())) if isinstance(out, dict) else {}
            assert "persist" not in flags, name
            assert flags.get("cache", True) or name == "report", name
        for kind in ("metrics", "plots"):
            for out in stage.get(kind, []):
                assert next(iter(out.values()))["cache"] is False, name


def test_every_path_of_the_library_appears_in_the_pipeline() -> None:
    text = (ROOT / "dvc.yaml").read_text()
    for name in ("HARDWARE", "VERIFIER", "IDENTITY", "VERIFIER_HEAD", "SOURCES", "PREPARED",
                 "HIDDEN_STATES", "VOCAB", "EAGLE3", "BENCH", "BENCH_RAW"):  # fmt: skip
        assert str(getattr(paths, name)) in text + (ROOT / "params.yaml").read_text(), name


def test_a_stage_takes_no_argument_but_the_entry_it_is_made_for() -> None:
    for name, stage in PIPELINE["stages"].items():
        source = (ROOT / "stages" / f"{name}.py").read_text()
        assert ("sys.argv" in source) == ("foreach" in stage), name
        assert "argparse" not in source


def test_the_readme_map_is_the_tree() -> None:
    readme = (ROOT / "README.md").read_text()
    mapped = re.search(r"<!-- map -->\n```\n(.*?)```", readme, re.DOTALL)
    assert mapped, "README.md has no map between <!-- map --> and its code block"
    listed = {line.split()[0].rstrip("/") for line in mapped.group(1).splitlines() if line.strip()}
    expected = {
        name
        for name in tracked_files()
        if re.fullmatch(
            r"(specmill|stages|specmill/methods|profiles|docs|requirements)/[^/]+", name
        )
        and not name.endswith("__init__.py")
    }
    assert listed == expected


LINKED_HOSTS = {
    "127.0.0.1",
    "HOST1",  # in examples
    "HOST2",
    "docs.vllm.ai",  # in the warnings that vLLM logs
    "download.pytorch.org",
    "github.com",
    "vega.github.io",
    "www.apache.org",
    "www.w3.org",  # the name space of SVG
}


def text_files() -> list[Path]:
    paths = (ROOT / name for name in tracked_files())
    return [path for path in paths if path.is_file() and path.suffix not in (".svg", ".png")]


def test_only_known_hosts_are_named_and_no_package_index() -> None:
    for path in text_files():
        for host in re.findall(r"https?://([^/\s\"')\]\\]+)", path.read_text(errors="replace")):
            assert host.split(":")[0] in LINKED_HOSTS, f"{path.relative_to(ROOT)}: {host}"


def test_no_file_names_a_path_of_this_machine() -> None:
    places = {f"{Path.home()}/", str(ROOT)}
    for path in text_files():
        text = path.read_text(errors="replace")
        assert not any(place in text for place in places), path.relative_to(ROOT)


def test_generated_data_stays_out_of_git() -> None:
    for name in tracked_files():
        assert not re.match(r"(models|data/(?!prompts/|\.gitignore))/(?!\.gitignore)\w", name), name
        if (ROOT / name).is_file():
            assert (ROOT / name).stat().st_size < 600_000, name


def test_files_and_functions_stay_short() -> None:
    for folder in ("specmill", "stages"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            assert len(text.splitlines()) <= 300, f"{path.name}: {len(text.splitlines())} lines"
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or 0) - node.lineno + 1
                    assert lines <= 50, f"{path.name}: {node.name} has {lines} lines"


def test_what_is_synced_to_mlflow_knows_the_entries_of_every_stage() -> None:
    by_stage = {
        name: stage["foreach"].strip("${}")
        for name, stage in PIPELINE["stages"].items()
        if "foreach" in stage
    }
    assert by_stage == FOREACH
