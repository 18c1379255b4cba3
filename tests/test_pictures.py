import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from specmill.intervals import FASTER, SLOWER, UNDECIDED
from specmill.palette import looks
from specmill.pictures import PICTURES
from specmill.surface import plot_rows
from tests.benches import comparable
from tests.surfaces import place, sixteen_methods

Rows = list[dict[str, Any]]
Draw = Callable[[str, Rows], Any]
LOOKS = looks([*sixteen_methods(), *(f"{name} again" for name in sixteen_methods())])


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Draw:
    """Draws a plot's rows and gives matplotlib's figure instead of a file."""

    def drawn(name: str, rows: Rows) -> Any:
        figures: list[Any] = []
        with monkeypatch.context() as patched:
            patched.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
            PICTURES[name](rows, tmp_path / "picture.svg", LOOKS)
        return figures[0]

    return drawn


def small() -> dict[str, Rows]:
    results = sixteen_methods(ks=(2, 1), loads=(1, 8, 0.5), contexts=(0, 64))
    return plot_rows({name: results[name] for name in ("none", "ngram", "eagle3", "suffix")})


def speedups(*rows: tuple[str, int, float, float | None, str | None]) -> Rows:
    """Rows of method, concurrency, speed-up, half the interval, verdict."""
    measured = {
        method: {
            "num_speculative_tokens": 2,
            "rows": [
                place(2, concurrency, 0)
                | {
                    "speedup": speedup,
                    "speedup_low": half and speedup - half,
                    "speedup_high": half and speedup + half,
                    "verdict": verdict,
                }
                for name, concurrency, speedup, half, verdict in rows
                if name == method
            ],
        }
        for method in dict.fromkeys(row[0] for row in rows)
    }
    return plot_rows(measured)["speedup_by_k"]


MIXED = (
    ("ngram", 1, 1.5, 0.25, FASTER),
    ("ngram", 8, 0.75, None, None),
    ("eagle3", 1, 1.0, 0.5, UNDECIDED),
    ("eagle3", 8, 0.25, 0.125, SLOWER),
)


def test_every_plot_has_a_picture() -> None:
    assert list(PICTURES) == list(small())


def test_equal_rows_give_equal_bytes_and_other_rows_give_others(tmp_path: Path) -> None:
    results = sixteen_methods(ks=(2,), loads=(1,), contexts=(0,))
    results = {name: results[name] for name in ("none", "ngram", "eagle3")}
    for name, rows in plot_rows(results).items():
        for file, drawn in (("a", rows), ("b", rows), ("c", rows[1:])):
            PICTURES[name](drawn, tmp_path / f"{file}.svg", LOOKS)
        first, second, third = ((tmp_path / f"{file}.svg").read_bytes() for file in "abc")
        assert first == second, name
        assert first != third, name
        assert b"<svg" in first
        assert not re.search(rb"\d\d:\d\d:\d\d", first), f"{name} has the time in it"


def test_without_a_value_a_picture_says_so_and_has_no_panel(draw: Draw) -> None:
    for name, rows in plot_rows({"none": sixteen_methods()["none"]}).items():
        figure = draw(name, rows)
        assert not figure.axes, name
        assert "nothing was measured" in [text.get_text() for text in figure.texts], name


def test_the_lines_of_sixteen_methods_differ_in_colour_marker_or_dash(draw: Draw) -> None:
    rows = plot_rows(sixteen_methods(loads=(1,), contexts=(0,)))["acceptance"]
    spare = [row | {"method": f"{row['method']} again"} for row in rows]
    (axes,) = draw("acceptance", rows + spare).axes
    looks = {
        (line.get_color(), line.get_marker(), line.get_linestyle(), line.get_markerfacecolor())
        for line in axes.lines
    }
    assert len(axes.lines) == 28
    assert len(looks) >= 24


def test_acceptance_is_drawn_at_its_rate_and_next_to_its_position(draw: Draw) -> None:
    rows = small()["acceptance"]
    figure = draw("acceptance", rows)
    titles = ["1 in flight", "8 in flight", "1 in flight +64", "8 in flight +64", "0.5/s",
              "0.5/s +64"]  # fmt: skip
    assert [axes.get_title() for axes in figure.axes] == titles
    for axes in figure.axes:
        here = [row for row in rows if row["load"] == axes.get_title()]
        rates = [rate for line in axes.lines for rate in line.get_ydata()]
        assert sorted(rates) == sorted(row["acceptance_rate"] for row in here)
        assert all(
            abs(x - position) < 0.5
            for line in axes.lines
            for position, x in enumerate(line.get_xdata())
        )


