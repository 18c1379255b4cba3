"""The doctor on disks: what will be written where, and whether each file system has room for it."""

import shutil
from collections import defaultdict
from pathlib import Path

from specmill import paths
from specmill.budget import Budget
from specmill.finding import Finding
from specmill.params import Verifier

_DVC_CACHE = Path(".dvc/cache")
_MORE_ROOM = (
    "lower prepare.limit, extract.dtype: fp8_e4m3, extract.mode: online, another disk, or one copy "
    "instead of three: dvc config --local cache.type reflink,hardlink"
)


def disk_needs(
    budget: Budget, verifier: Verifier, weight_bytes: int, *, is_linked: bool
) -> dict[Path, int]:
    """Bytes that a run writes, by folder.

    DVC keeps a second copy of what stages write, and a view of the store that it checks out is a
    third, unless its cache is of links (docs/hidden-states.md). A verifier on the Hub is downloaded
    into the Hub's own cache; of a folder only a reference is kept.

    Args:
        budget: Of the run.
        verifier: Of params.yaml.
        weight_bytes: Of the verifier.
        is_linked: Whether DVC's cache is of links.
    """
    kind, _, place = verifier.source.partition(":")
    states, copies = budget.state_bytes, 0 if is_linked else 1
    written = weight_bytes if kind == "wheel" or verifier.experts else 0
    needs = {
        paths.STORE: states,
        paths.HIDDEN_STATES: copies * states,
        paths.CACHE / "checkpoints": budget.checkpoint_bytes,
        paths.VERIFIER: written,
        paths.ROOT / _DVC_CACHE: copies * (states + written),
    }
    return needs | ({_hub_folder(place): weight_bytes} if kind == "hub" else {})


def _hub_folder(name: str) -> Path:
    """Where the Hub's client keeps the files of a model."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    folder: str = repo_folder_name(repo_id=name, repo_type="model")
    return Path(HF_HUB_CACHE) / folder / "blobs"


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
            else Finding("problem", "disk", text, _MORE_ROOM)
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
