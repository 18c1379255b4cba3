"""The engines that step-time curves are measured on: as few starts as possible.

On a CPU one engine serves every K of a kind, steered by its requests (specmill/steered.py). Medusa
and P-EAGLE, and every kind on a GPU, need an engine for each K.

Rows that look drafts up often find none, and such a step of an engine that speculates need not take
what a step of `none` takes: CUDA graphs of whole steps are captured for 1 + K tokens a request, and
a step of another shape does without. So their kind is measured at K = 0 too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmill.curve_drafts import CurveDrafts
from specmill.curve_kinds import NONE, TOKENS, Kind
from specmill.methods import speculative_configs
from specmill.plan import Run
from specmill.section import DoesNotFit

# vLLM imports these by name
_DRAFTER = "specmill.fixed_drafter"
_SCHEDULER = "specmill.steered"
_FIXED_K = ("medusa", "peagle")


@dataclass(frozen=True)
class Engine:
    """An engine and what it is asked to draft."""

    kind: str
    ks: tuple[int, ...]
    """Each of them is measured; 0 for none."""
    run: Run

    @property
    def is_steered(self) -> bool:
        """Whether requests say which K they want."""
        return len(self.ks) > 1

    @property
    def name(self) -> str:
        """In reports/curves.json: its kind, and its K where it serves one alone."""
        return f"{self.kind} K={self.ks[0]}" if self.run.k and not self.is_steered else self.kind


REFERENCE = Engine(NONE, (0,), Run(NONE, None, 0, None))


def plan_engines(
    kinds: Iterable[Kind],
    drafts: CurveDrafts,
    ks: list[int],
    verifier: dict[str, Any],
    machine: str,
    scratch: Path,
) -> tuple[list[Engine], dict[str, str]]:
    """The engines of all kinds but `none`; what they draft with is made in `scratch`.

    Args:
        kinds: Each once.
        drafts: Makes it.
        ks: K to measure.
        verifier: Its identity.json.
        machine: `cpu` or `cuda`.
        scratch: An empty folder.

    Returns:
        The engines, and why a kind has none, by kind.

    Raises:
        ValueError: when a geometry or settings do not fit the verifier.
    """
    engines: list[Engine] = []
    refused: dict[str, str] = {}
    for kind in kinds:
        if kind.name != NONE:
            try:
                configs = _configs(kind, drafts, ks, verifier, scratch)
            except DoesNotFit as reason:
                refused[kind.name] = str(reason)
            else:
                engines += engines_of(kind, configs, machine)
    return engines, refused


def _configs(
    kind: Kind, drafts: CurveDrafts, ks: list[int], verifier: dict[str, Any], scratch: Path
) -> dict[int, dict[str, Any] | None]:
    """Speculative config of a kind by K."""
    if kind.name == TOKENS:
        return {k: _looked_up("FixedDrafter", k) for k in ks}
    head = drafts.make(kind, scratch / kind.label)
    served = kind.method.model_copy(update={"head": str(head)})
    return speculative_configs(kind.row, served, ks, verifier)


def _looked_up(drafter: str, k: int) -> dict[str, Any]:
    """Speculative config of a drafter of specmill/fixed_drafter.py."""
    return {
        "method": "custom_class",
        "model": f"{_DRAFTER}.{drafter}",
        "num_speculative_tokens": k,
    }


def engines_of(kind: Kind, configs: dict[int, dict[str, Any] | None], machine: str) -> list[Engine]:
    """One engine for all K, started for the largest, where that measures the same; or one each."""
    ks = tuple(sorted(configs))
    most = ks[-1]
    if machine == "cpu" and kind.method.method not in _FIXED_K:
        asked = (0, *ks) if kind.name == TOKENS else ks
        return [Engine(kind.name, asked, Run(kind.label, most, 0, configs[most]))]
    engines = [Engine(kind.name, (k,), Run(kind.label, k, 0, configs[k])) for k in ks]
    if kind.name == TOKENS:
        empty = Run(f"{kind.label}-empty", most, 0, _looked_up("NoDrafts", most))
        engines.append(Engine(kind.name, (0,), empty))
    return engines


def steering_flags(engines: list[Engine]) -> dict[str, list[str]]:
    """Flags of the steered servers, by the label of their run."""
    flags = ["--scheduler-cls", f"{_SCHEDULER}.SteeredScheduler"]
    return {engine.run.label: flags for engine in engines if engine.is_steered}


def plan_groups(engines: list[Engine], reference: str) -> list[list[Engine]]:
    """Which engines are up together, one group after the other.

    Args:
        engines: All but `none`, which comes before each or before all.
        reference: `bench.reference`: `beside` has memory for two.
    """
    if reference == "bracket" or not engines:
        return [[engine] for engine in [REFERENCE, *engines]]
    return [[REFERENCE, engine] for engine in engines]
