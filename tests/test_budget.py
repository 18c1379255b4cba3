"""Minutes and bytes of stages, by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from specmill import paths
from specmill.budget import Budget
from specmill.doctor_disk import disk_needs
from specmill.doctor_verifier import size_of
from specmill.probe import measure
from specmill.rates import Rates, Records, read_records
from specmill.workload import Turns, Workload, bench_cells, workload
from tests.patients import ROOT, SMOLLM, SPEED, card, machine, params

WORK = Workload(
    Turns(100, 1000, 5000, 4000), Turns(10, 100, 500, 400), Turns(10, 100, 500, 400), 7, 10
)


def rates(records: Records | None = None, **changes: Any) -> Rates:
    size = size_of(card(), params(**changes), "bfloat16")
    return Rates(size, SPEED, "cpu", 10.0, records or Records())


def test_a_start_is_its_imports_and_reading_the_weights() -> None:
    # three processes import for 10 s each; 134.5 M weights without norms at 500 MB/s
    bytes_ = rates().size.weight_bytes
    assert rates().start_s() == pytest.approx(30 + bytes_ / 500e6)


def test_measured_starts_and_steps_are_taken_where_there_are_any() -> None:
    known = rates(Records([30.0, 40.0, 90.0], {1: 10.0, 8: 20.0}, {1: 15.0, 8: 40.0}))
    assert known.start_s() == 40.0
    assert known.step_s(1, 0) == 0.010
    assert known.step_s(4, 0) == 0.010 * 4  # not between points: as many steps as the nearest below
    assert known.step_s(16, 0) == 0.040
    assert known.step_s(8, 0, k=3) == 0.040


def test_an_estimated_step_reads_all_weights_once() -> None:
    # 1 request: 2 bytes x (all weights, the tied matrix once) at 20 GB/s
    assert rates().step_s(1, 0) == pytest.approx(rates().size.weight_bytes / 20e9)


def test_a_stage_is_its_starts_and_its_work() -> None:
    costs = {
        cost.stage: cost for cost in Budget(params(), WORK, rates(), SMOLLM).costs()
    }  # fmt: skip
    assert costs["prepare"].starts == 1
    # 4,800 tokens of answers, 32 at once, each step reads the weights or computes 32 tokens
    step_s = rates().step_s(32, 6000 // 120)
    read_s = rates().prefill_s(1200, 50)
    assert costs["prepare"].work_s == pytest.approx(4800 / 32 * step_s + read_s)
    assert costs["prepare"].basis == "estimated"
    assert costs["extract"].written_bytes == 6000 * (4 * 576 * 2 + 4)


def test_engines_share_the_work_where_each_has_a_gpu_and_requests_in_flight_on_one() -> None:
    """4,800 tokens of 120 answers; 16 in flight at each of four engines are 64 on one GPU."""
    chosen = params(runtime={"prepare_engines": 4, "extract_engines": 4, "request_concurrency": 16})
    context, many, extracts = 6000 // 120, rates(), []
    for num_gpus, each, apart in ((0, 64, 1), (1, 64, 1), (2, 32, 2), (8, 16, 4)):
        prepare, extract, *_ = Budget(chosen, WORK, many, SMOLLM, num_gpus).costs()
        step_s = many.step_s(each, context)
        read_s = many.prefill_s(1200, context) / apart
        assert prepare.work_s == pytest.approx(4800 / 64 * step_s + read_s), num_gpus
        extracts.append(extract.work_s)
    assert extracts[0] == extracts[1] > extracts[2] > extracts[3]


def test_training_is_six_flop_per_weight_and_token_and_unrolled_step() -> None:
    costs = {cost.stage: cost for cost in Budget(params(), WORK, rates(), SMOLLM).costs()}
    # fc 3H^2; attention 2H(heads + 2 kv)d + heads d H; MLP 3HI; lm_head over 8,192
    head = 3 * 576**2 + 2 * 576 * 15 * 64 + 576 * 576 + 3 * 576 * 1536 + 576 * 8192
    chosen = params().train
    flop = 6 * head * 5000 * chosen.epochs * chosen.ttt_steps
    assert costs["train"].seconds == pytest.approx(flop / SPEED.flop_per_s)
    assert costs["train"].written_bytes == chosen.epochs * head * 12


def test_online_keeps_no_states_and_trains_nothing_yet() -> None:
    online = params(extract={"mode": "online"})
    budget = Budget(online, WORK, rates(), SMOLLM)
    assert budget.state_bytes == 0
    assert "train" not in {cost.stage for cost in budget.costs()}


@pytest.mark.parametrize(
    ("reference", "sweep", "method", "expected"),
    [
        ("beside", [], "ngram", 2),
        ("beside", [1, 2], "ngram", 4),
        ("beside", [1, 2], "none", 2),
        ("bracket", [], "ngram", 1 + 1 * 3 + 1),  # three rounds, mirrored, and the reference again
        ("bracket", [1], "ngram", 1 + 2 * 3 + 1),
    ],
)
def test_engine_starts_of_a_bench(
    reference: str, sweep: list[int], method: str, expected: int
) -> None:
    chosen = params(bench={"reference": reference}, spec={"sweep": sweep})
    costs = {cost.stage: cost for cost in Budget(chosen, WORK, rates(), SMOLLM).costs()}
    assert costs[f"bench@{method}"].starts == expected


def test_states_are_on_the_disk_three_times_or_once_and_a_hub_verifier_in_the_hubs_cache() -> None:
    budget = Budget(params(), WORK, rates(), SMOLLM)
    states = 6000 * (4 * 576 * 2 + 4)
    wheel = disk_needs(budget, params().verifier, 1000, is_linked=False)
    assert sum(wheel.values()) == 3 * states + 2 * 1000 + budget.checkpoint_bytes
    linked = disk_needs(budget, params().verifier, 1000, is_linked=True)
    assert sum(linked.values()) == states + 1000 + budget.checkpoint_bytes
    hub = params(verifier={"source": "hub:a/b"}).verifier
    needs = disk_needs(budget, hub, 1000, is_linked=True)
    assert [size for folder, size in needs.items() if "models--a--b" in folder.parts] == [1000]
    assert sum(needs.values()) == states + 1000 + budget.checkpoint_bytes


def test_cells_are_a_request_each_at_one_in_flight_and_waves_above() -> None:
    bench = {"concurrency": [1, 4], "requests": 6, "rounds": 2, "rates": [3.0], "seconds": 5.0}
    found = bench_cells(params(bench=bench), 7)
    assert [(cell.in_flight, cell.waves) for cell in found[:2]] == [
        (1, 6 * 2 * 7),  # requests x rounds x types
        (4, 2 * 2 * 7),  # two waves for six requests
    ]
    assert found[2].seconds == 2 * 6 * 5.0


def test_conversations_are_counted_with_answers_of_full_length(
    tmp_path: Path,
) -> None:
    rows = [{"messages": [{"role": "user", "content": f"one two three {n}"}]} for n in range(60)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bench = [{"messages": [{"role": "user", "content": f"other words {n}"}]} for n in range(5)]
    (tmp_path / "y.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bench))
    chosen = params(
        prepare={
            "dataset": f"file:{tmp_path / 'x.jsonl'}", "bench": f"file:{tmp_path / 'y.jsonl'}",
            "limit": 20, "heldout": 2, "max_tokens": 10,
        }
    )  # fmt: skip
    found = workload(chosen, lambda text: len(text.split()))
    assert found.training == Turns(20, 20 * 4, 20 * 14, 200)
    assert found.bench == Turns(5, 5 * 3, 5 * 13, 50)
    assert found.bench_prompt_tokens == 3


def test_a_dataset_on_the_hub_is_bounded_by_what_params_allow_and_a_local_one_is_counted() -> None:
    chosen = params(prepare={"dataset": "hub:a/b", "limit": 50})
    found = workload(chosen, lambda text: len(text) // 4)
    assert found.training.row_tokens == 50 * 2048
    local = workload(params(), lambda text: len(text) // 4)
    assert (found.bench, found.num_categories) == (local.bench, 7)
    assert found.bench_prompt_tokens == local.bench_prompt_tokens < 1000
    measured = workload(params(prepare={"bench": "hub:a/b", "bench_per_category": 5}), len)
    assert measured.bench.row_tokens == 5 * 2048
    assert (measured.num_categories, measured.bench_prompt_tokens) == (1, 2048 - 192)
    with pytest.raises(ValueError, match=r"prepare\.limit and prepare\.max_rows"):
        workload(params(prepare={"dataset": "hub:a/b", "limit": None, "max_rows": None}), len)


def test_records_count_only_on_the_machine_and_verifier_that_they_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    verifier = params().verifier.model_dump()
    lock = {"stages": {"verifier": {"params": {"params.yaml": {"verifier": verifier}}}}}
    here = machine()
    for path, content in {
        "dvc.lock": lock,
        "reports/hardware.json": here.hardware,
        "reports/bench/none.json": {"engine": {"reference_k0_0": {"startup_s": 31.0}}},
        "reports/curves.json": {
            "startup_s": {"none": 33.0},
            "points": [
                {"kind": "none", "batch": 1, "step_ms": 10.0},
                {"kind": "eagle3", "batch": 1, "step_ms": 14.0},
                {"kind": "tokens", "batch": 1, "step_ms": 12.0},
            ],
        },
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(content))
    assert read_records(params(), here) == Records([31.0, 33.0], {1: 10.0}, {1: 14.0})
    assert read_records(params(), machine(versions={"vllm": "0.33.0"})) == Records()
    assert read_records(params(verifier={"max_model_len": 64}), here) == Records()


def test_this_machine_is_measured(tmp_path: Path) -> None:
    found = measure("cpu", "float32", tmp_path)
    assert 1e8 < found.bandwidth_bytes_per_s < 1e13
    assert 1e8 < found.flop_per_s < 1e15
    assert found.read_bytes_per_s > 1e6
    assert list(tmp_path.iterdir()) == []


def test_the_bound_of_a_sample_lies_above_the_samples_of_the_committed_run() -> None:
    """Upper bounds must lie above the committed run (reports/prepare.json), and not far."""
    chosen = params()
    found = workload(chosen, lambda text: len(text) // 4)
    kept = json.loads((ROOT / "reports/prepare.json").read_text())
    per_row = kept["train"]["num_tokens"] / kept["train"]["num_kept"]
    assert per_row < found.training.row_tokens / found.training.number < 3 * per_row
