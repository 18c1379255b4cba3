"""What DVC's templates ask for is in the rows: Vega-Lite draws nothing for a misspelt field."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dvc_render.vega import VegaRenderer  # type: ignore[import-untyped]

from specmill.params_file import read_yaml
from specmill.surface import plot_rows
from tests.surfaces import sixteen_methods

ROOT = Path(__file__).parent.parent
PIPELINE = read_yaml(ROOT / "dvc.yaml")
PLOTS = {
    Path(path).stem: properties
    for plot in PIPELINE["stages"]["report"]["plots"]
    for path, properties in plot.items()
}
BENCH_ROW = {
    "num_speculative_tokens", "concurrency", "rate", "context", "category", "output_tokens_per_s",
    "reference_tokens_per_s", "speedup", "speedup_low", "speedup_high", "verdict",
    "acceptance_length", "ttft_ms_p50", "itl_ms_p50",
}  # fmt: skip


def walk(tree: Any) -> Iterator[dict[str, Any]]:
    """Every object of a template."""
    if isinstance(tree, dict):
        yield tree
    for child in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(child, dict | list):
            yield from walk(child)


def asked_for(template: dict[str, Any]) -> set[str]:
    """Fields that a filled template reads and does not make itself."""
    objects = list(walk(template))
    read = {node["field"] for node in objects if isinstance(node.get("field"), str)}
    for node in objects:
        for expression in (node.get(name) for name in ("calculate", "filter", "test")):
            read |= set(re.findall(r"datum(?:\.|\[')(\w+)", expression or ""))
    made = {node["as"] for node in objects if isinstance(node.get("as"), str)}
    return read - made - {"rev"}


def filled(rows: list[dict[str, Any]], properties: dict[str, Any]) -> dict[str, Any]:
    """A template as DVC fills it for two revisions."""
    names = ("x", "y", "x_label", "y_label", "title", "template")
    points = [row | {"rev": revision} for revision in ("HEAD", "workspace") for row in rows]
    wanted = {name: properties[name] for name in names if name in properties}
    renderer = VegaRenderer(points, "plot", template_dir=str(ROOT / ".dvc/plots"), **wanted)
    specification: dict[str, Any] = json.loads(renderer.partial_html())
    assert "DVC_METRIC" not in json.dumps(specification)
    assert specification.pop("data") == {"values": points}
    return specification


def test_the_pipeline_plots_every_list_of_rows_and_shows_every_picture() -> None:
    names = list(plot_rows(sixteen_methods(contexts=(0,))))
    pictures = [f"reports/{name}.svg" for name in names]
    outs = [path for out in PIPELINE["stages"]["report"]["outs"] for path in out]
    assert list(PLOTS) == names
    assert [path for path in outs if path.endswith(".svg")] == pictures
    assert [plot for plot in PIPELINE["plots"] if isinstance(plot, str)] == pictures


@pytest.mark.parametrize("name", PLOTS)
def test_every_field_of_a_template_is_in_the_rows_it_draws(name: str) -> None:
    rows = plot_rows(sixteen_methods(contexts=(0,)))[name]
    template = filled(rows, PLOTS[name])
    assert asked_for(template) <= set(rows[0])
    assert PLOTS[name]["x"] in asked_for(template)
    assert PLOTS[name]["y"] in asked_for(template)
    assert template["title"]["text"] == PLOTS[name]["title"]


def test_every_field_of_the_bench_template_is_in_a_bench_row() -> None:
    (plot,) = PIPELINE["stages"]["bench"]["do"]["plots"]
    (properties,) = plot.values()
    rows = [dict.fromkeys(sorted(BENCH_ROW))]
    assert asked_for(filled(rows, properties)) == BENCH_ROW


def test_a_value_that_is_null_is_left_out_and_not_drawn_as_zero() -> None:
    for name in PLOTS:
        value = "acceptance_rate" if name.startswith("acceptance") else "speedup"
        template = json.loads((ROOT / f".dvc/plots/{PLOTS[name]['template']}.json").read_text())
        assert {"filter": f"isValid(datum['{value}'])"} in template["transform"], name


def test_no_template_is_left_unused() -> None:
    used = {
        properties["template"]
        for stage in PIPELINE["stages"].values()
        for plot in stage.get("do", stage).get("plots", [])
        for properties in plot.values()
    }
    used |= {plot[name]["template"] for plot in PIPELINE["plots"] if isinstance(plot, dict)
             for name in plot}  # fmt: skip
    assert {path.stem for path in (ROOT / ".dvc/plots").glob("*.json")} == used
