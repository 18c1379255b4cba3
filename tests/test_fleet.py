import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specmill.fleet import Fleet, Refused, Wait
from specmill.plan import Run
from specmill.section import DoesNotFit
from specmill.server import EngineRefused, Server
from tests.benched import bench_section
from tests.lab import WARMUP, Lab

REFERENCE = Run("reference", None, 0, None)
THREE, ONE = Run("method", 3, 0, {"k": 3}), Run("method", 1, 1, {"k": 1})
NONE = Run("method", None, 0, None)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def fleet_of(lab: Lab, facts: dict[str, dict[str, Any]] | None = None, **changes: Any) -> Fleet:
    return Fleet(lab.start, WARMUP, bench_section(**changes), 30, facts or {})


@pytest.fixture
def fleet(lab: Lab) -> Iterator[Fleet]:
    with fleet_of(lab) as fleet:
        yield fleet


def paused(lab: Lab) -> dict[str, bool]:
    return {name: fakes[-1].paused for name, fakes in lab.fakes.items()}


def test_a_server_is_started_once_and_warmed_up_and_then_kept(lab: Lab, fleet: Fleet) -> None:
    fleet.keep([REFERENCE])
    fleet.keep([REFERENCE, THREE])
    name, server = fleet.server(REFERENCE)
    assert (name, server.startup_s) == ("reference_k0_0", 1.25)
    assert lab.events == ["+ reference_k0_0", "+ method_k3_0"]
    for (fake,) in lab.fakes.values():
        assert [request["prompt"] for request in fake.requests[:2]] == WARMUP


def test_only_the_server_that_is_asked_for_has_the_machine(lab: Lab, fleet: Fleet) -> None:
    fleet.keep([REFERENCE, THREE])
    for run in (REFERENCE, THREE, REFERENCE):
        fleet.server(run)
        assert paused(lab) == {
            "reference_k0_0": run is THREE,
            "method_k3_0": run is REFERENCE,
        }


def test_a_server_starts_and_warms_up_while_the_others_are_paused(lab: Lab, fleet: Fleet) -> None:
    fleet.keep([REFERENCE])
    assert paused(lab) == {"reference_k0_0": False}
    fleet.keep([REFERENCE, THREE])
    assert paused(lab) == {"reference_k0_0": True, "method_k3_0": False}


@pytest.mark.parametrize(
    ("machine", "order"),
    [
        ("cpu", ["starts reference", "starts method", "reference is up", "method is up"]),
        ("cuda", ["starts reference", "reference is up", "starts method", "method is up"]),
    ],
)
def test_servers_start_together_only_where_none_measures_what_memory_is_free(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, machine: str, order: list[str]
) -> None:
    monkeypatch.setattr("specmill.compat.device", lambda: machine)
    seen = []

    @contextlib.contextmanager
    def start(run: Run, name: str) -> Iterator[Wait]:
        seen.append(f"starts {run.role}")
        with lab.start(run, name) as wait:

            def waited() -> Server:
                seen.append(f"{run.role} is up")
                return wait()

            yield waited

    with Fleet(start, WARMUP, bench_section(), 30, {}) as fleet:
        fleet.keep([REFERENCE, THREE])
        assert seen == order
        assert sorted(fleet.facts) == ["method_k3_0", "reference_k0_0"]


def test_servers_that_are_not_kept_are_stopped_before_others_are_started(
    lab: Lab, fleet: Fleet
) -> None:
    fleet.keep([REFERENCE, THREE])
    fleet.keep([REFERENCE, ONE])
    assert lab.events == ["+ reference_k0_0", "+ method_k3_0", "- method_k3_0", "+ method_k1_0"]


def test_leaving_the_fleet_stops_what_is_up(lab: Lab) -> None:
    with fleet_of(lab) as fleet:
        fleet.keep([REFERENCE, THREE])
    assert sorted(lab.events[2:]) == ["- method_k3_0", "- reference_k0_0"]


