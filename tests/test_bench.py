import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specmill.bench import CellCache, engine_rows, measure, write_raw
from specmill.params import Bench
from specmill.plan import Cell, Run, check_room, plan_cells, plan_runs, warmup_prompts
from specmill.samples import Sample
from specmill.section import DoesNotFit
from specmill.server import EngineRefused, Server
from tests.fakes import FakeVllm, sample

CONFIGS: dict[int, dict[str, Any] | None] = {3: {"k": 3}, 1: {"k": 1}}
INPUTS: dict[str, Any] = {
    "method": "ngram",
    "head": "h",
    "verifier": {"fingerprint": "f"},
    "bench": {"max_tokens": 8},
    "hardware": {"machine": "m"},
}
REFUSAL = r"^vLLM does not start with it: ValueError: no such head$"
RUN = Run("method", 3, 0, {"k": 3})


def bench_section(**changes: Any) -> Bench:
    values: dict[str, Any] = {
        "concurrency": [1, 2],
        "requests": 2,
        "max_tokens": 8,
        "warmup_waves": 1,
        "rounds": 1,
        "enforce_eager": False,
    }
    return Bench(**(values | changes))


def prompts(category: str, count: int, first: int = 10) -> list[Sample]:
    """Prompts [5, first], [5, first + 1] ... whose own answers are of no interest."""
    return [
        sample([5, first + number], [], category=category, split="bench") for number in range(count)
    ]


def last_ids(cell: Cell) -> list[int]:
    return [one.prompt_token_ids[-1] for one in cell.prompts]


def test_one_round_measures_the_reference_and_then_every_k() -> None:
    assert plan_runs(CONFIGS, rounds=1) == [
        Run("reference", None, 0, None),
        Run("method", 3, 0, {"k": 3}),
        Run("method", 1, 0, {"k": 1}),
    ]


def test_a_second_round_is_the_mirror_of_the_first() -> None:
    assert plan_runs(CONFIGS, rounds=2) == [
        Run("reference", None, 0, None),
        Run("method", 3, 0, {"k": 3}),
        Run("method", 1, 0, {"k": 1}),
        Run("method", 1, 1, {"k": 1}),
        Run("method", 3, 1, {"k": 3}),
        Run("reference", None, 1, None),
    ]


def test_none_is_its_own_reference_and_ignores_k() -> None:
    assert plan_runs({3: None, 1: None}, rounds=1) == [Run("method", None, 0, None)]
    assert plan_runs({3: None, 1: None}, rounds=2) == [
        Run("method", None, 0, None),
        Run("method", None, 1, None),
    ]


def test_cells_follow_concurrency_and_category_and_share_no_prompt() -> None:
    samples = prompts("maths", 5, 30) + prompts("coding", 5, 10)
    cells = plan_cells(samples, bench_section(concurrency=[1, 3]))
    assert [(cell.concurrency, cell.category) for cell in cells] == [
        (1, "coding"),
        (1, "maths"),
        (3, "coding"),
        (3, "maths"),
    ]
    # 2 requests at concurrency 1, one full wave of 3 at concurrency 3
    assert [last_ids(cell) for cell in cells] == [[10, 11], [30, 31], [12, 13, 14], [32, 33, 34]]
    assert all(cell.fresh for cell in cells)


def test_a_cell_that_must_reuse_prompts_says_so() -> None:
    samples = prompts("coding", 4, 10) + prompts("maths", 5, 30)
    cells = plan_cells(samples, bench_section(concurrency=[1, 3]))
    assert {(cell.category, cell.concurrency): cell.fresh for cell in cells} == {
        ("coding", 1): True,
        ("maths", 1): True,
        ("coding", 3): False,
        ("maths", 3): True,
    }
    assert last_ids(cells[2]) == [12, 13, 10]


def test_a_cell_larger_than_its_category_repeats_prompts_and_says_so() -> None:
    (cell,) = plan_cells(prompts("coding", 2), bench_section(concurrency=[5]))
    assert last_ids(cell) == [10, 11, 10, 11, 10]
    assert not cell.fresh


