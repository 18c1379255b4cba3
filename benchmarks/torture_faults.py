"""What is done to a running stage, in one table: the moment is drawn, the rest stands here."""

import ctypes
import errno
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.torture_runs import Run
from benchmarks.torture_stages import STAGES
from benchmarks.torture_workspace import remove

HANG_S = 15
_CACHED = ("prepare", "extract", "train", "bench@ngram")
_ENGINES = tuple(name for name, kept in STAGES.items() if kept.has_engine)


def _nothing(_: Run) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """One kind."""

    told: str
    """As the page says it."""
    strike: Callable[[Run], str | None]
    """At the moment drawn; says whom it hit, None where there was nothing to hit."""
    stages: tuple[str, ...] = tuple(STAGES)
    before: Callable[[Run], None] = _nothing
    """Before the run starts."""
    mend: Callable[[Run], None] = _nothing
    """When everything has ended, before the second run."""
    after: Callable[[Run], None] = _nothing
    """Whatever happened."""
    at_engine: bool = False
    """The moment lies after an engine's process has appeared."""
    settles: bool = True
    """The second run waits until every process of the first one is gone."""
    takes: bool = False
    """It takes finished work away itself, so that this is no loss of the program's."""
    mounts: bool = False
    """Needs the right to mount."""


def _signal_stage(number: int) -> Callable[[Run], str | None]:
    def strike(run: Run) -> str | None:
        process = run.stage_process()
        if process is None:
            return None
        process.send_signal(number)
        return "the stage"

    return strike


def _signal_session(number: int) -> Callable[[Run], str | None]:
    def strike(run: Run) -> str | None:
        if run.dvc.poll() is not None:
            return None
        hit = "DVC and the stage" if run.stage_process() else "DVC"
        os.killpg(run.dvc.pid, number)
        return hit

    return strike


def _kill_dvc(run: Run) -> str | None:
    if run.dvc.poll() is not None:
        return None
    run.dvc.kill()
    run.dvc.wait()  # DVC takes its lock from a process that is dead, and not from one to be buried
    return "DVC"


def _kill_engine(run: Run) -> str | None:
    engines = run.engines()
    if not engines:
        return None
    run.chance.choice(engines).kill()
    return "an engine"


def _hang(run: Run) -> str | None:
    engines = [process for process in run.engines() if process.status() != psutil.STATUS_STOPPED]
    if not engines:
        return None
    for engine in engines:
        engine.suspend()
    time.sleep(HANG_S)
    for engine in engines:
        if engine.is_running():
            engine.resume()
    return "an engine"


def _cut(run: Run) -> None:
    """Cut one of the files that the run has left where it keeps finished work."""
    files = [
        path
        for name in STAGES[run.stage].caches
        for path in sorted((run.workspace.folder / name).rglob("*"))
        if path.is_file() and not path.is_symlink() and path.stat().st_size > 1
    ]
    if not files:
        run.notes["cut"] = None
        return
    path = run.chance.choice(files)
    size = path.stat().st_size
    at = run.chance.randrange(size)
    os.truncate(path, at)
    run.notes["cut"] = f"{path.relative_to(run.workspace.folder)} at {at} of {size} bytes"


def _delete(run: Run) -> str | None:
    kept = STAGES[run.stage]
    outputs = run.workspace.outputs(run.stage)
    # of extract not where its server stages, which may be elsewhere
    names = [kept.place] if kept.caches else [n for n in outputs if not n.startswith("reports")]
    hit = [name for name in names if (run.workspace.folder / name).is_dir()]
    for name in hit:
        shutil.rmtree(run.workspace.folder / name, ignore_errors=True)
    return ", ".join(hit) or None


def _twice(run: Run) -> str | None:
    if run.dvc.poll() is not None:
        return None
    second = run.another()
    run.notes["status of the other"] = second.wait(600)
    return "the folder"


_MS_RDONLY, _MS_REMOUNT, _MS_BIND = 1, 32, 4096  # linux/mount.h
_MNT_DETACH = 2
_LARGE = 8 * 2**30


