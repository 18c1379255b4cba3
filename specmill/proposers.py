"""vLLM's own proposers without a server: prompt lookup and suffix decoding on recorded answers.

Depends on vLLM's version: `_find_longest_matched_ngram_and_propose_tokens` (v1/spec_decode/
ngram_proposer.py) and how SuffixDecodingProposer drives arctic_inference (suffix_decoding.py), as
they are in 0.26 and 0.32.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specmill.walk import Runs


def ngram_runs(
    ids: np.ndarray, num_prompt_tokens: int, window: tuple[int, int], most_k: int, max_len: int
) -> Runs:
    """What prompt lookup drafts at every start of an answer, all K at once.

    The match does not depend on K, which only says how many of the tokens after it are taken.

    Args:
        ids: int32 [num_tokens], prompt and answer.
        num_prompt_tokens: Of the prompt.
        window: prompt_lookup_min and prompt_lookup_max.
        most_k: Largest K.
        max_len: max_model_len of the engine, beyond which it does not draft.
    """
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

    ids = np.ascontiguousarray(ids, dtype=np.int32)
    starts = range(num_prompt_tokens + 1, len(ids))  # tokens that are known
    right = np.zeros((len(starts), most_k), dtype=bool)
    drafted = np.zeros(len(starts), dtype=np.int32)
    for place, known in enumerate(starts):
        draft = _find_longest_matched_ngram_and_propose_tokens(
            ids[:known], window[0], window[1], max_len, most_k
        )
        drafted[place] = len(draft)
        right[place] = _right(draft, ids[known:], most_k)
    return Runs.of_chain(right, drafted)


def _right(draft: Sequence[int] | np.ndarray, following: np.ndarray, most_k: int) -> np.ndarray:
    """Whether each draft token is the recorded one, bool [most_k]; False beyond either's end."""
    found = np.zeros(most_k, dtype=bool)
    shared = min(len(draft), len(following), most_k)
    found[:shared] = np.asarray(draft[:shared]) == following[:shared]
    return found


def suffix_defaults() -> dict[str, Any]:
    """vLLM's own values of the settings of suffix decoding."""
    from vllm.config import SpeculativeConfig

    names = (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    )
    return {name: getattr(SpeculativeConfig, name) for name in names}


def suffix_runs(
    requests: Sequence[tuple[np.ndarray, int]], settings: dict[str, Any], most_k: int, max_len: int
) -> list[Runs]:
    """What suffix decoding drafts for requests answered one after the other, in this order.

    Each answer is remembered for the requests after it, as by a server that has just started.

    Args:
        requests: Prompt and answer, int32 [num_tokens], with the length of the prompt.
        settings: All keys of `suffix_defaults`.
        most_k: Largest K; each K is asked for by itself, since a longer draft may follow another
            match.
        max_len: max_model_len of the engine.
    """
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    depth = settings["suffix_decoding_max_tree_depth"]
    cache = SuffixDecodingCache(
        max_tree_depth=depth,
        max_cached_requests=settings["suffix_decoding_max_cached_requests"],
    )
    found = []
    for number, (given, num_prompt_tokens) in enumerate(requests):
        ids = np.ascontiguousarray(given, dtype=np.int32)
        cache.start_request(number, ids[:num_prompt_tokens])
        starts = range(num_prompt_tokens + 1, len(ids))
        accepted = np.zeros((len(starts), most_k), dtype=np.int32)
        drafted = np.zeros((len(starts), most_k), dtype=np.int32)
        for place, known in enumerate(starts):
            cache.add_active_response(number, [int(ids[known - 1])])
            for k in range(1, most_k + 1):
                draft = cache.speculate(
                    number,
                    ids[max(0, known - depth) : known],
                    max_spec_tokens=min(k, max_len - known - 1),
                    max_spec_factor=settings["suffix_decoding_max_spec_factor"],
                    min_token_prob=settings["suffix_decoding_min_token_prob"],
                ).token_ids
                drafted[place, k - 1] = len(draft)
                accepted[place, k - 1] = np.cumprod(_right(draft, ids[known:], k)).sum()
        if len(ids) > num_prompt_tokens:
            cache.add_active_response(number, [int(ids[-1])])
        cache.stop_request(number)
        found.append(Runs(accepted, drafted))
    return found
