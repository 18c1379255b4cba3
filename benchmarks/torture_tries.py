"""One undisturbed run of a stage, and one try: strike, look, run again, compare."""

import contextlib
import fcntl
import random
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks import torture_table
from benchmarks.torture_faults import FAULTS, Fault, end, tidy
from benchmarks.torture_runs import Run
from benchmarks.torture_stages import STAGES
from benchmarks.torture_workspace import Workspace
from specmill.files import read_json

TOLERANCE = 0.01
"""By how much, relatively, a figure of a head whose training was interrupted may differ."""
LIMIT_S = 900
"""Longest time a run may take; longer counts as hanging."""
GRACE_S = 60
"""Longest time processes may take to go after DVC has ended."""
_LOOK_S = 0.1


def undisturbed(workspace: Workspace, stage: str) -> dict[str, Any]:
    """Run a stage once from nothing: its `seconds`, `units` of work and `digests` of what it makes.

    Raises:
        RuntimeError: when it fails; quotes the end of its log.
    """
    workspace.before(stage)
    kept, started = STAGES[stage], time.monotonic()
    run = Run(workspace, stage, f"undisturbed-{stage}-{secrets.token_hex(4)}", random.Random(0))
    run.start()
    try:
        status = run.dvc.wait()
    finally:
        end(run)
    seconds, log = round(time.monotonic() - started, 2), run.log.read_text()
    if status:
        raise RuntimeError(f"{stage} failed undisturbed:\n{log[-4000:]}")
    workspace.keep(stage)
    return {
        "seconds": seconds,
        "units": kept.did(workspace.folder, set(), log),
        "digests": workspace.digests(stage),
    }


def attempt(
    workspace: Workspace, stage: str, name: str, number: int, seed: int, usual: dict[str, Any]
) -> dict[str, Any]:
    """One try: strike, look, run again, compare.

    Args:
        workspace: With every stage undisturbed.
        stage: Whom it meets.
        name: The fault.
        number: Of the try, from 0.
        seed: Draws the moment, with stage, fault and number.
        usual: What `undisturbed` found.

    Returns:
        What the page and whoever looks for a defect need; `problems` is empty where all is well.
    """
    fault, kept, folder = FAULTS[name], STAGES[stage], workspace.folder
    chance = random.Random(f"{seed} {stage} {name} {number}")
    run = Run(workspace, stage, f"{stage}-{name}-{number}-{secrets.token_hex(4)}", chance)
    workspace.before(stage)
    try:
        fault.before(run)
        run.start()
        appeared = _wait_for_moment(run, fault, usual)
        ports, before = run.listening(), _finished(run, usual)
        at_s = round(time.monotonic() - appeared, 2)
        hit = fault.strike(run)
        struck = time.monotonic()
        record: dict[str, Any] = {"stage": stage, "fault": name, "try": number, "at_s": at_s,
                                  "hit": hit, "first": None, "left": [], "ports": []}  # fmt: skip
        if fault.settles or hit is None:
            record |= _settled(run, ports)
            record["ended_s"] = round(time.monotonic() - struck, 2)
            if name == "cut":  # what is there when the file is cut
                before = kept.finished(folder)
        record |= _traces(workspace)
        fault.mend(run)
        if run.notes.get("cut", "") is None:  # it had left no file yet
            record["hit"] = None
        record |= _second(run, before, usual, record["first"])
        if not fault.settles:
            record["left_after_second"] += _settled(run, set())["left"]
        record["scratch"] = [str(path.relative_to(folder)) for path in _scratch(folder)]
        record["notes"] = run.notes
        record["problems"] = torture_table.problems(record, takes=fault.takes)
        return record
    finally:
        tidy(run)
        fault.after(run)
        workspace.restore(stage)


def _finished(run: Run, usual: dict[str, Any]) -> set[str]:
    """Units that are finished: all of them once the report is there, after which a stage clears
    what it had kept."""
    found = STAGES[run.stage].finished(run.workspace.folder)
    reports = [name for name in run.workspace.outputs(run.stage) if name.endswith(".json")]
    if not found and any((run.workspace.folder / name).is_file() for name in reports):
        return {f"cleared {number}" for number in range(usual["units"])}
    return found