def _mount(source: str, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [word.encode() for word in (source, str(target), kind)]
    if libc.mount(*words, flags, options.encode()):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(target))


def _unmount(run: Run) -> None:
    """Whatever lies over the place; a file that is open does not hold it."""
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.umount2(str(run.place).encode(), _MNT_DETACH) == 0:
        pass
    error = ctypes.get_errno()
    # nothing is mounted there, nothing is there, or nothing could have been mounted
    if error not in (errno.EINVAL, errno.ENOENT, errno.EPERM):
        raise OSError(error, os.strerror(error), str(run.place))


def may_mount(folder: Path) -> bool:
    """Whether this process may mount; tried."""
    target = folder / "mount"
    target.mkdir(parents=True, exist_ok=True)
    try:
        _mount("tmpfs", target, "tmpfs", options="size=64k")
    except OSError:
        return False
    ctypes.CDLL(None).umount2(str(target).encode(), _MNT_DETACH)
    return True


def _own_disk(run: Run) -> None:
    """Put a file system of its own where the stage writes."""
    run.place.mkdir(parents=True, exist_ok=True)
    _mount("tmpfs", run.place, "tmpfs", options=f"size={_LARGE}")


def _fill_disk(run: Run) -> str | None:
    """Leave it the room that it has used, and a page."""
    found = os.statvfs(run.place)
    size = (found.f_blocks - found.f_bfree) * found.f_frsize + 4096
    _mount("tmpfs", run.place, "tmpfs", _MS_REMOUNT, f"size={size}")
    run.notes["disk"] = f"{size} bytes"
    return "the disk"


def _larger_disk(run: Run) -> None:
    _mount("tmpfs", run.place, "tmpfs", _MS_REMOUNT, f"size={_LARGE}")


def _read_only(run: Run) -> str | None:
    run.place.mkdir(parents=True, exist_ok=True)
    _mount(str(run.place), run.place, "none", _MS_BIND)
    _mount("none", run.place, "none", _MS_BIND | _MS_REMOUNT | _MS_RDONLY)
    return STAGES[run.stage].place


FAULTS = {
    "kill": Fault("SIGKILL to the stage", _signal_stage(signal.SIGKILL)),
    "term": Fault("SIGTERM to the stage", _signal_stage(signal.SIGTERM)),
    "ctrl-c": Fault("Ctrl-C: SIGINT to DVC and the stage", _signal_session(signal.SIGINT)),
    "cut": Fault(
        "SIGKILL, then one of its files cut at a random byte",
        _signal_stage(signal.SIGKILL),
        _CACHED,
        mend=_cut,
        takes=True,
    ),
    "session": Fault("SIGKILL to DVC and the stage", _signal_session(signal.SIGKILL)),
    "full": Fault(
        "the disk is full",
        _fill_disk,
        ("verifier", *_CACHED),
        before=_own_disk,
        mend=_larger_disk,
        after=_unmount,
        mounts=True,
    ),
    "read-only": Fault(
        "its folder turns read-only", _read_only, mend=_unmount, after=_unmount, mounts=True
    ),
    "deleted": Fault("its folder is deleted", _delete, takes=True),
    "twice": Fault("a second dvc repro of it", _twice),
    "dvc": Fault("SIGKILL to DVC alone, repro at once", _kill_dvc, settles=False),
    "int": Fault("SIGINT to the stage", _signal_stage(signal.SIGINT)),
    "engine": Fault("SIGKILL to an engine", _kill_engine, _ENGINES, at_engine=True),
    "hang": Fault(f"an engine hangs for {HANG_S} s", _hang, _ENGINES, at_engine=True),
}
"""By name, in the order in which tries go through them."""


def end(run: Run) -> None:
    """Kill what is left of a run."""
    for process in run.processes():
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def tidy(run: Run) -> None:
    """End what is left of a run, and what was mounted."""
    end(run)
    _unmount(run)
    remove(run.workspace.folder / ".dvc/tmp/rwlock")