def test_the_warmup_sends_prompts_that_no_cell_sends() -> None:
    samples = prompts("coding", 3, 10) + prompts("maths", 2, 20)
    cells = plan_cells(samples, bench_section(concurrency=[1], requests=1))
    sent = [sample.prompt_token_ids[1:] for cell in cells for sample in cell.prompts]
    spare = warmup_prompts(samples, cells)
    assert len(spare) == 3
    assert [ids for ids in spare if ids in sent] == []


def test_where_cells_send_every_prompt_the_warmup_sends_the_first_cells() -> None:
    samples = prompts("coding", 2)
    cells = plan_cells(samples, bench_section(concurrency=[2], requests=2))
    assert warmup_prompts(samples, cells) == [s.prompt_token_ids[1:] for s in cells[0].prompts]


def test_answers_that_do_not_fit_the_context_are_refused() -> None:
    cells = plan_cells(
        [sample([1] * 3, [2], category="a"), sample([1] * 7, [2, 2], category="b")],
        bench_section(concurrency=[1], requests=1),
    )
    check_room(cells, max_tokens=8, max_model_len=15)  # 7 + 8
    with pytest.raises(
        ValueError, match=r"bench\.max_tokens is 8 .* has 7 tokens, .*max_model_len \(14\)"
    ):
        check_room(cells, max_tokens=8, max_model_len=14)


def test_a_finished_cell_is_found_again_and_only_under_the_same_inputs(tmp_path: Path) -> None:
    (cell,) = plan_cells(prompts("coding", 2), bench_section(concurrency=[1]))
    cache = CellCache(tmp_path, INPUTS)
    cache.put(RUN, cell, {"wall_s": 1.5})
    cache.put(RUN, None, {"dtype": "bfloat16"})
    reopened = CellCache(tmp_path, copy.deepcopy(INPUTS))
    assert reopened.get(RUN, cell) == {"wall_s": 1.5}
    assert reopened.get(RUN, None) == {"dtype": "bfloat16"}


@pytest.mark.parametrize("name", list(INPUTS))
def test_the_key_of_a_cell_changes_with_every_input_of_its_stage(tmp_path: Path, name: str) -> None:
    (cell,) = plan_cells(prompts("coding", 2), bench_section(concurrency=[1]))
    CellCache(tmp_path, INPUTS).put(RUN, cell, {"wall_s": 1.5})
    changed = CellCache(tmp_path, INPUTS | {name: "other"})
    assert changed.get(RUN, cell) is None


@pytest.mark.parametrize(
    "run",
    [
        Run("reference", 3, 0, {"k": 3}),
        Run("method", 2, 0, {"k": 3}),
        Run("method", 3, 1, {"k": 3}),
        Run("method", 3, 0, {"k": 3, "window": 2}),
    ],
)
def test_the_key_of_a_cell_changes_with_every_field_of_its_run(tmp_path: Path, run: Run) -> None:
    (cell,) = plan_cells(prompts("coding", 2), bench_section(concurrency=[1]))
    cache = CellCache(tmp_path, INPUTS)
    cache.put(RUN, cell, {"wall_s": 1.5})
    assert cache.get(run, cell) is None


def test_the_key_of_a_cell_changes_with_its_category_concurrency_and_prompts(
    tmp_path: Path,
) -> None:
    one = tuple(prompts("coding", 2))
    cell = Cell("coding", 1, one, True)
    cache = CellCache(tmp_path, INPUTS)
    cache.put(RUN, cell, {"wall_s": 1.5})
    others = [
        None,
        Cell("maths", 1, one, True),
        Cell("coding", 2, one, True),
        Cell("coding", 1, one[::-1], True),
        Cell("coding", 1, tuple(prompts("coding", 2, 20)), True),
    ]
    assert [cache.get(RUN, other) for other in others] == [None] * 5


def test_clearing_forgets_this_stage_and_leaves_the_others(tmp_path: Path) -> None:
    cells = plan_cells(prompts("coding", 5), bench_section())
    mine, other = CellCache(tmp_path, INPUTS), CellCache(tmp_path, INPUTS | {"method": "eagle3"})
    runs = plan_runs(CONFIGS, rounds=1)
    for cache in (mine, other):
        for run in runs:
            for cell in (None, *cells):
                cache.put(run, cell, {"wall_s": 1.5})
    mine.clear(runs, cells)
    assert all(mine.get(run, cell) is None for run in runs for cell in (None, *cells))
    assert all(other.get(run, cell) for run in runs for cell in (None, *cells))
    mine.clear(runs, cells)  # nothing left: no error


