"""Samples: exact token ids of a prompt and the verifier's answer, and which of them train.

    input_ids   [ p0  p1  p2 | a0  a1  a2  a3 ]     prompt as the server saw it, then its answer
    loss_mask   [  0   0   0 |  1   1   1   1 ]     1 on what the verifier wrote

Ids of on-policy answers come from the server's response and are never made by tokenising text
again; those of a dataset's answers come from the verifier's chat template (specmill.templates).

Run      python -m specmill.samples show 0           the first training sample, trained text marked
"""

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specmill.files import digest, write_atomically

ALL = "all"
"""Stands for every category in tables; no category can be called so."""

_WAY_OUT = "run `dvc repro -f prepare`, or `dvc pull prepare` where it was pushed"

SCHEMA = pa.schema(
    {
        "sample_key": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.uint8()),
        "category": pa.string(),
        "source": pa.string(),
        "split": pa.string(),
        "turn": pa.int32(),
        "text": pa.string(),
        "finish_reason": pa.string(),
    }
)


@dataclass(frozen=True)
class Sample:
    """One assistant turn."""

    input_ids: np.ndarray  # int32 [num_tokens]
    loss_mask: np.ndarray  # uint8 [num_tokens]
    category: str
    source: str
    split: str
    turn: int
    """Index of the assistant turn in its conversation, from 0."""
    text: str
    """The answer as the server decoded it."""
    finish_reason: str

    @property
    def sample_key(self) -> str:
        """Names the sample: the same token ids are the same sample (`key_of`)."""
        return key_of(self.input_ids)

    @property
    def prompt_token_ids(self) -> list[int]:
        """The ids before the answer."""
        return [int(token) for token in self.input_ids[self.loss_mask == 0]]

    @property
    def answer_token_ids(self) -> list[int]:
        """The trained ids."""
        return [int(token) for token in self.input_ids[self.loss_mask == 1]]


def key_of(token_ids: np.ndarray) -> str:
    """SHA-256 of token ids [num_tokens] of any integer type, as little-endian int32."""
    return hashlib.sha256(token_ids.astype("<i4").tobytes()).hexdigest()


def digest_of(samples: list[Sample]) -> str:
    """SHA-256 of all that training takes from samples: their ids and masks, in this order."""
    return digest([[sample.sample_key, key_of(sample.loss_mask)] for sample in samples])


def make_sample(
    prompt_ids: list[int],
    answer_ids: list[int],
    *,
    category: str,
    source: str,
    split: str,
    turn: int,
    text: str,
    finish_reason: str,
) -> Sample:
    """Join a prompt and its answer into one sample."""
    ids = np.asarray([*prompt_ids, *answer_ids], dtype=np.int32)
    mask = np.zeros(len(ids), dtype=np.uint8)
    mask[len(prompt_ids) :] = 1
    return Sample(ids, mask, category, source, split, turn, text, finish_reason)


def keep_trainable(
    samples: Iterable[Sample], min_tokens: int, max_model_len: int
) -> tuple[list[Sample], dict[str, int]]:
    """Drop what cannot or should not train; say how many went for which reason.

    Returns:
        The kept samples in order, and counts `num_kept`, `num_no_trained_token`,
        `num_too_short`, `num_too_long`, `num_duplicate`.
    """
    kept: dict[str, Sample] = {}
    counts = dict.fromkeys(
        ("num_kept", "num_no_trained_token", "num_too_short", "num_too_long", "num_duplicate"), 0
    )
    for sample in samples:
        trained = int(sample.loss_mask.sum())
        if trained == 0:
            counts["num_no_trained_token"] += 1
        elif trained < min_tokens:
            counts["num_too_short"] += 1
        elif len(sample.input_ids) > max_model_len:
            counts["num_too_long"] += 1
        elif sample.sample_key in kept:
            counts["num_duplicate"] += 1
        else:
            kept[sample.sample_key] = sample
    counts["num_kept"] = len(kept)
    return list(kept.values()), counts


def write_samples(path: Path, samples: list[Sample]) -> None:
    """Write samples as one Parquet file; equal samples give equal bytes."""
    columns = {
        "sample_key": [sample.sample_key for sample in samples],
        "input_ids": [sample.input_ids for sample in samples],
        "loss_mask": [sample.loss_mask for sample in samples],
    }
    for name in SCHEMA.names[3:]:
        columns[name] = [getattr(sample, name) for sample in samples]
    encoded = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=SCHEMA), encoded)
    write_atomically(path, encoded.getvalue())


def read_samples(path: Path) -> list[Sample]:
    """Read a file of `write_samples`.

    Raises:
        ValueError: when it is no such file, or a row's token ids do not match its key or its mask,
            which is zeros and then ones; names file and row.
    """
    try:
        table = pq.read_table(path, schema=SCHEMA)
    except pa.ArrowException as error:
        raise ValueError(f"{path} is damaged ({error}); {_WAY_OUT}") from None
    if nulls := [name for name in SCHEMA.names if _has_null(table[name])]:
        raise ValueError(f"{path} lacks {', '.join(nulls)} of some rows; {_WAY_OUT}")
    samples = []
    for number, row in enumerate(table.to_pylist()):
        key = row.pop("sample_key")
        row["input_ids"] = np.asarray(row["input_ids"], dtype=np.int32)
        row["loss_mask"] = mask = np.asarray(row["loss_mask"], dtype=np.uint8)
        sample = Sample(**row)
        if sample.sample_key != key or len(mask) != len(sample.input_ids) or not _is_one_run(mask):
            raise ValueError(
                f"{path}, row {number}: token ids do not match their key or mask; {_WAY_OUT}"
            )
        samples.append(sample)
    return samples


def _has_null(column: pa.ChunkedArray) -> bool:
    """Whether a row, or an element of a row's list, is missing."""
    inside = pc.list_flatten(column).null_count if pa.types.is_list(column.type) else 0
    return bool(column.null_count or inside)


def _is_one_run(mask: np.ndarray) -> bool:
    """Whether a mask is zeros and then ones: the prompt, then what trains."""
    return bool(np.all(mask <= 1) and np.all(mask[1:] >= mask[:-1]))


def check_apart(training: list[Sample], heldout: list[Sample]) -> None:
    """Refuse held-out samples that are trained on: validation would measure memory.

    Raises:
        ValueError: with their number and the first.
    """
    both = {s.sample_key for s in training} & {s.sample_key for s in heldout}
    if both:
        raise ValueError(
            f"{len(both)} held-out samples are trained on, the first {min(both)[:12]}; "
            "run `dvc repro -f prepare`"
        )


if __name__ == "__main__":
    from specmill.show import main

    main(sys.argv[1:])
