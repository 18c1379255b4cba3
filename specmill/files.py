"""Writing files so that a reader sees the whole file or none, and hashing them."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to a temporary neighbour, flush it to the disk and rename it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with scratch.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    os.replace(scratch, path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, keys sorted, with a final newline: equal values, equal bytes."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def read_json(path: Path) -> Any:
    """Read one JSON file; raises ValueError naming it when it is not JSON."""
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


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
