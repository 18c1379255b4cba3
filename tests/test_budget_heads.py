"""Further heads and replays, by hand: SmolLM2 with 100 training samples of 50 tokens."""

from typing import Any

import pytest

from specmill.budget import NOT_ESTIMATED, Budget, Cost
from specmill.budget_heads import cut_bytes
from specmill.doctor_verifier import size_of
from specmill.rates import Rates, Records
from specmill.workload import Turns, Workload
from tests.configs import MIXTRAL
from tests.patients import SMOLLM, SPEED, card, params

WORK = Workload(
    Turns(100, 1000, 5000, 4000), Turns(10, 100, 500, 400), Turns(10, 100, 500, 400), 7, 10
)
HEAD = (
    3 * 576**2 + 2 * 576 * 15 * 64 + 576 * 576 + 3 * 576 * 1536 + 576 * 8192
)  # fc; attention with nine heads and twice three of 64, then o; MLP; lm_head
LAYER = 576 * 15 * 64 + 576 * 576 + 3 * 576 * 1536
WHEN_SAVED = 4 * 3
"""float32, with two moments."""
STATES = 4 * 576 * 2 + 4
"""Bytes of one token: four layers in bfloat16 and its id."""


def costs(known: Records | None = None, **changes: Any) -> dict[str, Cost]:
    chosen = params(**changes)
    rates = Rates(size_of(card(), chosen, "bfloat16"), SPEED, "cpu", 10.0, known or Records())
    return {cost.stage: cost for cost in Budget(chosen, WORK, rates, SMOLLM).costs()}


MEDUSA: dict[str, Any] = {
    "num_heads": 3, "num_layers": 2, "vocabulary": "draft", "epochs": 4, "lr": 1e-3,
    "tokens_per_step": 256, "max_samples": 25, "seed": 1,
}  # fmt: skip


@pytest.mark.parametrize(("vocabulary", "num_tokens"), [("draft", 8192), ("full", 49152)])
def test_medusa_heads_train_their_blocks_through_a_frozen_lm_head(
    vocabulary: str, num_tokens: int
) -> None:
    found = costs(medusa={"three": MEDUSA | {"vocabulary": vocabulary}})["train_medusa@three"]
    blocks = 3 * 2 * 576**2
    # a quarter of 4,000 answered tokens, four times
    flop = 1000 * 4 * (6 * blocks + 4 * 3 * 576 * num_tokens)
    assert found.seconds == pytest.approx(flop / 100e9)
    assert found.written_bytes == 4 * blocks * WHEN_SAVED
    assert (found.starts, found.basis) == (0, "estimated")


def test_a_draft_model_is_its_layers_read_and_written() -> None:
    found = costs(draft_models={"first": {"num_layers": 20}})["draft_model@first"]
    kept = 2 * (20 * LAYER + 576 * 49152)  # bfloat16; embedding and lm_head are one
    assert found.written_bytes == kept
    assert found.seconds == pytest.approx(kept / 500e6 + kept / 200e6)


def test_layers_with_experts_are_cut_with_them() -> None:
    size = size_of(card(MIXTRAL), params(), "bfloat16")
    # embedding and lm_head of 32,000 tokens, 4,096 wide; half of all 32 layers
    around = 2 * 2 * 4096 * 32000
    assert cut_bytes(size, 16) == around + (size.weight_bytes - around) // 2


def test_a_foreign_head_is_a_copy_a_start_states_and_a_training() -> None:
    foreign = {"noise": 0.1, "max_samples": 50, "epochs": 2, "seed": 1}
    found = costs(foreign_heads={"noised": foreign})["foreign_head@noised"]
    weights = 2 * (30 * LAYER + 576 * 49152)
    copied_s = weights / 500e6 + weights / 200e6
    tokens = 2500 + 500
    # a token before 25 others: projections of all layers, attention of 9 heads of 64 in 30 layers
    read_s = tokens * (2 * (30 * LAYER + 576 * 49152) + 30 * 25 * 4 * 9 * 64) / 100e9
    assert read_s > tokens * STATES / 200e6
    train_s = 6 * HEAD * 2500 * 2 * params().train.ttt_steps / 100e9
    assert found.starts == 1
    assert found.work_s == pytest.approx(copied_s + read_s + train_s, rel=1e-3)
    # three processes import for 10 s each, then the weights are read
    assert found.seconds == pytest.approx(found.work_s + 30 + weights / 500e6)
    assert found.written_bytes == weights + tokens * STATES + 2 * HEAD * WHEN_SAVED


def test_heads_that_are_only_looked_at_have_a_row_without_a_time() -> None:
    found = costs(
        heads={"theirs": {"source": "hub:a/b"}}, spoiled_heads={"mixed": {"fault": "shuffled_d2t"}}
    )
    for stage in ("head@theirs", "spoiled_head@mixed"):
        assert found[stage] == Cost(stage, 0, 0.0, None, 0, NOT_ESTIMATED)


def test_replays_of_heads_are_forward_passes_over_the_answers_and_lookups_are_not_estimated() -> (
    None
):
    rows = {
        "peagle": {"method": "peagle", "section": "spec", "head": "models/siblings/peagle"},
        "medusa": {"method": "medusa", "section": "spec", "head": "models/medusa/three"},
    }
    found = costs(methods=rows, medusa={"three": MEDUSA})
    drafts = params().train.ttt_steps
    assert found["replay@eagle3"].seconds == pytest.approx(2 * HEAD * 500 * drafts / 100e9)
    each = 2 * 3 * (2 * 576**2 + 576 * 8192)
    assert found["replay@medusa"].seconds == pytest.approx(each * 500 / 100e9)
    assert found["replay@ngram"] == Cost("replay@ngram", 0, 0.0, None, 0, NOT_ESTIMATED)
    # neither is replayed
    assert not {"replay@none", "replay@peagle"} & found.keys()


def test_what_is_not_kept_is_neither_trained_on_nor_replayed() -> None:
    foreign = {"noise": 0.1, "max_samples": 50, "epochs": 2, "seed": 1}
    found = costs(
        extract={"mode": "online"}, medusa={"three": MEDUSA}, foreign_heads={"noised": foreign}
    )
    assert not {"train_medusa@three", "foreign_head@noised", "replay@eagle3"} & found.keys()


@pytest.mark.parametrize(("reference", "starts"), [("beside", 2), ("bracket", 5)])
def test_a_scheduled_row_is_a_bench_of_one_server_at_the_largest_k_of_the_curves(
    reference: str, starts: int
) -> None:
    # of one request a step takes 10 ms, 20 with drafts; a second is open loop
    known = Records([40.0], {1: 10.0}, {1: 20.0})
    bench = {"reference": reference, "concurrency": [1], "requests": 2, "rounds": 3}
    scheduled = {"eagle3": {"method": "eagle3", "head": "models/eagle3"}}
    found = costs(known, bench=bench, scheduled=scheduled, spec={"sweep": [1, 2]})
    stage = found["bench_scheduled@eagle3"]
    steps = 2 * 3 * 7 * 64  # requests, rounds, prompt types, tokens of an answer
    prompts = 2 * 3 * 7 * 10
    read_s = prompts * (2 * (30 * LAYER + 576 * 49152) + 30 * 5 * 4 * 9 * 64) / 100e9
    assert stage.work_s == pytest.approx(steps * (0.010 + 0.020) + 2 * read_s, rel=1e-3)
    assert stage.starts == starts
    assert stage.seconds == pytest.approx(starts * 40.0 + stage.work_s)
    assert stage.basis == "measured here"
