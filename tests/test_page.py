"""The page: what is on it, that hostile text stays text, that everybody can read it."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from specmill.fidelity import marked
from specmill.files import write_json
from specmill.page import page
from specmill.page_evidence import Evidence, gather
from specmill.surface import plot_rows
from tests.benches import BENCH, comparable
from tests.pages import DECISION, everything, train_rows

VOID = {"meta", "link", "br", "hr", "img", "input"}
HOSTILE = '</svg></td><script>alert("x")</script><img src=x onerror=alert(1)> & $x^{ *'


class Outline(HTMLParser):
    """Elements with their attributes and text; an element that is not closed is an error."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), (tag, attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self._open, f"<{tag} /> outside of a picture"
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1] if self._open else "", data.strip()))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, tag: str) -> list[str]:
        return [text for parent, text in self.texts if parent == tag]

    def sections(self) -> list[str | None]:
        return [attributes["id"] for attributes in self.all("section")]


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return everything()


@pytest.fixture(scope="module")
def benches(evidence: Evidence) -> Evidence:
    """Nothing but what benches left: its page draws nothing, and is quick."""
    drawn = {name: evidence.plots[name] for name in evidence.pictures}
    return replace(evidence, further={}, serve_script=None, plots=drawn)


def with_only(benches: Evidence, evidence: Evidence, *names: str) -> Evidence:
    """What benches left and pieces of other evidence."""
    plots = benches.plots | {n: evidence.plots[n] for n in names if n in evidence.plots}
    further = {name: evidence.further[name] for name in names}
    return replace(benches, further=further, plots=plots)


@pytest.fixture(scope="module")
def html(evidence: Evidence) -> str:
    return page(evidence)


@pytest.fixture(scope="module")
def outline(html: str) -> Outline:
    return Outline(html)


def test_the_page_begins_with_the_verdict_its_limits_and_what_to_deploy(outline: Outline) -> None:
    script = next(one for one in outline.texts if "--model m" in one[1])
    before = outline.texts[: outline.texts.index(script)]
    texts = [text for tag, text in before if tag not in ("title", "style", "a", "code")]
    assert texts == [
        "Does speculation pay?",
        "tiny-verifier on Some CPU, 2 cores, vLLM 0.32.0; greedy.",
        "Serve with eagle3, K=2, up to 4 requests in flight, and without it above.",
        "What this run can decide",
        "At 8 in flight a change of less than 3% may be the machine's.",
        "Predictions that were measured too were off by 3.4% in the median.",
        "What to deploy",
        "eagle3, K=2",
        "+25% (+20% to +30%) at 1 in flight.",
        "-25% (-30% to -20%) at 8.",
        "serves it.",
        "reports/serve.sh",
    ]


SECTIONS = [
    "deploy", "comparison", "decision", "surface", "acceptance", "prediction", "check", "cost",
    "loads", "greedy", "training", "provenance", "reading",
]  # fmt: skip
FOLDED = SECTIONS[7:]


def test_every_piece_of_evidence_has_a_section_and_the_list_names_them_all(
    outline: Outline,
) -> None:
    assert outline.sections() == SECTIONS
    # a link to what is folded goes inside, which opens it
    targets = [f"{name}-inside" if name in FOLDED else name for name in SECTIONS]
    assert [one["href"] for one in outline.all("a")] == [f"#{name}" for name in ["main", *targets]]
    folded = [one["id"] for one in outline.all("section") if one.get("class") == "folded"]
    assert folded == FOLDED


@pytest.mark.parametrize(
    ("name", "section"),
    [("decision", "decision"), ("predicted", "prediction"), ("check", "check"),
     ("train", "training"), ("curves", "cost")],
)  # fmt: skip
def test_a_piece_of_evidence_has_one_section(
    benches: Evidence, evidence: Evidence, name: str, section: str
) -> None:
    shown = Outline(page(with_only(benches, evidence, name))).sections()
    alone = {"comparison", "surface", "acceptance", "loads", "greedy", "provenance", "reading"}
    more = {"deploy"} if name == "decision" else set()
    assert shown == [one for one in SECTIONS if one in alone | more | {section}]


def test_benches_alone_make_a_page(benches: Evidence) -> None:
    outline = Outline(page(benches))
    assert outline.sections() == [
        "comparison", "surface", "acceptance", "loads", "greedy", "provenance", "reading",
    ]  # fmt: skip
    assert "verdict" not in [attributes.get("class") for attributes in outline.all("p")]


