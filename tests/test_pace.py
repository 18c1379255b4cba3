from pathlib import Path
from typing import Any

import pytest

from specmill.pace import Pace, describe
from specmill.plan import plan_cells, plan_phases
from specmill.recording import Recording
from tests.benched import answer, bench_section, cell, prompts
from tests.lab import Lab

VERIFIER, HARDWARE = {"fingerprint": "f"}, {"machine": "m"}


def pace_of(folder: Path, **changes: Any) -> Pace:
    values = {"fingerprint": "f", "machine": "m"} | changes
    return Pace(
        folder / "deep/pace.json",
        {"fingerprint": values["fingerprint"]},
        {"machine": values["machine"]},
    )


def recording(start_s: list[float], wall_s: float, tokens: int) -> Recording:
    cells = [cell(role, wall_s, answer([1] * tokens)) for role in ("reference", "method")]
    return Recording(cells, {f"server {n}": {"startup_s": s} for n, s in enumerate(start_s)})


def test_the_first_bench_on_a_machine_has_no_estimate(tmp_path: Path) -> None:
    assert pace_of(tmp_path).minutes(starts=2, tokens=100) is None


def test_minutes_are_starts_and_tokens_at_the_pace_of_the_bench_before(tmp_path: Path) -> None:
    # starts of 20 and 40 s; 2 x 50 tokens in 2 x 5 s
    pace_of(tmp_path).remember(recording([20.0, 40.0], 5.0, 50))
    # 3 starts of 30 s and 2100 tokens of 0.1 s
    assert pace_of(tmp_path).minutes(starts=3, tokens=2100) == pytest.approx((90 + 210) / 60)
    pace_of(tmp_path).remember(recording([10.0], 5.0, 50))
    assert pace_of(tmp_path).minutes(starts=6, tokens=0) == pytest.approx(1.0)


@pytest.mark.parametrize("changes", [{"fingerprint": "other"}, {"machine": "other"}])
def test_another_verifier_or_machine_has_a_pace_of_its_own(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    pace_of(tmp_path).remember(recording([60.0], 5.0, 50))
    other = pace_of(tmp_path, **changes)
    assert other.minutes(1, 0) is None
    other.remember(recording([120.0], 5.0, 50))
    assert other.minutes(1, 0) == 2.0
    assert pace_of(tmp_path).minutes(1, 0) == 1.0


@pytest.mark.parametrize("reference", ["beside", "bracket"])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("ks", [[3], [3, 1, 2]])
@pytest.mark.parametrize("wrong", [False, True])
def test_the_engine_starts_that_are_announced_are_the_most_that_happen(
    tmp_path: Path, reference: str, rounds: int, ks: list[int], wrong: bool
) -> None:
    bench = bench_section(reference=reference, rounds=rounds, requests=1, precision=1e-9)
    cells = plan_cells(prompts("coding", 9), bench)
    configs: dict[int, dict[str, Any] | None] = {k: {"k": k} for k in ks}
    phases = plan_phases(configs, reference)
    announced = describe(phases, cells, reference == "beside", 8, pace_of(tmp_path))
    lab = Lab(tmp_path, wrong={f"method_k{ks[0]}"} if wrong else set())
    lab.measure(configs, cells, bench)
    spared = reference == "bracket" and rounds % 2 == 1 and not wrong  # nothing to compare
    assert announced.startswith(f"plan, at most: {len(lab.starts) + spared} engine starts; ")


def test_the_plan_says_how_many_tokens_and_for_how_long(tmp_path: Path) -> None:
    bench = bench_section(rounds=2, requests=3)
    cells = plan_cells(prompts("coding", 9), bench)
    phases = plan_phases({3: {"k": 3}, 1: {"k": 1}}, "beside")
    pace = pace_of(tmp_path)
    # the reference is measured with each of both K: four arms of 2 x 3 requests of 8 tokens
    plan = "2 rounds of 3 cells on 4 servers, 192 output tokens"
    assert describe(phases, cells, True, 8, pace) == (
        f"plan, at most: 3 engine starts; {plan}; "
        "how long is known after the first bench of this verifier here"
    )
    pace.remember(recording([30.0], 100.0, 50))  # 90 s and 192 tokens of 2 s
    assert describe(phases, cells, True, 8, pace).endswith(f"{plan}; 8 minutes")
