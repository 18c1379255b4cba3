"""A stage that measures a row: what it writes, with a schedule of K and without one."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specmill import bench_stage, compat, paths
from specmill.bench_stage import measure_row
from specmill.files import read_json, write_json
from specmill.params import Method
from specmill.params_file import load_params
from specmill.rows import headline_rows
from specmill.samples import write_samples
from specmill.scheduled import scheduled_configs
from specmill.stage import Stage
from specmill.tracking import Tracker
from tests.benched import bench_section, prompts
from tests.decided import HARDWARE
from tests.lab import Lab
from tests.workspace import ROOT

VERSIONS = {"vllm": "0.32.0", "torch": "2.13.0"}
VERIFIER = {"name": "tiny", "fingerprint": "f1", "vocab_size": 100, "max_model_len": 64}
NGRAM = Method(method="ngram", section="spec", head="models/verifier/identity.json",
               settings={"prompt_lookup_min": 2, "prompt_lookup_max": 4})  # fmt: skip
RANGES = [[1, 1, 3], [2, 2, 0]]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A repository with two prompt types, whose servers are fakes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "CACHE", tmp_path / ".cache")
    monkeypatch.setattr(compat, "engine_versions", lambda: VERSIONS)
    write_json(paths.IDENTITY, VERIFIER)
    write_json(paths.VERIFIER / "config.json", {})
    write_json(paths.HARDWARE, HARDWARE)
    samples = prompts("coding", 4, 10) + prompts("maths", 4, 30)
    write_samples(paths.PREPARED / "bench.parquet", samples)
    monkeypatch.setattr(bench_stage, "warmup_prompts", lambda *_: [[90], [91]])
    found = Lab(tmp_path)
    monkeypatch.setattr(bench_stage, "server_starter", lambda *_: found.start)
    return found


def measured(planned: Any) -> dict[str, Any]:
    """reports/bench/ngram_scheduled.json of a row with this schedule."""
    bench = bench_section(concurrency=[1, 2], requests=1, rounds=1)
    params = load_params(ROOT / "params.yaml").model_copy(update={"bench": bench})
    stage = Stage("bench_scheduled@ngram", params, Tracker(None, "", None), 0.5)
    configure = partial(scheduled_configs, "ngram", NGRAM, {"ngram": planned})
    about = {"schedule": planned["ranges"]}
    measure_row(stage, "ngram_scheduled", NGRAM, configure, headline=0, about=about)
    return dict(read_json(paths.BENCH / "ngram_scheduled.json"))


def test_a_row_with_a_schedule_is_measured_as_one_with_the_largest_k(lab: Lab) -> None:
    found = measured({"ranges": RANGES, "reason": None})
    assert lab.starts == ["reference_k0_0", "method_k3_0"]
    assert found["num_speculative_tokens"] == 3
    assert found["schedule"] == RANGES
    assert (found["method"], found["served_by"]) == ("ngram_scheduled", "ngram")
    assert found["provenance"]["waited_s"] == 0.5
    rows = [row for row in headline_rows(found) if row["category"] == "all"]
    assert [row["concurrency"] for row in rows] == [1, 2]
    # a fake accepts 2 and 1 of 2 drafts at the first two positions: 1 + 3 / 2
    assert [row["acceptance_length"] for row in rows] == [2.5, 2.5]
    cells = read_json(paths.BENCH_RAW / "ngram_scheduled" / "cells.json")["cells"]
    assert {cell["k"] for cell in cells if cell["role"] == "method"} == {3}


def test_finished_cells_are_forgotten_once_the_stage_ended_well(lab: Lab) -> None:
    measured({"ranges": RANGES, "reason": None})
    assert not list(Path(".cache/bench_cells").rglob("*.json"))


@pytest.mark.parametrize(
    ("planned", "why"),
    [
        ({"ranges": None, "reason": "no step times"}, "there is no schedule of K: no step times"),
        ({"ranges": [[1, 8, 0]], "reason": None},
         "no K is predicted to be faster than no speculation at 1 to 8 requests in flight"),
    ],
)  # fmt: skip
def test_without_a_schedule_that_drafts_no_server_is_started_and_the_row_says_why(
    lab: Lab, planned: dict[str, Any], why: str
) -> None:
    found = measured(planned)
    assert lab.starts == []
    assert found["not_served"] == why
    assert found["num_speculative_tokens"] == 0
    assert found["schedule"] == planned["ranges"]
    assert all(row["output_tokens_per_s"] is None for row in found["rows"])
    assert read_json(paths.BENCH_RAW / "ngram_scheduled" / "cells.json")["cells"] == []


def test_an_engine_that_does_not_start_with_a_schedule_is_a_row_with_the_reason(lab: Lab) -> None:
    lab.refused = {"method_k3"}
    found = measured({"ranges": RANGES, "reason": None})
    assert found["not_served"] == "vLLM does not start with it: ValueError: no such head"
    assert json.loads((paths.BENCH / "ngram_scheduled.json").read_text()) == found