class Lab:
    """`measure` against fake servers that count what they are asked."""

    def __init__(self, folder: Path):
        self.cache = CellCache(folder / "cells", INPUTS)
        self.started: list[Run] = []
        self.asked: list[list[list[int]]] = []
        """Prompts sent to each server."""
        self.fail_after: int | None = None
        self.refused_k: int | None = None
        self.reference_refused = False
        self._log = folder / "server.log"
        self._log.write_text("config: dtype=torch.bfloat16, enforce_eager=True\n")

    @contextlib.contextmanager
    def _start(self, run: Run) -> Iterator[Server]:
        fake = FakeVllm()
        fake.fail_after = self.fail_after
        self.started.append(run)
        if run.k == self.refused_k and (run.role == "method" or self.reference_refused):
            raise EngineRefused("vLLM ended with status 1\nmany lines", "ValueError: no such head")
        try:
            with fake.serve(self._log) as server:
                yield server
        finally:
            self.asked.append([request["prompt"] for request in fake.requests])

    def measure(self, runs: list[Run], cells: list[Cell], bench: Bench) -> list[dict[str, Any]]:
        warmup = warmup_prompts(prompts("coding", 2, 90), cells)
        return measure(runs, cells, warmup, bench, self._start, self.cache, timeout_s=30)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_a_cell_is_measured_request_by_request_in_prompt_order(lab: Lab) -> None:
    bench = bench_section(concurrency=[2], requests=3)
    cells = plan_cells(prompts("coding", 3), bench)
    (record,) = lab.measure([RUN], cells, bench)
    assert (record["role"], record["k"], record["round"]) == ("method", 3, 0)
    (cell,) = record["cells"]
    assert (cell["category"], cell["concurrency"], cell["fresh_prompts"]) == ("coding", 2, True)
    assert [one["sample_key"] for one in cell["requests"]] == [
        one.sample_key for one in cells[0].prompts
    ]
    assert [one["output_ids"] for one in cell["requests"]] == [
        [11, 12, 13],
        [12, 13, 14],
        [13, 14, 15],
    ]
    for one in cell["requests"]:
        assert one["num_prompt_tokens"] == 2
        assert one["chunk_tokens"] == [2, 1]
        assert one["finish_reason"] == "length"
        assert one["sent_s"] <= one["chunk_s"][0] <= one["chunk_s"][1]
    assert min(one["sent_s"] for one in cell["requests"]) == 0
    assert cell["wall_s"] == pytest.approx(
        max(one["chunk_s"][-1] for one in cell["requests"]), abs=1e-6
    )


def test_counters_of_a_cell_are_its_own_and_not_those_of_the_warmup(lab: Lab) -> None:
    bench = bench_section(concurrency=[1, 2], requests=2, warmup_waves=3)
    cells = plan_cells(prompts("coding", 4), bench)
    (record,) = lab.measure([RUN], cells, bench)
    # the fake server counts 2 drafts of 3 tokens, accepted at 0 twice and at 1 once, per request
    expected = {
        "num_drafts": 4,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 6,
        "accepted_at_0": 4,
        "accepted_at_1": 2,
        "accepted_at_2": 0,
        "engine_steps": 6,
    }
    assert [cell["counters"] for cell in record["cells"]] == [expected, expected]


def test_warmup_comes_first_fills_every_concurrency_and_shares_no_prefix(lab: Lab) -> None:
    bench = bench_section(concurrency=[1, 2], requests=2, warmup_waves=3)
    cells = plan_cells(prompts("coding", 4), bench)
    lab.measure([RUN], cells, bench)
    (asked,) = lab.asked
    measured = {tuple(one.prompt_token_ids) for cell in cells for one in cell.prompts}
    warmup, rest = asked[: 3 * 1 + 3 * 2], asked[3 * 1 + 3 * 2 :]
    assert {tuple(prompt) for prompt in rest} == measured
    assert len(rest) == 4
    assert {prompt[0] for prompt in warmup}.isdisjoint(prompt[0] for prompt in measured)


