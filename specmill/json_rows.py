"""Rows of JSON Lines or of one JSON array, plain or zipped, each with its place.

They are read as they stand: Arrow gives every row the keys of all rows, which would put foreign
arguments into tool calls. A line that is no JSON costs itself alone. A zipped file that ends early
and an array that is none cannot be read on, so that they are errors of the whole file.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, row); the place is file and line, or file and row of the array, from 0.

    The row of a line that is no JSON is the ValueError that says so. Blank lines are no rows.

    Raises:
        ValueError: naming the file, when it cannot be read or is a broken array.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        try:
            first = next((line for line in stream if line.strip()), b"")
            stream.seek(0)
            if first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                for number, row in enumerate(_array(stream.read(), path)):
                    yield f"{path}, row {number}", row
                return
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parsed(line)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return ValueError(f"no JSON ({error}); write an object per line, or one array, in UTF-8")


def _array(content: bytes, path: Path) -> list[Any]:
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not JSON: {error}. It begins with [: write one array, or an object per line"
        ) from None
    assert isinstance(rows, list), "what begins with [ is a list"
    return rows