def _wait_for_moment(run: Run, fault: Fault, usual: dict[str, Any]) -> float:
    """Sleep until the moment; when the stage, or its first engine, had appeared."""
    started = time.monotonic()
    deadline = started + 4 * usual["seconds"] + GRACE_S
    appeared = run.engines if fault.at_engine else run.stage_process
    while not appeared() and run.dvc.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    now = time.monotonic()
    time.sleep(run.chance.uniform(0, max(0.0, usual["seconds"] - (now - started))))
    return now


def _settled(run: Run, ports: set[int]) -> dict[str, Any]:
    """Wait until DVC has ended and everything it started is gone."""
    found: dict[str, Any] = {"first": _ended(run)}
    until = time.monotonic() + GRACE_S
    while run.processes() and time.monotonic() < until:
        time.sleep(_LOOK_S)
    found["left"] = _told(run)
    found["ports"] = [port for port in ports if _answers(port)]
    return found


def _ended(run: Run) -> int | None:
    """Wait for DVC's status; None when it takes too long."""
    deadline = time.monotonic() + LIMIT_S
    while run.dvc.poll() is None and time.monotonic() < deadline:
        run.processes()  # to know the sessions of its servers whatever becomes of them
        time.sleep(_LOOK_S)
    return run.dvc.returncode


def _told(run: Run) -> list[str]:
    told = []
    for process in run.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            told.append(" ".join(process.cmdline())[:200] or process.name())
    return told


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _traces(workspace: Workspace) -> dict[str, Any]:
    """Locks that are held and MLflow runs that say they are RUNNING."""
    held = []
    for path in workspace.folder.glob(".cache/locks/*"):
        with path.open("rb") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(path.name)
    return {"locks": held, "running": workspace.running_runs()}


def _second(run: Run, before: set[str], usual: dict[str, Any], first: int | None) -> dict[str, Any]:
    """Run the stage again; what was lost, repeated and made."""
    workspace, kept = run.workspace, STAGES[run.stage]
    after = kept.finished(workspace.folder)
    done_first = kept.did(workspace.folder, set(), run.log.read_text()) if first == 0 else 0
    again = Run(workspace, run.stage, f"{run.token}-again", run.chance)
    started = time.monotonic()
    again.start()
    try:
        status = _ended(again)
        seconds = round(time.monotonic() - started, 2)
        left = _settled(again, set())["left"] if status is not None else _told(again)
    finally:
        end(again)
    log = again.log.read_text()
    did = 0 if first == 0 else kept.did(workspace.folder, after, log)
    made = workspace.digests(run.stage) if status == 0 else {}
    differing = [name for name, value in usual["digests"].items() if made.get(name) != value]
    near = run.stage == "train" and status == 0 and bool(differing) and _near(workspace)
    return {
        **torture_table.count(usual["units"], before, after, did, done_first, first == 0),
        "second": status,
        "second_s": seconds,
        "recover_s": round(seconds - usual["seconds"], 2),
        "left_after_second": left,
        "running_after_second": workspace.running_runs(),
        "differing": [] if near else differing,
        "near": near,
        "said": log[-1500:] if status else "",
        "tracebacks": torture_table.tracebacks(run.log.read_text()),
    }


def _near(workspace: Workspace) -> bool:
    """Whether the head is worth what the undisturbed one is, within the tolerance."""
    name = "reports/train.json"
    one, other = read_json(workspace.folder / name), read_json(workspace.kept / name)
    return all(
        abs(one[key] - value) <= TOLERANCE * abs(value)
        for key, value in other.items()
        if key in ("loss_epoch", "expected_length")
    )


def _scratch(folder: Path) -> Iterator[Path]:
    """Temporary files that writers have left."""
    for name in (".cache", "data", "models", "reports"):
        for pattern in (".*.tmp", "*.new"):
            yield from (folder / name).rglob(pattern)
