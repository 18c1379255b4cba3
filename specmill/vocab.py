"""The draft vocabulary: which verifier tokens the draft model can propose.

    target_id = draft_id + d2t[draft_id]        d2t holds offsets, not ids
    t2d[target_id]                              membership, not an inverse table

Mapping as in EAGLE-3 (SafeAILab/EAGLE traineagle3/cnets.py) and built by speculators.
"""

from collections import Counter
from pathlib import Path

import numpy as np

from specmill.files import digest
from specmill.samples import Sample


def count_trained_tokens(samples: list[Sample]) -> Counter[int]:
    """How often each verifier token id was written by the verifier (loss_mask 1)."""
    counts: Counter[int] = Counter()
    for sample in samples:
        counts.update(sample.answer_token_ids)
    return counts


def build_tables(
    counts: Counter[int], draft_vocab_size: int, target_vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the most frequent ids (ties: the lower id; room left over: the lowest unused ids).

    Returns:
        d2t, int64 [draft_vocab_size], and t2d, bool [target_vocab_size].

    Raises:
        ValueError: when the draft vocabulary is larger than the verifier's, or an id is not of it.
    """
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    if draft_vocab_size > target_vocab_size:
        raise ValueError(
            f"vocab.draft_vocab_size is {draft_vocab_size}, above the verifier's vocabulary "
            f"of {target_vocab_size}"
        )
    _check_ids(counts, target_vocab_size)
    d2t, t2d = build_vocab_mappings_from_distribution(
        dict(counts), draft_vocab_size, target_vocab_size
    )
    tables = d2t.numpy(), t2d.numpy()
    check_tables(*tables, draft_vocab_size, target_vocab_size)
    return tables


def _check_ids(counts: Counter[int], target_vocab_size: int) -> None:
    if counts and not 0 <= min(counts) <= max(counts) < target_vocab_size:
        raise ValueError(
            f"data/prepared has token ids {min(counts)} to {max(counts)}, and the verifier's "
            f"vocabulary {target_vocab_size} tokens: it is of another tokenizer; run "
            "`dvc repro -f prepare`"
        )


def check_tables(
    d2t: np.ndarray, t2d: np.ndarray, draft_vocab_size: int, target_vocab_size: int
) -> None:
    """Check that the tables are one mapping of the sizes asked for.

    Raises:
        ValueError: naming the property that fails.
    """
    if d2t.shape != (draft_vocab_size,) or t2d.shape != (target_vocab_size,):
        raise ValueError(
            f"d2t is {d2t.shape} and t2d {t2d.shape}; expected ({draft_vocab_size},) and "
            f"({target_vocab_size},)"
        )
    if int(t2d.sum()) != draft_vocab_size:
        raise ValueError(f"t2d marks {int(t2d.sum())} tokens, expected {draft_vocab_size}")
    if not np.array_equal(np.nonzero(t2d)[0], np.arange(draft_vocab_size) + d2t):
        raise ValueError("d2t and t2d are not the same mapping")


def coverage(counts: Counter[int], t2d: np.ndarray) -> float:
    """Share of trained tokens that the draft vocabulary holds, 0 ... 1.

    Raises:
        ValueError: when no token trains, or one is not of the verifier's vocabulary.
    """
    _check_ids(counts, len(t2d))
    if not counts:
        raise ValueError("no token of data/prepared trains; run `dvc repro -f prepare`")
    kept = sum(count for token, count in counts.items() if t2d[token])
    return kept / counts.total()


def tables_digest(d2t: np.ndarray, t2d: np.ndarray) -> str:
    """Digest of a mapping, as written into a head's provenance."""
    return digest([d2t.astype(int).tolist(), np.nonzero(t2d)[0].tolist()])


def save_tables(folder: Path, d2t: np.ndarray, t2d: np.ndarray) -> None:
    """Write d2t.npy and t2d.npy."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "d2t.npy", d2t)
    np.save(folder / "t2d.npy", t2d)


def load_tables(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read d2t.npy and t2d.npy; raises ValueError when one is damaged."""
    try:
        d2t, t2d = (np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("d2t", "t2d"))
        return d2t, t2d
    except (EOFError, ValueError, MemoryError) as error:  # a header may claim any shape
        raise ValueError(f"{folder} is damaged ({error}); run `dvc repro -f vocab`") from None