def test_where_nothing_is_adopted_the_page_says_to_serve_without(benches: Evidence) -> None:
    ruled_out = [option | {"status": "ruled out"} for option in DECISION["options"]]
    further = {"decision": DECISION | {"options": ruled_out}}
    html = page(replace(benches, further=further))
    assert "The verifier without speculation: of the options below none is adopted." in html


def test_of_uncompiled_engines_nothing_is_to_be_deployed(benches: Evidence) -> None:
    results = comparable()
    results["ngram"]["engine"]["method_k3_0"]["enforce_eager"] = "True"
    html = page(replace(benches, results=results, serve_script="#!/bin/sh"))
    assert "<strong>Nothing before compiled engines were measured: this was a test" in html


def test_every_option_is_a_line_with_all_that_is_against_it(html: str) -> None:
    section = html.split('<section id="decision"')[1].split("</section>")[0]
    for part in (
        '<tr><th scope="row">eagle3, K=2</th>',
        '<td class="number" data-heading="1 in flight"><strong>+25% (+20% to +30%)</strong></td>',
        '<td class="number" data-heading="8 in flight"><em>-8%</em></td>',
        "slower at 8 in flight; not lossless when sampled †</td>",
        "<summary>Evidence for every option</summary>",
        "<strong>eagle3, K=2</strong> (adopt). +25% (+20% to +30%) at 1 in flight. -25%",
        "<strong>ngram, K=3</strong> (ruled out). -8% at 8 in flight. <em>Reopen if</em> accept",
        "<summary>What changed since the record of 1c32290</summary>",
        "<li>eagle3, K=2: pending before, adopt now.</li>",
        "<summary>Rules</summary>",
    ):
        assert part in section, part
    assert DECISION["verdict"] not in section


def test_what_is_not_in_a_run_is_not_explained(benches: Evidence, html: str) -> None:
    words = ("tokens of context", "arrive each second", "suffix decoding", "†")
    for word in words:
        assert word not in page(benches)
    results = comparable()
    results["ngram"]["rows"] += [
        results["ngram"]["rows"][0] | {"context": 512},
        results["ngram"]["rows"][0] | {"concurrency": None, "rate": 2.5},
    ]
    text = page(replace(benches, results=results))
    assert "<code>1 in flight +512</code>: 512 tokens of context before every prompt." in text
    assert "<code>2.5/s</code>: so many requests arrive each second" in text
    for defined in (
        "K is how many tokens a step drafts",
        "A <em>pair</em> is",
        "A <em>step</em>",
        "first token came within 1000 ms",
        "and the others took 50 ms each",
    ):
        assert defined in html, defined


def test_a_map_by_k_is_drawn_where_a_method_has_several(benches: Evidence, html: str) -> None:
    assert 'id="speedup_by_k-title"' in html
    rows = [row for row in benches.plots["speedup_by_k"] if row["num_speculative_tokens"] > 1]
    one = page(replace(benches, plots=benches.plots | {"speedup_by_k": rows}))
    assert 'id="speedup_by_k-title"' not in one