def test_facts_are_kept_of_every_start_under_a_name_of_its_own(lab: Lab) -> None:
    earlier = {"reference_k0_0": {"dtype": "float16"}}
    with fleet_of(lab, earlier, concurrency=[1, 2]) as fleet:
        fleet.keep([REFERENCE])
        fleet.keep([])
        fleet.keep([REFERENCE])
    assert list(fleet.facts) == ["reference_k0_0", "reference_k0_1", "reference_k0_2"]
    assert fleet.facts["reference_k0_0"] == {"dtype": "float16"}
    facts = fleet.facts["reference_k0_2"]
    assert (facts["dtype"], facts["enforce_eager"]) == ("bfloat16", "True")
    assert facts["startup_s"] == 1.2  # of the fake's 1.25; halves go to the even digit
    assert facts["bound_cores"] is None
    assert list(facts["warmup_waves"]) == ["c1", "c2"]


def test_names_of_k_1_and_k_10_are_counted_apart(lab: Lab) -> None:
    ten = Run("method", 10, 0, {"k": 10})
    with fleet_of(lab) as fleet:
        fleet.keep([ten])
        fleet.keep([ONE])
    assert list(fleet.facts) == ["method_k10_0", "method_k1_0"]


def test_a_server_of_an_open_loop_is_warmed_up_with_what_arrives_in_a_second(lab: Lab) -> None:
    with fleet_of(lab, concurrency=[], rates=[2.5, 0.1]) as fleet:
        fleet.keep([REFERENCE])
    assert list(fleet.facts["reference_k0_0"]["warmup_waves"]) == ["c1", "c3"]
    (fake,) = lab.fakes["reference_k0_0"]
    assert len(fake.requests) >= 2 * (1 + 3)


def test_a_method_that_the_engine_refuses_does_not_fit_once_its_reference_was_served(
    lab: Lab, fleet: Fleet
) -> None:
    lab.refused = {"method_k3"}
    with pytest.raises(
        Refused, match=r"^vLLM does not start with it: ValueError: no such head$"
    ) as caught:
        fleet.keep([REFERENCE, THREE])
    assert caught.value.k == 3
    assert isinstance(caught.value, DoesNotFit)


def test_that_it_was_served_by_an_earlier_execution_is_enough(lab: Lab) -> None:
    lab.refused = {"method_k3"}
    with fleet_of(lab) as fleet, pytest.raises(EngineRefused):
        fleet.keep([THREE])
    with fleet_of(lab, {"reference_k0_0": {}}) as fleet, pytest.raises(DoesNotFit):
        fleet.keep([THREE])


@pytest.mark.parametrize("run", [REFERENCE, NONE])
def test_an_engine_that_does_not_start_without_a_draft_is_an_error_and_no_row(
    lab: Lab, run: Run
) -> None:
    lab.refused = {run.label}
    with (
        fleet_of(lab, {"reference_k0_0": {}}) as fleet,
        pytest.raises(EngineRefused, match="ended with status 1"),
    ):
        fleet.keep([run])


def test_a_refused_server_leaves_the_others_to_be_stopped(lab: Lab) -> None:
    lab.refused = {"method_k3"}
    with fleet_of(lab) as fleet, pytest.raises(DoesNotFit):
        fleet.keep([REFERENCE, THREE])
    assert lab.events == ["+ reference_k0_0", "- reference_k0_0"]


def test_a_reference_whose_method_was_refused_serves_on_and_is_warmed_up(
    lab: Lab, fleet: Fleet
) -> None:
    lab.refused = {"method_k3"}
    with pytest.raises(Refused):
        fleet.keep([REFERENCE, THREE])
    fleet.keep([REFERENCE, ONE])
    assert lab.events == ["+ reference_k0_0", "+ method_k1_0"]
    assert sorted(fleet.facts) == ["method_k1_0", "reference_k0_0"]
    (fake,) = lab.fakes["reference_k0_0"]
    assert [request["prompt"] for request in fake.requests[:2]] == WARMUP
