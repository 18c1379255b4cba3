"""The servers that a bench has up at the moment, each started once and warmed up.

On a CPU those that are wanted together start together: a start is mostly imports on one core, and
the KV cache has the size that it is told. On a GPU an engine measures what memory is free, so that
nothing else may start or run meanwhile.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from math import ceil
from pathlib import Path
from typing import Any

from specmill import compat
from specmill.cells import warm_up
from specmill.client import Client
from specmill.engine_flags import parallel_flags
from specmill.params import Runtime
from specmill.params_bench import Bench
from specmill.params_parallel import Parallel
from specmill.plan import Run
from specmill.section import DoesNotFit
from specmill.server import EngineRefused, Server, starting

Wait = Callable[[], Server]
"""Waits until a server is healthy."""

Starter = Callable[[Run, str], AbstractContextManager[Wait]]
"""Starts the server of a run; the text is its name, for the log."""


def server_starter(
    method: str,
    model: Path,
    verifier: dict[str, Any],
    bench: Bench,
    parallel: Parallel,
    runtime: Runtime,
    logs: Path,
    further: Mapping[str, list[str]] | None = None,
) -> Starter:
    """A function that starts the server of a run, with the flags every method shares.

    Two engines side by side get half of the GPU memory each. `further` holds flags of single
    servers, by the label of their run.
    """
    flags = compat.verifier_arguments(verifier) + parallel_flags(model, verifier, parallel)
    if bench.enforce_eager:
        flags.append("--enforce-eager")
    share = runtime.gpu_memory_utilization / (2 if bench.reference == "beside" else 1)

    def start(run: Run, name: str) -> AbstractContextManager[Wait]:
        speculation = (
            ["--speculative-config", json.dumps(run.speculative_config)]
            if run.speculative_config
            else []
        )
        return starting(
            model,
            flags + speculation + (further or {}).get(run.label, []),
            logs / f"bench-{method}-{name}.log",
            cpu_kv_cache_gib=runtime.cpu_kv_cache_gib,
            gpu_memory_utilization=share,
            startup_timeout_s=runtime.startup_timeout_s,
            label=f"{method} {run.role}" + (f" K={run.k}" if run.k else ""),
        )

    return start


class Refused(DoesNotFit):
    """Raised where the engine does not start with a method at one K."""

    def __init__(self, k: int | None, message: str):
        super().__init__(message)
        self.k = k


class Fleet:
    """Servers by run; to be used as a context manager, which stops what is left."""

    def __init__(
        self,
        start: Starter,
        warmup: list[list[int]],
        bench: Bench,
        timeout_s: float,
        servers: dict[str, dict[str, Any]],
    ):
        self._start = start
        self._warmup = warmup
        self._bench = bench
        self.timeout_s = timeout_s
        self.facts = dict(servers)
        """How each engine ran, by name, those of earlier executions included."""
        self._up: dict[str, tuple[str, Server, ExitStack]] = {}

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: Any) -> None:
        self.keep([])

    def keep(self, runs: list[Run]) -> None:
        """Have the servers of these runs up and no others: stop those, start and warm up these.

        Raises:
            Refused: when the engine refuses the method though it has served a reference.
        """
        for label in self._up.keys() - {run.label for run in runs}:
            _, _, stack = self._up.pop(label)
            stack.close()
        missing = [run for run in runs if run.label not in self._up]
        for together in [missing] if compat.device() == "cpu" else [[run] for run in missing]:
            self._start_together(together)
        for run in runs:
            name, _, _ = self._up[run.label]
            if name not in self.facts:
                self._warm_up(run)

    def server(self, run: Run) -> tuple[str, Server]:
        """Name and address of a run's server, which is up and now has the machine alone.

        The engines of the others are paused.
        """
        self._pause_all_but(run)
        name, server, _ = self._up[run.label]
        server.resume()
        return name, server

    def _pause_all_but(self, run: Run) -> None:
        for label, (_, server, _) in self._up.items():
            if label != run.label:
                server.pause()

    def _start_together(self, runs: list[Run]) -> None:
        """Start these servers while all others are paused; one that fails ends those after it."""
        for _, server, _ in self._up.values():
            server.pause()
        with ExitStack() as begun:
            waits: list[tuple[Run, str, ExitStack, Wait]] = []
            for run in runs:
                name, stack = self._next_name(run), begun.enter_context(ExitStack())
                waits.append((run, name, stack, stack.enter_context(self._start(run, name))))
            for run, name, stack, wait in waits:
                server = self._healthy(run, wait)
                self._up[run.label] = name, server, stack.pop_all()

    def _next_name(self, run: Run) -> str:
        number = sum(name.startswith(f"{run.label}_") for name in self.facts)
        return f"{run.label}_{number}"

    def _healthy(self, run: Run, wait: Wait) -> Server:
        try:
            return wait()
        except EngineRefused as error:
            if run.speculative_config is None or not (self.facts or self._up):
                raise
            raise Refused(run.k, f"vLLM does not start with it: {error.reason}") from error

    def _warm_up(self, run: Run) -> None:
        name, server = self.server(run)
        waves = asyncio.run(self._warm(server))
        self.facts[name] = compat.engine_facts(server.log.read_text(errors="replace")) | {
            "startup_s": round(server.startup_s, 1),
            "warmup_waves": waves,
        }

    async def _warm(self, server: Server) -> dict[str, int]:
        async with Client(server, self.timeout_s) as client:
            return await warm_up(
                client, self._warmup, _most_in_flight(self._bench), self._bench.max_tokens
            )


def _most_in_flight(bench: Bench) -> list[int]:
    """Requests in flight that a server will meet; of an open loop, those of a second."""
    return sorted({*bench.concurrency, *(ceil(rate) for rate in bench.rates)})