def test_loads_with_the_same_acceptance_share_a_panel(draw: Draw) -> None:
    position = {"method": "eagle3", "position": 0}
    rows = [
        place(2, load, 0) | position | {"load": name, "acceptance_rate": rate}
        for load, name, rate in ((1, "1 in flight", 0.501), (8, "8 in flight", 0.499),
                                 (32, "32 in flight", 0.51))
    ]  # fmt: skip
    figure = draw("acceptance", rows)
    assert [axes.get_title() for axes in figure.axes] == [
        "1 in flight; 8 in flight",
        "32 in flight",
    ]


def test_a_method_has_one_colour_and_marker_in_every_picture_and_none_is_grey(draw: Draw) -> None:
    rows = plot_rows(marked_alike())
    load = {
        container.get_label().split(",")[0].removesuffix(" †"): container.lines[0]
        for container in draw("speedup_by_load", rows["speedup_by_load"]).axes[0].containers
    }
    accepted = {
        line.get_label().split(",")[0].removesuffix(" †"): line
        for line in draw("acceptance", rows["acceptance"]).axes[0].lines
    }
    assert (load["none"].get_color(), list(accepted)) == ("#888888", ["ngram", "eagle3"])
    for name, line in accepted.items():
        assert line.get_color() == load[name].get_color() == LOOKS[name]["color"]
        assert line.get_marker() == load[name].get_marker()
    typed = draw("speedup", rows["speedup"]).axes[0].containers
    colours = {container.lines[0].get_color() for container in typed}
    assert colours == {LOOKS[name]["color"] for name in ("none", "ngram", "eagle3")}


def marked_alike() -> dict[str, Any]:
    """Results where `none` was measured and EAGLE-3 is marked."""
    found = comparable()
    found["ngram"]["rows"][0] |= {"acceptance_rate_pos_0": 0.5}
    return {"none": found["none"], "ngram": found["ngram"], "eagle3 †": found["eagle3"]}


def test_none_against_itself_is_a_band_as_high_as_its_interval(draw: Draw) -> None:
    (axes,) = draw("speedup_by_load", plot_rows(comparable())["speedup_by_load"]).axes
    bands = [band.get_paths()[0].get_extents() for band in axes.collections
             if type(band).__name__ != "LineCollection"]  # fmt: skip
    # around 1 in flight (place 0) and 8 in flight (place 1)
    assert [(b.x0, b.x1, b.y0, b.y1) for b in bands] == [
        (-0.5, 0.5, 0.98, 1.03), (0.5, 1.5, 0.97, 1.02),
    ]  # fmt: skip


def test_intervals_are_drawn_from_end_to_end_and_not_at_all_where_there_is_none(
    draw: Draw,
) -> None:
    rows = [row | {"panel": "requests in flight", "requests": row["concurrency"]}
            for row in speedups(*MIXED)]  # fmt: skip
    (axes,) = draw("speedup_by_load", rows).axes
    found = {}
    for container in axes.containers:
        (bars,) = container.lines[2]
        for point, bar in zip(container.lines[0].get_ydata(), bars.get_paths(), strict=True):
            found[point] = tuple(y for _, y in bar.vertices if not math.isnan(y))
    assert found == {1.5: (1.25, 1.75), 0.75: (), 1.0: (0.5, 1.5), 0.25: (0.125, 0.375)}


def test_the_legend_of_a_load_panel_is_in_the_order_in_which_the_lines_end(draw: Draw) -> None:
    rows = [row | {"panel": "requests in flight", "requests": row["concurrency"]}
            for row in speedups(*MIXED, ("suffix", 1, 9.0, None, None))]  # fmt: skip
    (axes,) = draw("speedup_by_load", rows).axes
    # at 8 in flight: ngram 0.75, eagle3 0.25; suffix ends before
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "ngram, K=2",
        "eagle3, K=2",
        "suffix, K=2",
    ]


def test_requests_in_flight_and_per_second_never_share_a_panel(draw: Draw) -> None:
    figure = draw("speedup_by_load", small()["speedup_by_load"])
    labels = {
        axes.get_xlabel(): [label.get_text() for label in axes.get_xticklabels()]
        for axes in figure.axes
    }
    assert labels == {
        "requests in flight": ["1", "8"],
        "requests in flight +64": ["1", "8"],
        "requests per second": ["0.5"],
        "requests per second +64": ["0.5"],
    }


def test_a_verdict_has_a_marker_and_a_line_of_its_own_in_the_list_by_prompt_type(
    draw: Draw,
) -> None:
    rows = [row | {"category": "maths"} for row in speedups(*MIXED)]
    figure = draw("speedup", rows)
    found = {
        (axes.get_title(), container.get_label(), container.lines[0].get_marker(), x, y)
        for axes in figure.axes
        for container in axes.containers
        for x, y in container.lines[0].get_xydata()
    }
    # line 0 is the heading
    assert found == {
        ("1 in flight", FASTER, ">", 1.5, 1),
        ("1 in flight", UNDECIDED, "o", 1.0, 2),
        ("8 in flight", "no interval", "x", 0.75, 1),
        ("8 in flight", SLOWER, "<", 0.25, 2),
    }
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["maths", "ngram", "eagle3"]


