"""Waves against servers that are not there: which are sent, in what order, and what is kept."""

import os
from pathlib import Path
from typing import Any

import pytest

from specmill import curve_waves
from specmill.client import TimedAnswer
from specmill.curve_engines import REFERENCE, plan_groups
from specmill.curve_waves import (
    Measured,
    curve_fleet,
    deal_prompts,
    describe,
    mean_length,
    measure_curves,
    wave_order,
)
from specmill.curves import curve_points
from specmill.params_curves import Curves
from specmill.server import Server
from tests.benched import bench_section, prompts
from tests.lab import Lab
from tests.waves import THREE, curves_section, streamed, waves_of


def test_every_second_repeat_runs_backwards() -> None:
    forth = list(wave_order([REFERENCE, THREE], [1, 4], 0))
    assert [(engine.kind, k, batch) for engine, k, batch in forth] == [
        ("none", 0, 1), ("tokens", 1, 1), ("tokens", 3, 1),
        ("none", 0, 4), ("tokens", 1, 4), ("tokens", 3, 4),
    ]  # fmt: skip
    assert list(wave_order([REFERENCE, THREE], [1, 4], 1)) == forth[::-1]
    assert list(wave_order([REFERENCE, THREE], [1, 4], 2)) == forth


def test_the_plan_counts_starts_and_waves() -> None:
    groups = plan_groups([THREE], "beside")
    assert describe(groups, curves_section()) == (
        "plan: 2 engine starts, 6 waves each 2 times, 4 steps of each timed"
    )


def test_a_kind_is_missing_only_when_it_was_measured_at_no_k() -> None:
    measured = Measured(
        waves=waves_of("medusa/a", 1, [10.0]),
        refused={"medusa/a": {"8": "too many"}, "peagle": {"1": "first", "3": "second"}},
    )
    assert measured.missing == {"peagle": "first"}


def test_engines_that_are_compared_get_the_same_prompts_and_waves_get_others() -> None:
    dealt = deal_prompts(prompts("coding", 9), curves_section(), 64)
    assert sorted(dealt) == [(-1, 1), (-1, 2), (0, 1), (0, 2), (1, 1), (1, 2)]
    assert all(len(wave) == batch for (_, batch), wave in dealt.items())
    every = [tuple(ids) for wave in dealt.values() for ids in wave]
    assert len(set(every)) == len(every) == 9
    assert mean_length(dealt) == 2.0


def test_answers_that_do_not_fit_behind_a_prompt_are_refused() -> None:
    # prompt 2, timed 4, lead 4, a draft of 3 and its bonus token
    deal_prompts(prompts("coding", 1), curves_section(), 14)
    with pytest.raises(ValueError, match=r"curves\.steps is 4.*max_model_len \(13\)"):
        deal_prompts(prompts("coding", 1), curves_section(), 13)
    with pytest.raises(ValueError, match=r"no bench prompts \(prepare\.bench\)"):
        deal_prompts([], curves_section(), 64)


class Sender:
    """Stands for the servers' answers: `step` seconds a chunk, `size` tokens in each."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, dict[str, Any]]] = []
        self.size = {"none": 1, "tokens": 2}

    async def send(
        self, server: Server, _timeout_s: float, ids: list[list[int]], sampling: dict[str, Any]
    ) -> list[TimedAnswer]:
        kind = "none" if "vllm_xargs" not in sampling else "tokens"
        self.sent.append((kind, len(ids), sampling))
        rest = range(1, 1 + -(-(sampling["max_tokens"] - 1) // self.size[kind]))
        step = {"none": 0.1, "tokens": 0.15}[kind]
        chunks = [(step, 1), *((step * (1 + i), self.size[kind]) for i in rest)]
        return [streamed(*chunks) for _ in ids]


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Sender:
    sender = Sender()
    monkeypatch.setattr(curve_waves, "send_wave", sender.send)
    return sender


def measure(lab: Lab, chosen: Curves, reference: str = "beside") -> Measured:
    dealt = deal_prompts(prompts("coding", 9), chosen, 64)
    groups = plan_groups([THREE], reference)
    with curve_fleet(lab.start, dealt, bench_section(), 30) as fleet:
        return measure_curves(groups, fleet, dealt, chosen, 64, lab.folder / "kept")


@pytest.mark.parametrize("reference", ["beside", "bracket"])
def test_every_wave_is_sent_as_often_as_asked_and_answers_are_long_enough(
    tmp_path: Path, sender: Sender, reference: str
) -> None:
    lab = Lab(tmp_path)
    chosen = curves_section()
    measured = measure(lab, chosen, reference)
    assert lab.most_up == (2 if reference == "beside" else 1)
    assert len(lab.starts) == 2
    waves = [(kind, batch, sampling.get("vllm_xargs"), sampling["max_tokens"])
             for kind, batch, sampling in sender.sent]  # fmt: skip
    # warming up: K + 1 and 4 more; then (4 steps + 4) chunks of as many tokens as came in them
    for kind, k, short, long in (("none", None, 5, 8), ("tokens", 1, 6, 16), ("tokens", 3, 8, 16)):
        told = k and {"k": k}
        for batch in (1, 2):
            assert waves.count((kind, batch, told, short)) == 1
            assert waves.count((kind, batch, told, long)) == chosen.repeats
    assert all(sampling["ignore_eos"] for _, _, sampling in sender.sent)
    points = {(point["kind"], point["k"], point["batch"]): point
              for point in curve_points(measured.waves)}  # fmt: skip
    assert points["tokens", 3, 2]["ratio"] == pytest.approx(1.5)
    assert points["tokens", 3, 2]["tokens_per_step"] == 2.0
    assert sorted(measured.engines) == ["none", "tokens"]
    assert measured.engines["tokens"]["startup_s"] == 1.2


def test_what_an_interrupted_stage_has_kept_is_not_measured_again(
    tmp_path: Path, sender: Sender
) -> None:
    lab = Lab(tmp_path)
    first = measure(lab, curves_section())
    count = len(sender.sent)
    assert measure(lab, curves_section()) == first
    assert len(sender.sent) == count
    assert len(lab.starts) == 2


def test_a_group_that_was_cut_is_measured_again(tmp_path: Path, sender: Sender) -> None:
    lab = Lab(tmp_path)
    first = measure(lab, curves_section())
    count = len(sender.sent)
    (group,) = (tmp_path / "kept").glob("*.json")
    os.truncate(group, 100)
    assert len(measure(lab, curves_section()).waves) == len(first.waves)
    assert len(sender.sent) == 2 * count


def test_a_kind_that_the_engine_refuses_leaves_the_others(tmp_path: Path, sender: Sender) -> None:
    lab = Lab(tmp_path, refused={"tokens_k3"})
    measured = measure(lab, curves_section())
    reason = "vLLM does not start with it: ValueError: no such head"
    assert measured.refused == {"tokens": {"3": reason}}
    assert measured.missing == {"tokens": reason}
