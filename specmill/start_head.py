"""The head that a training starts from: fetched, looked at, its vocabulary mapping taken.

The mapping comes first, and nothing makes another: lm_head's rows are draft ids, so that under a
new mapping each would mean another token. The vocab stage does this and keeps the head beside the
tables (data/vocab/head), so that training has both from one place, also where the source is not.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from specmill.files import file_digest, read_object, write_json
from specmill.head_checks import misfits
from specmill.head_facts import PROVENANCE
from specmill.head_shapes import WEIGHTS, tensor_shapes
from specmill.inspection import check_finite, mapping_fault
from specmill.offline import expected_shapes
from specmill.outside import convert, fetch
from specmill.params_heads import OutsideHead
from specmill.section import DoesNotFit
from specmill.trials import read_tables
from specmill.vocab import build_tables, check_tables, tables_digest


def take_head(
    chosen: OutsideHead,
    draft_vocab_size: int,
    verifier: dict[str, Any],
    verifier_head: Path,
    folder: Path,
) -> tuple[np.ndarray, np.ndarray]:
    """Fetch a head and take its vocabulary mapping.

    Args:
        chosen: Of params.yaml: train.from.
        draft_vocab_size: Of vocab.
        verifier: identity.json.
        verifier_head: Its slice.
        folder: Receives the head in speculators' format, with provenance.json.

    Returns:
        d2t, int64 [draft_vocab_size], and t2d, bool [vocab_size].

    Raises:
        ValueError: when it cannot be had, when it does not fit the verifier, naming its tensors
            that do not, or when its mapping is none or has another size than `vocab` says.
    """
    source, origin = fetch(chosen, "train.from")
    try:
        convert(source, chosen, verifier, verifier_head, folder)
        config = read_object(folder / "config.json")
        reasons = misfits(config, tensor_shapes(folder), expected_shapes(folder), verifier)
        if reasons:
            raise DoesNotFit("; ".join(reasons))
        check_finite(folder)
        tables = _tables(folder, config, draft_vocab_size, verifier)
    except ValueError as reason:
        raise ValueError(f"train.from {chosen.source}: {reason}") from None
    write_json(
        folder / PROVENANCE,
        {
            "from": chosen.model_dump(),
            "origin": origin,
            "weights": file_digest(folder / WEIGHTS),
            "vocabulary": tables_digest(*tables),
        },
    )
    return tables


def _tables(
    folder: Path, config: dict[str, Any], draft_vocab_size: int, verifier: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The mapping of a head; that of a full vocabulary is each id itself.

    Raises:
        DoesNotFit: when there is none, or none that training could use.
    """
    own, vocab_size = config["draft_vocab_size"], verifier["vocab_size"]
    if own != draft_vocab_size:
        raise DoesNotFit(
            f"its draft vocabulary has {own} tokens and vocab.draft_vocab_size is "
            f"{draft_vocab_size}: write {own}"
        )
    theirs = config["transformer_layer_config"]["vocab_size"]
    if theirs != vocab_size:
        raise DoesNotFit(f"its vocabulary has {theirs} tokens and the verifier's {vocab_size}")
    d2t, t2d = read_tables(folder)
    if d2t is None:  # `misfits` has told where one is needed
        return build_tables(Counter(), own, vocab_size)
    if t2d is None:
        t2d = np.zeros(vocab_size, dtype=bool)
        t2d[(np.arange(own) + d2t).clip(0, vocab_size - 1)] = True
    if fault := mapping_fault(d2t, t2d, vocab_size):
        raise DoesNotFit(f"{fault}; which token an id of its lm_head means is not known")
    check_tables(d2t, t2d, own, vocab_size)
    return d2t, t2d
