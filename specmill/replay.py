"""What a row of `methods` would have accepted on recorded greedy answers: no server runs.

Of each answer as many tokens are gone through as the bench asks for (bench.max_tokens).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specmill.files import read_json, read_object
from specmill.head_facts import INSPECTION
from specmill.params import Method
from specmill.proposers import ngram_runs, suffix_defaults, suffix_runs
from specmill.samples import ALL, Sample
from specmill.section import DoesNotFit
from specmill.view import StateView
from specmill.walk import Runs, Walk, figures, walk

MOST_K = 8
"""Methods without a model are replayed up to this K."""
_WINDOWS = [(least, most) for most in range(1, 6) for least in range(1, most + 1)]
_NO_REPLAY = {
    "none": "it drafts nothing",
    "peagle": "its later drafts stand on mask tokens, which its training draws at random",
    "dflash": "it drafts blocks, which its training draws at random",
    "draft_model": "the draft model would have to run; serve it, it needs no training",
}


def replay_row(
    chosen: Method,
    settings: Any,
    samples: list[Sample],
    verifier: dict[str, Any],
    verifier_head: Path,
    view: StateView,
) -> list[Runs]:
    """Drafts of a row at every start of every answer.

    Args:
        chosen: Its entry of params.yaml.
        settings: Its `settings`, checked.
        samples: Greedy answers, for suffix decoding in the order in which they come.
        verifier: identity.json.
        verifier_head: Its slice.
        view: Its hidden states of the samples.

    Raises:
        DoesNotFit: when nothing is known of what it would draft.
        ValueError: when hidden states are missing.
    """
    if chosen.method in _NO_REPLAY:
        raise DoesNotFit(_NO_REPLAY[chosen.method])
    max_len = verifier["max_model_len"]
    if chosen.method == "ngram":
        window = (settings.prompt_lookup_min, settings.prompt_lookup_max)
        return [ngram_runs(*one, window, MOST_K, max_len) for one in _given(samples)]
    if chosen.method == "suffix":
        asked = suffix_defaults() | settings.model_dump(exclude_none=True)
        return suffix_runs(_given(samples), asked, MOST_K, max_len)
    return _head_runs(chosen, samples, verifier, verifier_head, view)


def _given(samples: list[Sample]) -> list[tuple[np.ndarray, int]]:
    """Ids and length of the prompt of each sample."""
    return [(one.input_ids, int((one.loss_mask == 0).sum())) for one in samples]


def _head_runs(
    chosen: Method,
    samples: list[Sample],
    verifier: dict[str, Any],
    verifier_head: Path,
    view: StateView,
) -> list[Runs]:
    from specmill.replay_heads import eagle3_runs, medusa_runs

    head = Path(chosen.head)
    if view.online:
        raise DoesNotFit("extract.mode is online: no hidden states are kept to replay it from")
    if (head / INSPECTION).is_file() and (reason := read_json(head / INSPECTION)["refused"]):
        raise DoesNotFit(reason)
    config = read_object(head / "config.json")
    run: Callable[..., list[Runs]]
    if chosen.method == "medusa":
        run, most_k = medusa_runs, config["num_heads"]
    else:
        methods = config["speculators_config"]["proposal_methods"]
        run, most_k = eagle3_runs, max(method["speculative_tokens"] for method in methods)
    view.check_verifier(verifier)
    view.require([sample.sample_key for sample in samples])
    return run(head, verifier, verifier_head, view, samples, most_k)


def rows_of(runs: list[Runs], samples: list[Sample], num_tokens: int) -> list[dict[str, Any]]:
    """Figures (specmill.walk) by category, `all` first, and K.

    Args:
        runs: Of each sample.
        samples: The answers.
        num_tokens: Tokens of each answer to go through; all of a shorter one.
    """
    categories = sorted({sample.category for sample in samples})
    rows = []
    for k in range(1, runs[0].most_k + 1):
        walks = _walks(runs, k, num_tokens)
        for category in [ALL, *categories]:
            of_it = [
                taken for taken, sample in zip(walks, samples, strict=True)
                if category in (ALL, sample.category)
            ]  # fmt: skip
            rows.append({"category": category, "k": k, **_rounded(figures(of_it))})
    return rows


def window_rows(samples: list[Sample], num_tokens: int, max_len: int) -> list[dict[str, Any]]:
    """Prompt lookup with every window up to five tokens and every K, over all prompt types."""
    given = _given(samples)
    kept = ("tokens_per_step", "draft_coverage", "acceptance_length")
    rows = []
    for least, most in _WINDOWS:
        runs = [ngram_runs(*one, (least, most), MOST_K, max_len) for one in given]
        for k in range(1, MOST_K + 1):
            found = _rounded(figures(_walks(runs, k, num_tokens)))
            rows.append(
                {"prompt_lookup_min": least, "prompt_lookup_max": most, "k": k}
                | {name: found[name] for name in kept}
            )
    return rows


def _walks(runs: list[Runs], k: int, num_tokens: int) -> list[Walk]:
    """Of each answer with K, as far as `num_tokens` or its end."""
    return [walk(one, k, min(num_tokens, len(one.accepted) + 1)) for one in runs]


def _rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in found.items()
    }