def cells(axes: Any) -> dict[tuple[float, float], tuple[str, str, str | None]]:
    """Text, colour and hatch of every cell, by its middle."""
    filled = {
        (patch.get_x() + 0.5, patch.get_y() + 0.5): (
            to_hex(patch.get_facecolor()),
            patch.get_hatch(),
        )
        for patch in axes.patches
        if patch.get_facecolor()[3]
    }
    texts = {text.get_position(): text.get_text() for text in axes.texts
             if text.get_position()[0] >= 0}  # fmt: skip
    assert texts.keys() == filled.keys()
    return {at: (texts[at], *filled[at]) for at in texts}


def test_a_cell_has_its_percentage_and_is_only_hatched_where_no_difference_is_shown(
    draw: Draw,
) -> None:
    ngram, eagle3, scale = draw("speedup_by_k", speedups(*MIXED)).axes
    assert (ngram.get_title(), eagle3.get_title()) == ("ngram", "eagle3")
    texts = {
        name: {at: (text, hatch) for at, (text, _, hatch) in cells(axes).items()}
        for name, axes in (("ngram", ngram), ("eagle3", eagle3))
    }
    assert texts == {
        "ngram": {(0, 0): ("+50", None), (1, 0): ("-25", None)},
        "eagle3": {(0, 0): ("(+0)", "////"), (1, 0): ("-75", None)},
    }
    assert cells(eagle3)[0, 0][1] == "#ffffff"  # no colour where nothing is shown
    assert [label.get_text() for label in scale.get_yticklabels()] == [
        "-50%", "0%", "+100%",  # every second, in so low a picture
    ]  # fmt: skip


def test_the_colours_of_twice_and_half_are_the_ends_and_equal_is_the_middle(draw: Draw) -> None:
    rows = speedups(
        ("ngram", 1, 2.0, None, None),
        ("ngram", 2, 1.0, None, None),
        ("ngram", 4, 0.5, None, None),
        ("ngram", 8, 0.25, None, None),
    )
    axes, _ = draw("speedup_by_k", rows).axes
    # RdBu of ColorBrewer, eleven classes: its last, its middle within rounding, its first
    last, (red, green, blue), *firsts = (
        tuple(round(255 * part) for part in to_rgb(colour))
        for _, (_, colour, _) in sorted(cells(axes).items())
    )
    assert (last, firsts) == ((5, 48, 97), [(103, 0, 31)] * 2)
    assert all(abs(part - 247) <= 1 for part in (red, green, blue))


def test_a_cell_that_was_not_measured_is_not_drawn(draw: Draw) -> None:
    rows = small()["speedup_by_k"]
    kept = [row for row in rows if (row["method"], row["load"]) != ("ngram", "1 in flight")]
    panels = {axes.get_title(): axes for axes in draw("speedup_by_k", kept).axes}
    # 2 K x 6 loads, and without one load
    assert {name: len(cells(panels[name])) for name in ("ngram", "eagle3")} == {
        "ngram": 10,
        "eagle3": 12,
    }
    assert not {(0, 0), (0, 1)} & cells(panels["ngram"]).keys()


def test_k_is_in_order_although_the_first_method_lacks_some(draw: Draw) -> None:
    rows = [
        row
        for row in small()["speedup_by_k"]
        if (row["method"], row["num_speculative_tokens"]) != ("ngram", 1)
    ]
    ngram = draw("speedup_by_k", rows).axes[0]
    assert [label.get_text() for label in ngram.get_yticklabels()] == ["1", "2"]
    assert {y for _, y in cells(ngram)} == {1}


def test_acceptance_by_prompt_type_is_written_in_per_cent(draw: Draw) -> None:
    rates = {"acceptance_rate_pos_0": 0.625, "acceptance_rate_pos_1": 0.0}
    result = {
        "num_speculative_tokens": 2,
        "rows": [place(2, 1, 0, "all") | rates | {"num_drafts": 1030},
                 place(2, 1, 0, "maths") | rates | {"num_drafts": 29}],
    }  # fmt: skip
    rows = plot_rows({"eagle3": result})["acceptance_by_category"]
    axes, _ = draw("acceptance_by_category", rows).axes
    assert axes.get_title() == "eagle3, K=2"
    counts = {
        text.get_position(): text.get_text() for text in axes.texts if text.get_position()[0] < 0
    }
    assert counts == {(-1, 0): "1,030", (-1, 1): "29"}
    # of fewer than 30 drafts a share is hatched and has no colour
    assert {at: (text, hatch) for at, (text, _, hatch) in cells(axes).items()} == {
        (0, 0): ("62", None), (1, 0): ("0", None), (0, 1): ("62", "////"), (1, 1): ("0", "////"),
    }  # fmt: skip
    assert [label.get_text() for label in axes.get_yticklabels()] == ["all", "maths"]
