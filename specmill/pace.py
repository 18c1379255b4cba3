"""How long a bench will take, from how long earlier ones of this verifier took on this machine."""

from pathlib import Path
from typing import Any

from specmill.files import digest, read_kept, write_json
from specmill.plan import Cell, Run
from specmill.recording import Recording


class Pace:
    """Seconds per engine start and per measured output token, kept from bench to bench."""

    def __init__(self, file: Path, verifier: dict[str, Any], hardware: dict[str, Any]):
        self._file = file
        self._key = digest([verifier["fingerprint"], hardware])

    def remember(self, recording: Recording) -> None:
        """Keep how long this bench's engines took to start and its cells to be answered."""
        starts = [facts["startup_s"] for facts in recording.servers.values()]
        tokens = sum(len(one["output_ids"]) for cell in recording.cells for one in cell["requests"])
        wall_s = sum(cell["wall_s"] for cell in recording.cells)
        mean = {"start_s": sum(starts) / len(starts), "token_s": wall_s / tokens}
        write_json(self._file, self._known() | {self._key: mean})

    def minutes(self, starts: int, tokens: int) -> float | None:
        """Minutes for so many engine starts and output tokens; None before the first bench."""
        mean = self._known().get(self._key)
        if mean is None:
            return None
        return float(starts * mean["start_s"] + tokens * mean["token_s"]) / 60

    def _known(self) -> dict[str, Any]:
        return dict(read_kept(self._file) or {})


def describe(
    phases: list[list[Run]], rounds: list[list[Cell]], beside: bool, max_tokens: int, pace: Pace
) -> str:
    """What a bench is about to do: engine starts are what costs on a large model.

    In mirrored rounds the server that a round begins with is still up from the one before; after an
    odd number of them the reference is not, which is asked where outputs differ.
    """
    servers = len({run.label for phase in phases for run in phase})
    arms = sum(len(phase) for phase in phases)
    starts = servers if beside else 1 + (len(phases[0]) - 1) * len(rounds) + len(rounds) % 2
    requests = sum(len(cell.prompts) for cells in rounds for cell in cells)
    tokens = requests * max_tokens * arms
    minutes = pace.minutes(starts, tokens)
    about = (
        "how long is known after the first bench of this verifier here"
        if minutes is None
        else f"{minutes:.0f} minutes"
    )
    return (
        f"plan, at most: {starts} engine starts; {len(rounds)} rounds of {len(rounds[0])} cells on "
        f"{arms} servers, {tokens} output tokens; {about}"
    )
