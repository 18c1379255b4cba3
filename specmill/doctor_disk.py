"""The doctor on disks: what will be written where, and whether each file system has room for it."""

import shutil
from collections import defaultdict
from pathlib import Path

from specmill import paths
from specmill.budget import Budget
from specmill.finding import Finding

_DVC_CACHE = Path(".dvc/cache")


def disk_needs(budget: Budget, verifier_bytes: int) -> dict[Path, int]:
    """Bytes that a run writes, by folder.

    DVC keeps a second copy of what stages write, unless its cache is of links
    (docs/hidden-states.md), and so does a view of the store that it checks out.

    Args:
        budget: Of the run.
        verifier_bytes: Of a verifier that is written here; 0 where only a reference is kept.
    """
    states = budget.state_bytes
    return {
        paths.STORE: states,
        paths.HIDDEN_STATES: states,
        paths.CACHE / "checkpoints": budget.checkpoint_bytes,
        paths.VERIFIER: verifier_bytes,
        paths.ROOT / _DVC_CACHE: states + verifier_bytes,
    }


def check_disk(needs: dict[Path, int]) -> list[Finding]:
    """Compare the needs of each file system with its room; what lies there already counts.

    Args:
        needs: Bytes by folder, which need not exist.
    """
    by_device: dict[int, list[tuple[Path, int]]] = defaultdict(list)
    for folder, size in needs.items():
        missing = max(0, size - _held(folder))
        by_device[_nearest(folder).stat().st_dev].append((folder, missing))
    found = []
    for listed in by_device.values():
        place = _nearest(listed[0][0])
        needed, free = sum(size for _, size in listed), shutil.disk_usage(place).free
        parts = ", ".join(f"{folder.name} {size / 1e9:.3g}" for folder, size in listed if size)
        text = f"{free / 1e9:,.1f} GB free, a run writes {needed / 1e9:.3g} ({parts or 'nothing'})"
        found.append(
            Finding("ok", "disk", text) if needed < free
            else Finding("problem", "disk", text, "lower prepare.limit, extract.dtype: fp8_e4m3, "
                         "extract.mode: online, or another disk")
        )  # fmt: skip
    return found


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _held(folder: Path) -> int:
    """Bytes of the files below a folder; 0 when it is not there."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
