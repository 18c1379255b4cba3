"""Writing files so that a reader sees the whole file or none, and hashing them."""

import contextlib
import fcntl
import gc
import glob
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_SEAL = "seal.json"


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to a temporary neighbour, flush it to the disk and rename it to `path`.

    A neighbour that a killed process left behind goes with the next write of the same file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for begun in unheld(path.parent.glob(f".{glob.escape(path.name)}.*.tmp")):
        begun.unlink(missing_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as out:
            fcntl.flock(out, fcntl.LOCK_EX)  # says that somebody is writing it
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
            os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def unheld(begun: Iterable[Path]) -> Iterator[Path]:
    """Those files that nobody holds locked any more: whoever was writing them was killed."""
    for path in begun:
        with contextlib.suppress(BlockingIOError, FileNotFoundError), path.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield path


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, keys sorted, with a final newline: equal values, equal bytes."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def read_json(path: Path) -> Any:
    """Read one JSON file; raises ValueError naming it when it is not JSON."""
    try:
        return json.loads(path.read_text())
    # no UTF-8, a number of thousands of digits and a hundred thousand brackets are no syntax errors
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object; raises ValueError naming it when it does not."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(found).__name__}")
    return found


def read_kept(path: Path) -> Any:
    """What an earlier run has kept as JSON; None when it is missing, or damaged since then.

    What is damaged is removed and said in the log: it would stop every further run.
    """
    if not path.is_file():
        return None
    try:
        return read_json(path)
    except ValueError as error:
        logger.warning("%s; what it held is made again", error)
        path.unlink()
        return None


def seal(folder: Path) -> None:
    """Flush the files of a folder to the disk and write down their digests, for `is_whole`."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != _SEAL:
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
            digests[str(path.relative_to(folder))] = file_digest(path)
    write_json(folder / _SEAL, digests)


def is_whole(folder: Path) -> bool:
    """Whether a folder was sealed and every file is what it was then."""
    digests = read_kept(folder / _SEAL)
    return digests is not None and all(
        (folder / name).is_file() and file_digest(folder / name) == one
        for name, one in digests.items()
    )


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Hold garbage collection back while very many objects are made that stay.

    It would look at all of them again and again: half of the time of opening a large store.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Hold a lock on `path` (created if need be), alone or shared; waits for holders to end.

    Raises:
        RuntimeError: when another process holds it and `wait` is false.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # never through a link: in a folder that users share another's may lead to a file of ours
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)
    except PermissionError:  # another user's, in a folder that users share; reading is enough
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise RuntimeError(f"another process holds {path}; try again later") from None
            logger.warning("another process holds %s; waiting for it to end", path)
            fcntl.flock(handle, kind)
        yield
    finally:
        os.close(handle)


def machine_lock(*, alone: bool) -> contextlib.AbstractContextManager[None]:
    """Hold the machine: a measurement has it alone, other work shares it."""
    return locked(Path(tempfile.gettempdir()) / "specmill-measuring.lock", shared=not alone)


def digest(value: Any) -> str:
    """SHA-256 (hex) of `value` as canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def tree_digest(path: Path) -> str:
    """SHA-256 (hex) over a file, or over the names and bytes of all files below a folder."""
    if path.is_file():
        return file_digest(path)
    return digest(
        {
            str(file.relative_to(path)): file_digest(file)
            for file in path.rglob("*")
            if file.is_file()
        }
    )
