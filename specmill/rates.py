"""How long an engine's start and a step take here: measured by earlier stages, or estimated.

measured    engine starts of reports/bench/*.json and reports/curves.json, step times of the curves:
            if they are of this machine, these versions and this verifier
estimated   a start is its imports of vLLM and reading the weights, without compilation or graph
            capture; a step is specmill.roofline's, with the bandwidth and arithmetic measured now
"""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from specmill import compat, paths
from specmill.doctor_verifier import Size
from specmill.files import read_json
from specmill.machine_look import MachineNow
from specmill.params import Params, Verifier
from specmill.probe import Speed
from specmill.roofline import Machine, Model, step_flop, step_ms


@dataclass(frozen=True)
class Records:
    """What earlier stages measured here; empty when nothing they left is of this case."""

    start_s: list[float] = field(default_factory=list)
    none_ms: dict[int, float] = field(default_factory=dict)
    """Of a step without speculation, by requests in flight."""
    drafted_ms: dict[int, float] = field(default_factory=dict)
    """Of the slowest kind and K, by requests in flight."""


def read_records(params: Params, machine: MachineNow) -> Records:
    """Measured rates of this repository's reports, if they are of this machine and verifier."""
    lock = paths.ROOT / "dvc.lock"
    if not (paths.HARDWARE.is_file() and lock.is_file()):
        return Records()
    locked = YAML(typ="safe").load(lock.read_text())["stages"].get("verifier", {})
    verifier = locked.get("params", {}).get("params.yaml", {}).get("verifier")
    if verifier is None or read_json(paths.HARDWARE) != machine.hardware:
        return Records()
    if not _is_of(params.verifier, verifier):
        return Records()
    benches = [read_json(path) for path in sorted(paths.BENCH.glob("*.json"))]
    starts = [facts["startup_s"] for bench in benches for facts in bench.get("engine", {}).values()]
    curves: dict[str, Any] = read_json(paths.CURVES) if paths.CURVES.is_file() else {}
    starts += curves.get("startup_s", {}).values()
    none: dict[int, float] = {}
    drafted: dict[int, float] = {}
    for point in curves.get("points", []):
        at, took = point["batch"], point["step_ms"]
        if point["kind"] == "none":
            none[at] = took
        else:
            drafted[at] = max(took, drafted.get(at, 0.0))
    return Records(starts, none, drafted)


def _is_of(verifier: Verifier, locked: dict[str, Any]) -> bool:
    """Whether a lock file's section says the same; what one of another version says is another."""
    try:
        return Verifier.model_validate(locked) == verifier
    except ValidationError:
        return False


@dataclass(frozen=True)
class Rates:
    """Seconds of what engines do."""

    size: Size
    speed: Speed
    device: str
    import_s: float
    """Of vLLM, measured now."""
    records: Records
    gpus_per_engine: int = 1
    """Over which an engine is spread; `speed` is of one of them."""

    @property
    def starts_measured(self) -> bool:
        """Whether a start's length is one that was measured here."""
        return bool(self.records.start_s)

    @property
    def steps_measured(self) -> bool:
        """Whether a step's is."""
        return bool(self.records.none_ms)

    def start_s(self) -> float:
        """Of one engine of the verifier."""
        if self.records.start_s:
            return median(self.records.start_s)
        return self.bare_start_s() + self.size.weight_bytes / self.speed.read_bytes_per_s

    def bare_start_s(self) -> float:
        """Of one engine of a model too small to count."""
        return compat.importing_processes(self.device) * self.import_s

    def step_s(self, batch: int, context: int, k: int = 0) -> float:
        """Of one step of so many requests, each with so many tokens before it.

        Beyond what was measured a step takes longer in proportion to its requests.
        """
        known = (self.records.drafted_ms if k else self.records.none_ms) or self.records.none_ms
        if known:
            below = [at for at in known if at <= batch]
            near = max(below) if below else min(known)
            return known[near] / 1e3 * max(1.0, batch / near)
        gpus = self.gpus_per_engine
        machine = Machine(gpus * self.speed.bandwidth_bytes_per_s, gpus, self._flop_per_s)
        return step_ms(machine, self._model, batch, k, context) / 1e3

    def prefill_s(self, tokens: int, mean_context: int) -> float:
        """Of reading prompts: arithmetic alone, for many tokens pass at once."""
        one = step_flop(self.size.geometry, 1, 0, mean_context // 2)
        return tokens * one / self._flop_per_s

    @property
    def _flop_per_s(self) -> float:
        return self.gpus_per_engine * self.speed.flop_per_s

    @property
    def _model(self) -> Model:
        size = self.size
        kept = size.geometry.num_layers * size.geometry.kv_values
        return Model(size.geometry, size.bits, kv_bits=8 * size.kv_bytes_per_token / kept)
