"""No MLflow run stays RUNNING after its process.

SIGKILL leaves a stage no time to end its run, so a watcher beside it does: this file, started as a
program in a session of its own. What takes the watcher along (a container that is stopped, a power
cut) is made good by `reap` when the store is next opened on this host.
"""

import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HOST = "specmill.host"
PROCESS = "specmill.process"
POLL_S = 2.0


def process_tags() -> dict[str, str]:
    """The tags by which `reap` finds out whether the process that calls this is alive."""
    pid = os.getpid()
    return {
        HOST: socket.gethostname(),
        PROCESS: f"{pid} {_started(pid)} {_boot()} {_namespace()}",
    }


def is_dead(process: str) -> bool:
    """Whether a process of this host, as `process_tags` wrote it, has ended for certain.

    Containers can share a host's name and not see each other's processes: another pid namespace
    is never certain, another boot of the machine is.
    """
    pid, started, boot, namespace = process.split()
    if boot != _boot():
        return True
    return namespace == _namespace() and _started(int(pid)) != started


def reap(client: Any, experiment_id: str) -> None:
    """Set the experiment's RUNNING runs whose process on this host is dead to KILLED."""
    mine = f"attributes.status = 'RUNNING' and tags.`{HOST}` = '{socket.gethostname()}'"
    for run in client.search_runs([experiment_id], mine, max_results=1000):
        if is_dead(run.data.tags[PROCESS]):
            _kill(client, run.info.run_id)


def start_watcher(uri: str, run_id: str) -> subprocess.Popen[bytes]:
    """Start the process that sets the run to KILLED if this one dies; kill it to end its watch."""
    return subprocess.Popen(
        # -P: the folder of this file must not come before the packages that MLflow imports
        [sys.executable, "-P", __file__, run_id, str(os.getpid())],
        env=os.environ | {"MLFLOW_TRACKING_URI": uri},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # DVC reads a stage's output to its end
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C and what kills a process group are not for the watcher
    )


def _watch(run_id: str, stage: int) -> None:
    # nothing is ever written to the pipe: readable means closed; its parent's pid tells the same
    # when a process that the stage forked holds the pipe open
    while os.getppid() == stage and not select.select([sys.stdin], [], [], POLL_S)[0]:
        pass
    import mlflow

    _kill(mlflow.MlflowClient(), run_id)


def _kill(client: Any, run_id: str) -> None:
    # read once more: its process may have ended it well between the search and its own end
    if client.get_run(run_id).info.status == "RUNNING":
        client.set_terminated(run_id, "KILLED")


def _started(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot; None when it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # from field 3, the state; proc(5)
    return None if fields[0] in "ZX" else fields[19]  # a zombie has ended


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


if __name__ == "__main__":
    _watch(sys.argv[1], int(sys.argv[2]))