def test_headings_go_down_a_level_at_a_time(outline: Outline) -> None:
    levels = [int(tag[1]) for tag, _ in outline.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_nothing_is_loaded_and_nothing_runs(html: str, outline: Outline) -> None:
    assert "script" not in {tag for tag, _ in outline.elements}
    for tag, attributes in outline.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name != "src", (tag, value)
            if name in ("href", "xlink:href"):
                assert re.match(r"#\w|data:", value or ""), (tag, value)
    assert "://" not in html
    assert "@import" not in html
    policies = [one.get("content") for one in outline.all("meta") if "http-equiv" in one]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_every_reference_inside_the_page_is_met_once(outline: Outline) -> None:
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in outline.elements:
        targets = re.findall(r"url\(#([^)]*)\)", " ".join(filter(None, attributes.values())))
        targets += [attributes["aria-labelledby"]] if "aria-labelledby" in attributes else []
        link = attributes.get("href") or ""
        targets += [link[1:]] if link.startswith("#") else []
        assert set(targets) <= set(ids), (tag, attributes)


def test_a_table_has_a_caption_and_headings_both_ways(html: str, outline: Outline) -> None:
    tables = re.findall(r"<table.*?</table>", html, re.DOTALL)
    assert len(tables) > 15
    captions = [re.findall(r"<caption>(.+?)</caption>", one) for one in tables]
    assert all(len(found) == 1 for found in captions)
    for one in tables:
        head, body = one.split("</thead>")
        columns = head.count('<th scope="col"')
        rows = body.count("<tr>")
        assert columns > 1
        assert body.count('<th scope="row"') == rows > 0
        assert body.count("<td") == rows * (columns - 1)
    # what may be wider than a screen scrolls by itself and can be reached with the keyboard
    scrolled = [one for one in outline.all("div") if one["class"] == "scroll"]
    assert len(scrolled) == len(tables) + len(outline.all("svg"))
    assert all(one["tabindex"] == "0" and one["aria-label"] for one in scrolled)


def test_a_picture_has_a_name_and_its_figures_as_a_table(html: str, outline: Outline) -> None:
    figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    # three of speed-up, two of acceptance, two of training, predicted, check, steps, experts
    assert len(figures) == len(outline.all("svg")) == 11
    for figure in figures:
        assert re.search(r'<svg [^>]*role="img" aria-labelledby="([\w-]+)"', figure)
        assert re.search(r'<title id="[\w-]+">[^<]{10,}</title>', figure)
        assert figure.index("<figcaption>") < figure.index("<details>") < figure.index("<table")


def test_the_tables_of_the_comparison_are_on_the_page(html: str) -> None:
    text = re.sub(r"<[^>]*>", "|", html)
    for cells in ("none|0|+0.2% (-2% to +3%)|-0.4% (-3% to +2%)",
                  "eagle3|2|+25% (+20% to +30%)|-25% (-30% to -20%)",
                  "eagle3|2|40.0|50.0|+25% (+20% to +30%)|8|faster|1.50|100%|1.38"):  # fmt: skip
        pattern = r"\|+\s*".join(map(re.escape, cells.split("|")))
        assert re.search(pattern, text), cells


def test_predictions_stand_beside_what_was_measured(outline: Outline, html: str) -> None:
    assert "half of the measurements lay within <strong>3.4%</strong> of it" in html
    assert "Median absolute error: 3.4% over 5 of them; 4.1% over the 2 whose K and load" in html
    cells = outline.text("td")
    # 1.2 with 5% to both sides; 1.2 / 1.02 = 1.176 with 0.9 and 1.1 of 1.2 as its ends
    assert "+20% (+14% to +26%)" in cells
    assert "+18% (+8% to +32%)" in cells
    # 1.5 tokens at a step that takes 1.5 / 0.9 of the time
    assert "1.67" in cells
    assert "suffix: it was not replayed" in html


def test_a_step_time_has_what_it_is_held_against_and_an_interval_of_several_measurements(
    html: str,
) -> None:
    text = re.sub(r"<[^>]*>", "|", html.split('<section class="folded" id="cost"')[1])
    # 10 * 1.2 ms and 12 / 1.2; of eight requests there is one measurement
    for cells in ("looked up (ngram, suffix)|3|1|12.0 (11.4 to 13.2)|10.0|1.20",
                  "looked up (ngram, suffix)|3|8|17.5|10.0|1.75"):  # fmt: skip
        pattern = r"\|+\s*".join(map(re.escape, cells.split("|")))
        assert re.search(pattern, text), cells


def test_training_shows_replayed_and_teacher_forced_lengths(
    benches: Evidence, evidence: Evidence, outline: Outline
) -> None:
    cells = outline.text("td")
    # 1 + 0.5 + 0.25, replayed 1.6
    assert {"1.600", "1.750"} <= set(cells)
    trained = with_only(benches, evidence, "train")
    plots = trained.plots | {"train": train_rows(replayed=False)}
    without = Outline(page(replace(trained, plots=plots)))
    assert "1.600" not in without.text("td")
    assert "1.750" in without.text("td")


def test_only_a_mixture_of_experts_has_experts_to_count(benches: Evidence, html: str) -> None:
    assert "a mixture of 8 experts a layer, 2 of them" in html
    dense = page(replace(benches, further={"routing": {"experts": None}}))
    assert "experts" not in re.sub(r"<style>.*?</style>", "", dense, flags=re.DOTALL)


def test_equal_evidence_gives_equal_bytes(evidence: Evidence, html: str) -> None:
    assert page(evidence) == html


def hostile() -> Evidence:
    """Evidence with markup wherever a name, a path, an engine or a model may put some."""
    results = comparable()
    results[HOSTILE] = results.pop("ngram")
    results[HOSTILE]["head"] = {"trained_for": f"a | b\n{HOSTILE}", "run_on": HOSTILE}
    results[HOSTILE]["engine"]["method_k3_0"]["warnings"] = [HOSTILE]
    results[HOSTILE]["refused"] = {"9": HOSTILE}
    for row in results["eagle3"]["rows"]:
        row["category"] = HOSTILE if row["category"] == "maths" else row["category"]
    found = everything(results)
    texts = {"name": HOSTILE, "evidence": [HOSTILE], "gate": HOSTILE, "by": HOSTILE}
    option = texts | {"status": "adopt", "against": [HOSTILE], "speeds": {HOSTILE: HOSTILE}}
    decision = DECISION | {
        "verdict": HOSTILE,
        "options": [option],
        "changes": [HOSTILE],
        "limits": [HOSTILE],
        "footnotes": [HOSTILE],
        "loads": [],
    }
    predicted = found.further["predicted"] | {"without": {HOSTILE: HOSTILE}}
    speed = [
        row | {"method": HOSTILE if row["method"] == "ngram" else row["method"]}
        for row in found.further["check"]["speed"]
    ]
    check = found.further["check"] | {"speed": speed}
    further = found.further | {"decision": decision, "predicted": predicted, "check": check}
    verifier = {"name": HOSTILE, "origin": HOSTILE}
    return replace(found, verifier=verifier, further=further, serve_script=HOSTILE)


def test_hostile_text_stays_text_everywhere(outline: Outline) -> None:
    found = Outline(page(hostile()))
    assert {tag for tag, _ in found.elements} <= {tag for tag, _ in outline.elements} | {"em"}
    assert not [name for _, one in found.elements for name in one if name.startswith("on")]
    for tag in ("p", "li", "td", "th", "h3", "code", "text", "title"):
        assert any("<script>alert" in text for text in found.text(tag)), tag


def test_a_method_that_is_not_served_is_on_the_page_with_its_reason(benches: Evidence) -> None:
    results = comparable()
    results["narrow"] = {
        **{name: results["ngram"][name] for name in ("num_speculative_tokens", "head")},
        "not_served": "its heads are 4 wide, not 8",
        "engine": {},
        "provenance": {"waited_s": 0.0, "busy_cores_before": 0.0},
        "rows": [
            {name: row[name] for name in ("num_speculative_tokens", "concurrency", "rate",
                                          "context", "category")}
            for row in results["ngram"]["rows"]
        ],
    }  # fmt: skip
    html = page(replace(benches, results=results))
    Outline(html)
    assert "<strong>narrow is not served</strong>: its heads are 4 wide, not 8" in html
    assert html.count("not served") > 2


@pytest.fixture
def reports(tmp_path: Path, evidence: Evidence) -> Path:
    for name, svg in evidence.pictures.items():
        (tmp_path / f"{name}.svg").write_text(svg)
        write_json(tmp_path / "plots" / f"{name}.json", evidence.plots[name])
    return tmp_path


def gathered(reports: Path) -> Evidence:
    return gather(reports, comparable(), {"gpus": []}, {"name": "v"}, BENCH)


def test_what_lies_in_reports_is_gathered_and_what_does_not_is_left_out(
    reports: Path, evidence: Evidence
) -> None:
    found = gathered(reports)
    assert found.pictures == evidence.pictures
    assert found.plots == plot_rows(marked(comparable()))
    assert (found.further, found.serve_script) == ({}, None)
    write_json(reports / "decision.json", DECISION)
    write_json(reports / "plots/train.json", train_rows(replayed=True))
    (reports / "serve.sh").write_text("#!/bin/sh\n")
    found = gathered(reports)
    assert found.further == {"decision": DECISION}
    assert found.plots["train"] == train_rows(replayed=True)
    assert found.serve_script == "#!/bin/sh\n"


def test_a_broken_file_is_named(reports: Path) -> None:
    (reports / "curves.json").write_text("{")
    with pytest.raises(ValueError, match=r"curves\.json is not valid JSON"):
        gathered(reports)
