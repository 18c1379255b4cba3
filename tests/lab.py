"""`measure` against fake servers: which were started, in what order, and what each was asked."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specmill.bench import measure
from specmill.fleet import Fleet, Wait
from specmill.params_bench import Bench
from specmill.plan import Cell, Run, plan_phases
from specmill.recording import CellCache, Recording
from specmill.server import EngineRefused, Server
from tests.fakes import FakeVllm, chunk

WARMUP = [[90], [91]]
INPUTS: dict[str, Any] = {"method": "ngram", "head": "h", "bench": {"max_tokens": 8}}


@dataclass
class Lab:
    """Where servers are started."""

    folder: Path
    events: list[str] = field(default_factory=list)
    """`+ reference_k0_0` for a start, `- reference_k0_0` for a stop."""
    fakes: dict[str, list[FakeVllm]] = field(default_factory=dict)
    """By the name that a server was started under; an interrupted stage may use one again."""
    refused: set[str] = field(default_factory=set)
    """Labels of runs whose engines end while they start."""
    wrong: set[str] = field(default_factory=set)
    """Labels of runs whose third token is not what it should be."""

    @property
    def cache(self) -> CellCache:
        """The one of this folder, opened anew."""
        return CellCache(self.folder / "cells", INPUTS)

    @property
    def starts(self) -> list[str]:
        """Names of the servers that were started, in order."""
        return [event[2:] for event in self.events if event[0] == "+"]

    @property
    def most_up(self) -> int:
        """Most servers that were up at a time."""
        up = [sum({"+": 1, "-": -1}[event[0]] for event in self.events[:n])
              for n in range(len(self.events) + 1)]  # fmt: skip
        return max(up)

    def asked(self) -> list[tuple[str, tuple[int, ...]]]:
        """Server name and prompt of every measured request: those of a warm-up have no salt."""
        return [
            (name, tuple(request["prompt"]))
            for name, fakes in self.fakes.items()
            for fake in fakes
            for request in fake.requests
            if "cache_salt" in request
        ]

    @contextlib.contextmanager
    def start(self, run: Run, name: str) -> Iterator[Wait]:
        """A `Starter`."""
        if run.label in self.refused:
            yield _refuse
            return
        log = self.folder / "server.log"
        log.write_text("config: dtype=torch.bfloat16, enforce_eager=True\n")
        fake = FakeVllm()
        fake.k = run.k or 3
        fake.likely = {13: -0.1, 14: -0.4}
        if run.label in self.wrong:
            fake.stream = [chunk([11, 12]), chunk([14], "length"), "data: [DONE]"]
        self.events.append(f"+ {name}")
        self.fakes.setdefault(name, []).append(fake)
        with fake.serve(log) as server:
            yield lambda: server
        self.events.append(f"- {name}")

    def measure(
        self,
        configs: dict[int, dict[str, Any] | None],
        rounds: list[list[Cell]],
        bench: Bench,
        cache: CellCache | None = None,
    ) -> Recording:
        """Measure, or go on; what a stage does around it is not done."""
        cache = cache or self.cache
        phases = plan_phases(configs, bench.reference)
        with Fleet(self.start, WARMUP, bench, 30, cache.servers()) as fleet:
            return measure(phases, rounds, bench, fleet, cache)


def _refuse() -> Server:
    raise EngineRefused("vLLM ended with status 1\nmany lines", "ValueError: no such head")


def places(recording: Recording) -> list[str]:
    """Label, round and number of every cell in the order it was measured: `method_k3 r0 c1`."""
    return [
        f"{cell['role']}_k{cell['k'] or 0} r{cell['round']} c{cell['number']}"
        for cell in recording.cells
    ]


def written(recording: Recording) -> str:
    """All of a recording as text, to compare two."""
    every = [recording.cells, recording.servers, recording.divergences]
    return json.dumps(every, indent=1, sort_keys=True)
