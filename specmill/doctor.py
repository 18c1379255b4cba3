"""Would a run work here, and what would it take? Says so in a minute or two, before anything runs.

    make doctor                                          params.yaml, on this machine
    python -m specmill.doctor --params profiles/smoke.yaml --json
    python -m specmill.doctor --dollars-per-hour 2.5     what each stage would cost

Every check is a line: ok, warning or problem, what was found and what to do. Ends with status 1
when there is a problem. No engine is started; docs/doctor.md says what is looked at.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

from specmill import doctor_services, paths
from specmill.budget import Budget, Cost
from specmill.doctor_disk import check_disk, disk_needs
from specmill.doctor_machine import check_dtype, check_gpus, check_system, check_versions
from specmill.doctor_verifier import (
    Card,
    check_card,
    check_engine,
    check_memory,
    read_card,
    served_dtype,
    size_of,
)
from specmill.draft_config import read_draft
from specmill.finding import Finding
from specmill.machine_look import MachineNow, look
from specmill.masked import masked
from specmill.methods import check_methods
from specmill.params import Params
from specmill.params_file import load_params
from specmill.probe import Speed, measure
from specmill.rates import Rates, read_records
from specmill.workload import workload

_ENGINE_WAIT_S = 600.0


@dataclass(frozen=True)
class Seen:
    """Everything that was asked of the machine; the rest follows from it and params.yaml."""

    machine: MachineNow
    card: Card | ValueError | OSError
    """The verifier, or why it cannot be read."""
    engine: dict[str, Any] | str
    """What `python -m specmill.signatures` says, or why it says nothing."""
    speed: Speed
    """Of one GPU where there are several."""
    is_linked: bool
    """Whether DVC's cache and the workspace share files."""


@dataclass(frozen=True)
class Examination:
    """The doctor's answer."""

    findings: list[Finding]
    costs: list[Cost]
    """Empty where the verifier's weights cannot be counted."""

    @property
    def is_ill(self) -> bool:
        """Whether there is a problem."""
        return any(finding.level == "problem" for finding in self.findings)


def see(params: Params) -> Seen:
    """Ask this machine."""
    machine = look()
    card: Card | ValueError | OSError
    try:
        card = read_card(params.verifier)
    except (ValueError, OSError) as error:
        card = error
    native = machine.native_dtype
    dtype = served_dtype(card, params, native) if isinstance(card, Card) else native
    with tempfile.TemporaryDirectory(dir=paths.ROOT) as scratch:
        speed = measure(machine.device, dtype, Path(scratch))
    architecture = [card.architecture] if isinstance(card, Card) else []
    linked = doctor_services.cache_is_linked(paths.ROOT)
    return Seen(machine, card, _engine(architecture), speed, linked)


def _engine(architecture: list[str]) -> dict[str, Any] | str:
    """vLLM's own words, from a process that may fail alone."""
    command = [sys.executable, "-m", "specmill.signatures", *architecture]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ENGINE_WAIT_S
        )
    except subprocess.TimeoutExpired:
        return f"importing vLLM took more than {_ENGINE_WAIT_S:g} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it gave no reason"])[-1][:300]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def examine(params: Params, seen: Seen, services: list[Finding]) -> Examination:
    """Judge what was seen by what params.yaml asks for.

    Args:
        params: Of params.yaml.
        seen: Of `see`.
        services: Of `specmill.doctor_services`.
    """
    machine = seen.machine
    found = [
        *check_versions(machine),
        *check_gpus(machine, params),
        *check_dtype(machine, params),
        *check_system(machine),
        *services,
        *_rows(params),
    ]
    if not isinstance(seen.card, Card):
        lost = Finding("problem", "verifier", str(seen.card), "verifier.source says where it is")
        return Examination([*found, *_imports(seen.engine), lost], [])
    found += check_card(seen.card, params)
    found += (
        check_engine(seen.card, params, seen.engine)
        if isinstance(seen.engine, dict)
        else _imports(seen.engine)
    )
    more, costs = _sized(params, seen, seen.card)
    return Examination(found + more, costs)


def _imports(engine: dict[str, Any] | str) -> list[Finding]:
    if isinstance(engine, dict):
        return []
    return [Finding("problem", "engine", f"vLLM cannot be imported: {engine}", "make venv")]


def _rows(params: Params) -> list[Finding]:
    try:
        check_methods(params)
    except ValueError as error:
        return [Finding("problem", "methods", str(error), "see docs/methods.md")]
    return [Finding("ok", "methods", ", ".join(params.methods))]


