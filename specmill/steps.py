"""Steps that need each other, each with a name, a verdict, and what is known of its failure."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import httpx
from safetensors import SafetensorError

from specmill.incompatibilities import explain
from specmill.server import EngineRefused

logger = logging.getLogger(__name__)

_DRIFT = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    SafetensorError,
    httpx.HTTPError,
)
"""What a library that has changed ends in."""


@dataclass(frozen=True)
class Step:
    """What came of a step."""

    name: str
    verdict: str
    """`ok`, `failed` or `not run`."""
    seconds: float
    note: str
    """What it found, why it failed, or for which step's failure it was not run."""
    known: str | None = None
    """The known incompatibility that its failure is."""


class Steps:
    """Runs steps, of several threads too, and keeps what came of them."""

    def __init__(self) -> None:
        self.done: dict[str, Step] = {}
        self._lock = threading.Lock()

    def run(self, name: str, needs: Iterable[str], work: Callable[[], str | None]) -> bool:
        """Run a step, unless one that it needs has failed; whether it went well.

        Args:
            name: Of the step.
            needs: Steps that have been run.
            work: Says what it found, and raises when something is wrong.
        """
        unmet = next((need for need in needs if self.done[need].verdict != "ok"), None)
        if unmet is not None:
            return self._keep(Step(name, "not run", 0.0, f"it needs {unmet}"))
        started = time.monotonic()
        try:
            note = work() or ""
        except _DRIFT as error:
            logger.debug("traceback", exc_info=True)
            seconds = time.monotonic() - started
            reason = error.reason if isinstance(error, EngineRefused) else ""
            whole = f"{type(error).__name__}: {error}"
            short = reason or str(error).split("\n")[0] or type(error).__name__
            return self._keep(Step(name, "failed", seconds, short, explain(f"{reason} {whole}")))
        return self._keep(Step(name, "ok", time.monotonic() - started, note))

    @property
    def ended_well(self) -> bool:
        """Whether nothing has failed."""
        return all(step.verdict == "ok" for step in self.done.values())

    def _keep(self, step: Step) -> bool:
        with self._lock:
            self.done[step.name] = step
        logger.info("%s: %s %s", step.name, step.verdict, step.note)
        return step.verdict == "ok"


def as_text(steps: Iterable[Step]) -> str:
    """A line per step, and below a failed one the incompatibility that it is."""
    lines = []
    for step in steps:
        lines.append(f"{step.verdict:8}{step.seconds:5.0f} s  {step.name:22}{step.note}".rstrip())
        if step.known:
            lines.append(f"{'':17}known: {step.known}")
        elif step.verdict == "failed":
            lines.append(f"{'':17}not a known incompatibility")
    return "\n".join(lines) + "\n"
