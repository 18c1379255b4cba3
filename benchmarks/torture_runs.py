"""A run of a stage as its processes, known by a variable in their environment: all inherit it."""

import os
import random
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.torture_stages import STAGES
from benchmarks.torture_workspace import Workspace

MARK = "SPECMILL_TORTURE"


def marked(token: str, sessions: set[int]) -> list[psutil.Process]:
    """Processes that a run has started and that have not ended, itself among them.

    Args:
        token: What the variable says in them.
        sessions: Sessions that they were seen in before; those seen now are added. An engine that
            gives itself a title writes over its environment, and is in its server's session.
    """
    wanted = f"{MARK}={token}".encode()
    alive: dict[psutil.Process, int] = {}
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            alive[process] = os.getsid(process.pid)
            if wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                sessions.add(alive[process])
        except (OSError, psutil.NoSuchProcess):
            continue
    return [process for process, session in alive.items() if session in sessions]


@dataclass
class Run:
    """One `dvc repro -s STAGE` in a session of its own."""

    workspace: Workspace
    stage: str
    token: str
    chance: random.Random
    process: "subprocess.Popen[bytes] | None" = None
    notes: dict[str, object] = field(default_factory=dict)
    sessions: set[int] = field(default_factory=set)

    @property
    def log(self) -> Path:
        """What it says."""
        return self.workspace.folder.parent / "logs" / f"{self.token}.log"

    @property
    def place(self) -> Path:
        """Where the stage writes."""
        return self.workspace.folder / STAGES[self.stage].place

    def start(self) -> None:
        """Start it."""
        self.process = self.another()

    def another(self) -> "subprocess.Popen[bytes]":
        """One more of the same; says what it says to the same file."""
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                ["dvc", "repro", "--single-item", self.stage],
                cwd=self.workspace.folder,
                env=self.workspace.environment | {MARK: self.token},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def dvc(self) -> "subprocess.Popen[bytes]":
        """The process of DVC."""
        assert self.process is not None
        return self.process

    def processes(self) -> list[psutil.Process]:
        """All that it has started and that have not ended."""
        return marked(self.token, self.sessions)

    def stage_process(self) -> psutil.Process | None:
        """The Python of the stage, when it is there."""
        module = f"stages.{self.stage.partition('@')[0]}"
        found = [process for process in self.processes() if _runs(process, module)]
        # a shell in between has the module in its command line too; the youngest is the stage
        return max(found, key=psutil.Process.create_time) if found else None

    def engines(self) -> list[psutil.Process]:
        """Processes in which vLLM computes."""
        return [process for process in self.processes() if "EngineCor" in _name(process)]

    def listening(self) -> set[int]:
        """Ports that its processes listen on."""
        found = set()
        for process in self.processes():
            try:
                connections = process.net_connections("tcp")
            except psutil.Error:
                continue
            found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
        return found


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        return module in process.cmdline()
    except psutil.Error:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""