def _sized(params: Params, seen: Seen, card: Card) -> tuple[list[Finding], list[Cost]]:
    """Memory, disk and the cost of every stage: all that needs the verifier's bytes."""
    machine = seen.machine
    try:
        size = size_of(card, params, machine.native_dtype)
    except ValueError as error:
        return [Finding("warning", "size", str(error), "bytes and minutes are not known")], []
    found = check_memory(size, machine, params)
    try:
        work = workload(params, lambda text: len(card.tokenizer(text).input_ids))
    except (ValueError, OSError) as error:
        way_out = "see docs/own-dataset.md; `make prompts` writes data/prompts/large.jsonl"
        return [*found, Finding("problem", "prompts", str(error), way_out)], []
    every = work.all
    found.append(
        Finding("ok", "prompts", f"{work.training.number} training, {work.heldout.number} held "
                f"out, {work.bench.number} to measure; at most {every.row_tokens:,} tokens")
    )  # fmt: skip
    import_s = float(seen.engine["import_s"]) if isinstance(seen.engine, dict) else 0.0
    rates = Rates(size, seen.speed, machine.device, import_s, read_records(params, machine),
                  params.parallel.tensor_parallel_size)  # fmt: skip
    num_gpus = len(machine.hardware["gpus"])
    budget = Budget(params, work, rates, _head_config(params, card), num_gpus)
    needs = disk_needs(budget, params.verifier, size.weight_bytes, is_linked=seen.is_linked)
    return [*found, *check_disk(needs)], budget.costs()


def _head_config(params: Params, card: Card) -> dict[str, Any]:
    """What the trained head is shaped like; the verifier where `train.draft` is no good."""
    try:
        return read_draft(params.train.draft) or card.config
    except ValueError:  # check_card has said so
        return card.config


def text(answer: Examination, dollars_per_hour: float | None) -> str:
    """The answer as it is printed."""
    lines = [finding.line for finding in answer.findings]
    if answer.costs:
        lines += ["", *_table(answer.costs, dollars_per_hour)]
    number = sum(finding.level == "problem" for finding in answer.findings)
    return "\n".join([*lines, "", f"{number} problem(s)" if number else "no problem found"]) + "\n"


def _table(costs: list[Cost], dollars_per_hour: float | None) -> Iterator[str]:
    priced = dollars_per_hour is not None
    width = max(24, *(len(cost.stage) for cost in costs))
    yield f"{'stage':{width}} {'engines':>7} {'minutes':>8} {'GB':>8}" + (
        " " * 8 + "$" if priced else ""
    )
    unknown = sum(cost.seconds is None for cost in costs)
    total = Cost(
        "all of these",
        sum(cost.starts for cost in costs),
        sum(cost.work_s for cost in costs),
        sum(cost.seconds for cost in costs if cost.seconds is not None),
        sum(cost.written_bytes for cost in costs),
        f"but {unknown} without a rate" if unknown else "",
    )
    for cost in [*costs, total]:
        dollars = _dollars(cost, dollars_per_hour)
        minutes = "-" if cost.seconds is None else f"{cost.seconds / 60:.1f}"
        price = "" if not priced else " " + ("-" if dollars is None else f"{dollars:.2f}").rjust(8)
        yield (
            f"{cost.stage:{width}} {cost.starts:7} {minutes:>8} "
            f"{cost.written_bytes / 1e9:8.2f}{price}  {cost.basis}"
        ).rstrip()


def _dollars(cost: Cost, dollars_per_hour: float | None) -> float | None:
    """None without a price, or where nobody knows how long it takes."""
    if dollars_per_hour is None or cost.seconds is None:
        return None
    return cost.seconds / 3600 * dollars_per_hour


def _price(text: str) -> float:
    """Of the command line."""
    try:
        price = float(text)
    except ValueError:
        price = nan
    if not 0 <= price < inf:
        raise argparse.ArgumentTypeError(f"{text} is no price, a number from 0 on")
    return price


def as_data(answer: Examination, dollars_per_hour: float | None) -> dict[str, Any]:
    """The answer as JSON holds it; `dollars` where a price was given."""
    costs = [asdict(cost) for cost in answer.costs]
    if dollars_per_hour is not None:
        for row, cost in zip(costs, answer.costs, strict=True):
            row["dollars"] = _dollars(cost, dollars_per_hour)
    findings = [asdict(finding) for finding in answer.findings]
    return {"ok": not answer.is_ill, "findings": findings, "costs": costs}


def main(arguments: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m specmill.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--params", type=Path, default=paths.PARAMS, help="another params file")
    parser.add_argument("--json", action="store_true", help="the same as data")
    parser.add_argument(
        "--dollars-per-hour", type=_price, metavar="X", help="of this machine; no default"
    )
    chosen = parser.parse_args(arguments)
    try:
        params = load_params(chosen.params)
    except (ValueError, OSError) as error:
        sys.exit(masked(f"problem  params: {error}"))
    answer = examine(params, see(params), doctor_services.check_all(params))
    price = chosen.dollars_per_hour
    if chosen.json:
        sys.stdout.write(masked(json.dumps(as_data(answer, price), indent=2)) + "\n")
    else:
        sys.stdout.write(masked(text(answer, price)))
    sys.exit(1 if answer.is_ill else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
