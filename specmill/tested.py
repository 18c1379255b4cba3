"""Which versions specmill was run with, as a table; any other gets a warning, not an error.

Beside specmill/compat.py and not in it: a combination more in this table runs no stage again.

Run      python -m specmill.tested      (prints the table of docs/doctor.md)
"""

import argparse
import logging
import sys
from dataclasses import asdict, dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Combination:
    """Versions that were run together; an older or newer patch of each counts as the same."""

    device: str
    """`cpu` or `cuda`."""
    vllm: str
    speculators: str
    torch: str
    transformers: str
    python: str
    driver: str
    """Of the GPU, its first number; empty on a CPU."""
    machine: str
    """Where, in words."""


TESTED = (
    Combination(
        "cpu", "0.32.0", "0.9.0", "2.13.0+cpu", "5.19.0", "3.11", "",
        "two cores with AVX-512, and two with AVX2 only; requirements/cpu.txt",
    ),
    Combination("cuda", "0.26.0", "0.9.0", "2.11.0", "5.17.0", "3.12", "580", "one H200"),
)  # fmt: skip

NAMES = ("vllm", "speculators", "torch", "transformers")


def differences(versions: dict[str, str], device: str) -> list[str]:
    """How these versions differ from the nearest tested combination on such a device.

    Args:
        versions: Of NAMES at least.
        device: `cpu` or `cuda`.

    Returns:
        One text per package, e.g. `vllm 0.33.0 (tested: 0.32)`; empty when it was tested.
    """
    found = [
        [
            f"{name} {versions[name]} (tested: {minor(getattr(row, name))})"
            for name in NAMES
            if minor(versions[name]) != minor(getattr(row, name))
        ]
        for row in TESTED
        if row.device == device
    ]
    return min(found, key=len)


def minor(version: str) -> str:
    """The first two numbers of a version: `2.13` of `2.13.0+cpu`."""
    return ".".join(version.split("+")[0].split(".")[:2])


def warn_if_untested(versions: dict[str, str], device: str) -> None:
    """Log a warning when this combination is not in TESTED; arguments as of `differences`."""
    if apart := differences(versions, device):
        logger.warning("untested versions on %s: %s", device, ", ".join(apart))


def table() -> str:
    """TESTED as a Markdown table."""
    rows = [asdict(row) for row in TESTED]
    lines = ["| " + " | ".join(rows[0]) + " |", "| " + " | ".join("---" for _ in rows[0]) + " |"]
    lines += ["| " + " | ".join(value or "-" for value in row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m specmill.tested", description="Print the table of tested versions."
    ).parse_args()
    sys.stdout.write(table())
