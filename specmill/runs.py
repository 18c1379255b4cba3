"""Replayed drafts as Parquet: one row per recorded answer.

| column | type | |
| --- | --- | --- |
| `sample_key` | string | digest of the sample's token ids (specmill.samples) |
| `answer_ids` | list of int32 | |
| `accepted` | list of list of int32 | [num_starts][most_k], as specmill.walk.Runs |
| `drafted` | list of list of int32 | the same |
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specmill.files import write_atomically
from specmill.samples import Sample
from specmill.walk import Runs

_COUNTS = pa.list_(pa.list_(pa.int32()))
SCHEMA = pa.schema(
    {
        "sample_key": pa.string(),
        "answer_ids": pa.list_(pa.int32()),
        "accepted": _COUNTS,
        "drafted": _COUNTS,
    }
)


def write_runs(path: Path, samples: list[Sample], runs: list[Runs]) -> None:
    """Write the runs of samples; equal runs give equal bytes."""
    columns = {
        "sample_key": [sample.sample_key for sample in samples],
        "answer_ids": [sample.answer_token_ids for sample in samples],
        "accepted": [one.accepted.tolist() for one in runs],
        "drafted": [one.drafted.tolist() for one in runs],
    }
    encoded = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=SCHEMA), encoded, compression="zstd")
    write_atomically(path, encoded.getvalue())


def read_runs(path: Path) -> dict[str, tuple[list[int], Runs]]:
    """Read a file of `write_runs`: the answer's token ids and its runs by sample key."""
    found = {}
    for row in pq.read_table(path, schema=SCHEMA).to_pylist():
        runs = Runs(np.array(row["accepted"], np.int32), np.array(row["drafted"], np.int32))
        found[row["sample_key"]] = (row["answer_ids"], runs)
    return found
