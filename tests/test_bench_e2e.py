"""The bench in its other forms: one engine at a time, an open loop, a context."""

from pathlib import Path
from typing import Any

import pytest

from specmill.files import read_json
from specmill.records import read_requests
from tests.workspace import Workspace

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def result(pipeline: Workspace) -> dict[str, Any]:
    """bench@ngram with its reference before and after it, at four in flight and eight a second."""
    changed = {
        "bench.reference": "bracket",
        "bench.rounds": 2,
        "bench.concurrency": "[4]",
        "bench.rates": "[8.0]",
        "bench.seconds": 3.0,
        "bench.context": "[0, 256]",
    }
    given = [word for key, value in changed.items() for word in ("-S", f"{key}={value}")]
    # the shared pipeline's own store keeps what it had
    pipeline.environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{pipeline.folder}/.cache/bench.db"
    try:
        pipeline.run("dvc", "exp", "run", *given, "bench@ngram")
        folder = pipeline.folder
        requests = read_requests(folder / "data/bench/ngram/requests.parquet")
        return dict(read_json(folder / "reports/bench/ngram.json")) | {"requests": requests}
    finally:
        del pipeline.environment["MLFLOW_TRACKING_URI"]
        pipeline.reset()


def test_the_reference_is_measured_before_and_after_with_three_engine_starts(
    result: dict[str, Any], folder: Path
) -> None:
    assert list(result["engine"]) == ["method_k3_0", "reference_k0_0", "reference_k0_1"]
    order = list(dict.fromkeys((r["round"], r["role"]) for r in result["requests"]))
    assert order == [(0, "reference"), (0, "method"), (1, "method"), (1, "reference")]


def test_every_load_and_context_has_a_row(result: dict[str, Any], folder: Path) -> None:
    places = {
        (row["concurrency"], row["rate"], row["context"])
        for row in result["rows"]
        if row["category"] == "all"
    }
    assert places == {(4, None, 0), (4, None, 256), (None, 8.0, 0), (None, 8.0, 256)}
    longest = {
        context: max(r["num_prompt_tokens"] for r in result["requests"] if r["context"] == context)
        for context in (0, 256)
    }
    assert longest[256] >= longest[0] + 100


def test_requests_of_an_open_loop_arrive_whatever_is_in_flight(result: dict[str, Any]) -> None:
    arrivals = [r["sent_s"] for r in result["requests"] if r["rate"] == 8.0]
    assert min(arrivals) == 0.0
    assert len(arrivals) > 0


def test_what_the_references_drifted_widens_the_interval(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        if row["category"] == "all" and row["rate"] is None:
            # smoke settings have few prompts: a set that comes again counts once
            assert 7 <= row["num_pairs"] <= 2 * 7
            assert row["speedup_low"] < row["speedup"] < row["speedup_high"]
