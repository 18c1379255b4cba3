"""K by the number of requests in flight, served for real: the pipeline's head, uncompiled."""

from typing import Any

import pytest
from ruamel.yaml import YAML

from specmill.files import read_json, write_json
from tests.workspace import Workspace

pytestmark = pytest.mark.e2e

RANGES = [[1, 2, 3], [3, 8, 0]]
"""Three drafts for one request and two, none for more: the pipeline's loads are 1 and 4."""


@pytest.fixture(scope="module")
def measured(pipeline: Workspace) -> dict[str, Any]:
    """The bench of a schedule that is not what predictions would give."""
    yaml, file = YAML(typ="safe"), pipeline.folder / "params.yaml"
    params = yaml.load(file.read_text())
    params["scheduled"] = {"eagle3": {"method": "eagle3", "head": "models/eagle3"}}
    with file.open("w") as out:
        yaml.dump(params, out)
    schedule = pipeline.folder / "reports/schedule.json"
    schedule.unlink(missing_ok=True)  # a link into DVC's cache
    write_json(schedule, {"eagle3": {"ranges": RANGES, "reason": None}})
    # the shared pipeline's own store keeps what it had
    pipeline.environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{pipeline.folder}/.cache/k.db"
    try:
        pipeline.run("python", "-m", "stages.bench_scheduled", "eagle3")
        return dict(read_json(pipeline.folder / "reports/bench/eagle3_scheduled.json"))
    finally:
        del pipeline.environment["MLFLOW_TRACKING_URI"]
        pipeline.reset()
        pipeline.run("git", "clean", "-fdq")


def row_at(result: dict[str, Any], load: int) -> dict[str, Any]:
    (row,) = (
        row for row in result["rows"] if (row["concurrency"], row["category"]) == (load, "all")
    )
    return dict(row)


def test_a_schedule_is_served_and_measured_as_a_row(measured: dict[str, Any]) -> None:
    assert "not_served" not in measured
    assert measured["schedule"] == RANGES
    alone = row_at(measured, 1)
    assert alone["num_speculative_tokens"] == 3
    assert min(alone["speedup"], alone["num_drafts"]) > 0
    assert 1 <= alone["tokens_per_step"] <= 4


def test_one_request_is_drafted_for_at_every_step_and_four_only_as_they_end(
    measured: dict[str, Any],
) -> None:
    """A step without drafts gives one token: alone there is hardly any, of four most are."""
    alone, four = row_at(measured, 1), row_at(measured, 4)
    assert alone["num_drafts"] * (alone["tokens_per_step"] or 0) > 0.8 * alone["output_tokens"]
    assert four["num_drafts"] / four["output_tokens"] < alone["num_drafts"] / alone["output_tokens"]
