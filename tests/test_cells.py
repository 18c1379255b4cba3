import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from specmill import cells
from specmill.cells import measure_cell, warm_up
from specmill.client import TimedAnswer
from specmill.plan import Cell, Load, Run, plan_cells
from specmill.server import Server
from tests.benched import bench_section, prompts
from tests.fakes import FakeVllm

METHOD = Run("method", 3, 1, {"k": 3})


@pytest.fixture
def fake() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
def server(fake: FakeVllm) -> Iterator[Server]:
    with fake.serve() as server:
        yield server


def cell_of(count: int, load: Load) -> Cell:
    bench = bench_section(concurrency=[count], requests=count)
    ((cell,),) = plan_cells(prompts("coding", count), bench)
    return replace(cell, load=load, round=4, number=9)


def measure(server: Server, cell: Cell, run: Run = METHOD) -> dict[str, Any]:
    return asyncio.run(measure_cell(server, 30, run, cell, "its name", True, max_tokens=8))


@pytest.mark.parametrize("load", [Load(concurrency=2), Load(rate=200.0)])
def test_a_cell_is_measured_request_by_request_in_prompt_order(server: Server, load: Load) -> None:
    cell = cell_of(3, load)
    record = measure(server, cell)
    assert [one["sample_key"] for one in record["requests"]] == [
        one.sample_key for one in cell.prompts
    ]
    answers = [[11, 12, 13], [12, 13, 14], [13, 14, 15]]
    assert [one["output_ids"] for one in record["requests"]] == answers
    for one in record["requests"]:
        assert one["num_prompt_tokens"] == 2
        assert one["chunk_tokens"] == [2, 1]
        assert one["finish_reason"] == "length"
        assert one["sent_s"] <= one["chunk_s"][0] <= one["chunk_s"][1]
    assert min(one["sent_s"] for one in record["requests"]) == 0
    last = max(one["chunk_s"][-1] for one in record["requests"])
    assert record["wall_s"] == pytest.approx(last, abs=1e-6)


def test_a_record_says_where_it_belongs_and_how_it_was_measured(server: Server) -> None:
    record = measure(server, cell_of(2, Load(concurrency=2)))
    expected = {
        "role": "method",
        "k": 3,
        "phase": 1,
        "round": 4,
        "number": 9,
        "concurrency": 2,
        "rate": None,
        "context": 0,
        "category": "coding",
        "server": "its name",
        "side_by_side": True,
        "fresh_prompts": True,
        "execution": cells.EXECUTION,
    }
    assert {name: record[name] for name in expected} == expected


def test_in_an_open_loop_the_rate_is_the_load(server: Server) -> None:
    record = measure(server, cell_of(2, Load(rate=100.0)))
    assert (record["concurrency"], record["rate"]) == (None, 100.0)


def test_requests_are_greedy_and_have_a_salt_each_that_no_other_cell_uses(
    fake: FakeVllm, server: Server
) -> None:
    cell = cell_of(3, Load(concurrency=3))
    for run in (METHOD, replace(METHOD, phase=2)):
        for one in (cell, replace(cell, round=5), replace(cell, number=8)):
            measure(server, one, run)
    assert {(one["temperature"], one["max_tokens"]) for one in fake.requests} == {(0.0, 8)}
    assert len({one["cache_salt"] for one in fake.requests}) == len(fake.requests) == 18


def test_the_same_cell_in_another_execution_has_other_salts(
    fake: FakeVllm, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cell_of(2, Load(concurrency=2))
    measure(server, cell)
    monkeypatch.setattr(cells, "EXECUTION", "another")
    assert measure(server, cell)["execution"] == "another"
    assert len({one["cache_salt"] for one in fake.requests}) == 4


def test_counters_of_a_cell_are_what_they_gained_meanwhile(server: Server) -> None:
    cell = cell_of(2, Load(concurrency=1))
    measure(server, cell)
    # the fake server counts 2 drafts of 3 tokens, accepted at 0 twice and at 1 once, per request
    assert measure(server, cell)["counters"] == {
        "num_drafts": 4,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 6,
        "accepted_at_0": 4,
        "accepted_at_1": 2,
        "accepted_at_2": 0,
        "engine_steps": 6,
    }


def test_counters_that_contradict_each_other_stop_the_bench_at_their_cell(
    fake: FakeVllm, server: Server
) -> None:
    fake.k = 1  # two drafts of one token, accepted twice; no second position
    record = measure(server, cell_of(2, Load(concurrency=1)))  # nothing accepted later
    assert record["counters"]["num_accepted_tokens"] == 4
    fake.k = 3
    with pytest.raises(ValueError, match="acceptance counters contradict each other"):
        measure(server, cell_of(2, Load(concurrency=1)), replace(METHOD, k=1))


def test_an_engine_that_does_not_count_drafts_is_refused_only_when_it_should_speculate(
    fake: FakeVllm, server: Server
) -> None:
    fake.metrics = ""
    with pytest.raises(ValueError, match="it is not speculating"):
        measure(server, cell_of(1, Load(concurrency=1)))
    reference = Run("reference", None, 0, None)
    assert measure(server, cell_of(1, Load(concurrency=1)), reference)["counters"] == {}


class Machine:
    """Stands for a client of a server that answers a wave of one token each at a given speed."""

    def __init__(self, *speeds: float) -> None:
        self._speeds = iter(speeds)
        self.asked: list[list[int]] = []

    async def complete_timed(self, ids: list[int], sampling: dict[str, Any]) -> TimedAnswer:
        assert "cache_salt" not in sampling
        self.asked.append(ids)
        return TimedAnswer([1], "length", 0.0, [1 / next(self._speeds)], [1])


def warm(machine: Any, concurrencies: list[int]) -> dict[str, int]:
    return asyncio.run(warm_up(machine, [[1], [2], [3]], concurrencies, max_tokens=8))


def test_the_warmup_ends_with_two_waves_that_differ_by_less_than_a_tenth() -> None:
    assert warm(Machine(10.0, 10.9), [1]) == {"c1": 2}
    assert warm(Machine(10.0, 11.1, 12.0), [1]) == {"c1": 3}
    assert warm(Machine(10.0, 8.9, 7.0, 7.1), [1]) == {"c1": 4}


def test_the_warmup_gives_up_after_six_waves() -> None:
    assert warm(Machine(1.0, 2.0, 4.0, 8.0, 16.0, 32.0), [1]) == {"c1": 6}


def test_the_warmup_fills_every_concurrency_with_prompts_in_turn() -> None:
    machine = Machine(*[10.0] * 6)
    assert warm(machine, [1, 2]) == {"c1": 2, "c2": 2}
    assert machine.asked == [[1], [2], [1], [2], [3], [1]]


def test_a_wave_is_as_fast_as_its_last_answer() -> None:
    # waves of 2 tokens that end after 1, 2 and 2.1 s
    assert warm(Machine(2.0, 1.0, 5.0, 0.5, 0.48, 9.0), [2]) == {"c2": 3}
