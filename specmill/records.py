"""One row per request of a benchmark: what was sent, what came back and when, as Parquet.

Every figure of reports/bench/NAME.json is a function of these rows and the engine's counters.

| column | type | |
| --- | --- | --- |
| `method` | string | entry of `methods` |
| `role` | string | `reference` (the same server without speculation) or `method` |
| `k` | int32 | num_speculative_tokens; null without speculation |
| `phase` | int32 | part of the bench, from 0 |
| `round` | int32 | repetition, from 0 |
| `concurrency` | int32 | requests in flight; null in open loop |
| `rate` | float64 | requests per second; null in closed loop |
| `context` | int32 | tokens put before the prompt |
| `category` | string | prompt type |
| `number` | int32 | the cell's place in its round, from 0 |
| `index` | int32 | position in its cell, from 0 |
| `sample_key` | string | digest of the sample's token ids (specmill.samples) |
| `num_prompt_tokens` | int32 | |
| `output_ids` | list of int32 | the answer's token ids |
| `finish_reason` | string | |
| `sent_s` | float64 | seconds since the cell began |
| `chunk_s` | list of float64 | arrival of each chunk with tokens, seconds since the cell began |
| `chunk_tokens` | list of int32 | tokens in each of those chunks |
| `execution` | string | tells one execution of the stage from another |
| `fresh_prompts` | bool | no other request of this server had the prompt |
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specmill.files import write_atomically

SCHEMA = pa.schema(
    {
        "method": pa.string(),
        "role": pa.string(),
        "k": pa.int32(),
        "phase": pa.int32(),
        "round": pa.int32(),
        "concurrency": pa.int32(),
        "rate": pa.float64(),
        "context": pa.int32(),
        "category": pa.string(),
        "number": pa.int32(),
        "index": pa.int32(),
        "sample_key": pa.string(),
        "num_prompt_tokens": pa.int32(),
        "output_ids": pa.list_(pa.int32()),
        "finish_reason": pa.string(),
        "sent_s": pa.float64(),
        "chunk_s": pa.list_(pa.float64()),
        "chunk_tokens": pa.list_(pa.int32()),
        "execution": pa.string(),
        "fresh_prompts": pa.bool_(),
    }
)
NULLABLE = {"k", "concurrency", "rate"}


def write_requests(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one row per request; equal rows give equal bytes.

    Args:
        path: A Parquet file; its folder is made.
        rows: Mappings with exactly the columns of `SCHEMA`.

    Raises:
        ValueError: naming row and column, when one is missing, unknown, null where it must not be,
            or of another type.
    """
    listed = [dict(row) for row in rows]
    for number, row in enumerate(listed):
        if row.keys() != set(SCHEMA.names):
            wrong = sorted(row.keys() ^ set(SCHEMA.names))
            raise ValueError(f"{path}, row {number}: missing or unknown columns {wrong}")
        for field in SCHEMA:
            value = row[field.name]
            if not (_fits(value, field.type) or (value is None and field.name in NULLABLE)):
                raise ValueError(
                    f"{path}, row {number}: {field.name} is {value!r}, not {field.type}"
                )
    columns = {name: [row[name] for row in listed] for name in SCHEMA.names}
    encoded = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=SCHEMA), encoded, compression="zstd")
    write_atomically(path, encoded.getvalue())


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a column's type; pyarrow itself cuts 1.5 to 1 where 1 came before."""
    if pa.types.is_list(kind):
        return isinstance(value, list) and all(_fits(item, kind.value_type) for item in value)
    if pa.types.is_int32(kind):
        return type(value) is int and -(2**31) <= value < 2**31
    if pa.types.is_float64(kind):
        return type(value) in (int, float)
    return isinstance(value, bool if pa.types.is_boolean(kind) else str)


def read_requests(path: Path) -> list[dict[str, Any]]:
    """Read a file of `write_requests`, in its order; null is None.

    Raises:
        ValueError: when it is no Parquet file or has other columns or types.
        FileNotFoundError: when it is not there.
    """
    try:
        table = pq.ParquetFile(path).read()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from None
    found = {field.name: field.type for field in table.schema}
    expected = {field.name: field.type for field in SCHEMA}
    differing = [
        f"{name} is {found.get(name, 'missing')}, expected {expected.get(name, 'no such column')}"
        for name in [*expected, *(name for name in found if name not in expected)]
        if found.get(name) != expected.get(name)
    ]
    if differing:
        raise ValueError(
            f"{path} holds no requests of a bench, or those of another version: "
            f"{'; '.join(differing[:3])}; `dvc repro -f -s bench@NAME` measures again"
        )
    rows: list[dict[str, Any]] = table.select(SCHEMA.names).to_pylist()
    return rows