def test_every_run_has_its_own_server_and_engine_facts(lab: Lab) -> None:
    bench = bench_section(concurrency=[1], requests=1)
    cells = plan_cells(prompts("coding", 1), bench)
    runs = plan_runs(CONFIGS, rounds=1)
    records = lab.measure(runs, cells, bench)
    assert lab.started == runs
    assert [(record["role"], record["k"]) for record in records] == [
        ("reference", None),
        ("method", 3),
        ("method", 1),
    ]
    for facts in engine_rows(records).values():
        assert (facts["dtype"], facts["enforce_eager"]) == ("bfloat16", "True")
        assert facts["startup_s"] == 1.2  # of the fake's 1.25; halves go to the even digit
        assert facts["bound_cores"] is None
    assert list(engine_rows(records)) == [
        "reference_k0_round0",
        "method_k3_round0",
        "method_k1_round0",
    ]


def test_an_interrupted_stage_measures_only_the_cells_that_are_missing(lab: Lab) -> None:
    bench = bench_section(concurrency=[1], requests=2)
    cells = plan_cells(prompts("coding", 2, 10) + prompts("maths", 2, 30), bench)
    runs = plan_runs({3: {"k": 3}}, rounds=1)
    lab.fail_after = 1 + 2 + 1  # the warmup, the cell of coding, one request of maths
    with pytest.raises(RuntimeError, match="the fake is tired"):
        lab.measure(runs, cells, bench)
    lab.fail_after = None
    records = lab.measure(runs, cells, bench)
    assert lab.started == [runs[0], runs[0], runs[1]]
    _, resumed, whole = lab.asked
    assert resumed[1:] == [[5, 30], [5, 31]]
    assert whole[1:] == [[5, 10], [5, 11], [5, 30], [5, 31]]
    for record in records:
        assert [cell["category"] for cell in record["cells"]] == ["coding", "maths"]


def test_a_finished_stage_starts_no_server_until_its_cells_are_cleared(lab: Lab) -> None:
    bench = bench_section(concurrency=[1], requests=1)
    cells = plan_cells(prompts("coding", 1), bench)
    first = lab.measure([RUN], cells, bench)
    assert lab.measure([RUN], cells, bench) == first
    assert len(lab.started) == 1
    lab.cache.clear([RUN], cells)
    lab.measure([RUN], cells, bench)
    assert len(lab.started) == 2


def test_a_method_that_the_engine_refuses_does_not_fit_once_its_reference_was_served(
    lab: Lab,
) -> None:
    bench = bench_section(concurrency=[1], requests=1)
    cells, runs = plan_cells(prompts("coding", 1), bench), plan_runs({3: {"k": 3}}, rounds=1)
    lab.refused_k = 3
    with pytest.raises(DoesNotFit, match=REFUSAL):
        lab.measure(runs, cells, bench)
    assert [run.role for run in lab.started] == ["reference", "method"]


def test_an_engine_that_does_not_start_without_a_draft_is_an_error(lab: Lab) -> None:
    bench = bench_section(concurrency=[1], requests=1)
    cells = plan_cells(prompts("coding", 1), bench)
    lab.reference_refused = True
    with pytest.raises(EngineRefused, match="ended with status 1"):
        lab.measure(plan_runs({3: {"k": 3}}, rounds=1), cells, bench)
    with pytest.raises(EngineRefused, match="ended with status 1"):  # the bench of `none`
        lab.measure(plan_runs({3: None}, rounds=1), cells, bench)


def test_raw_records_are_one_line_per_request(tmp_path: Path, lab: Lab) -> None:
    bench = bench_section(concurrency=[1], requests=2)
    cells = plan_cells(prompts("coding", 2), bench)
    runs = plan_runs({3: {"k": 3}}, rounds=1)
    write_raw(tmp_path / "deep" / "ngram.jsonl", "ngram", lab.measure(runs, cells, bench))
    rows = [json.loads(line) for line in (tmp_path / "deep" / "ngram.jsonl").open()]
    names = ("method", "role", "k", "round", "category", "concurrency")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("ngram", "reference", None, 0, "coding", 1),
        ("ngram", "reference", None, 0, "coding", 1),
        ("ngram", "method", 3, 0, "coding", 1),
        ("ngram", "method", 3, 0, "coding", 1),
    ]
    assert [row["output_ids"] for row in rows] == [[11, 12, 13], [12, 13, 14]] * 2
