"""A draft of K tokens at every step, for nothing and never accepted: what verifying alone costs.
And no draft at any step: what the steps cost in which nothing was found.

Stands for methods that look drafts up (n-gram, suffix decoding): what they spend on a draft is next
to nothing beside the verifier's step, but whether they draft depends on the text. This one always
does, so that every step verifies K + 1 tokens per request. vLLM loads it as `custom_class`, on its
V1 runner and without asynchronous scheduling (v1/spec_decode/custom_class_proposer.py, 0.32), and
calls it with what `propose` names.

    draft[i] = (last token + vocab_size // 2 + i * 7919) mod vocab_size         i from 0

A token half a vocabulary away from the last one has nothing to do with it: that the verifier goes
on with it is a chance of about one in the vocabulary's size. The token after the last (+ 1) would
sometimes be right, since digits and letters stand in order. The tokens of a draft differ among
themselves: one token repeated would be routed to the same experts of a mixture-of-experts verifier,
whose step would then be too fast.
"""

from typing import Any

_APART = 7919  # a prime, so that a draft's tokens are scattered over any vocabulary


class FixedDrafter:
    """A proposer for `custom_class`.

    Args:
        vllm_config: vLLM's VllmConfig.
    """

    def __init__(self, vllm_config: Any):
        self._k = vllm_config.speculative_config.num_speculative_tokens
        self._vocab_size = vllm_config.model_config.get_vocab_size()

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """There is none."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        _num_tokens_no_spec: Any,
        _token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """K draft tokens for every request that has sampled; none while its prompt is read.

        Args:
            sampled_token_ids: What this step has sampled, by request.
            slot_mappings: Of no use here.
        """
        return [self._draft(sampled[-1]) if sampled else [] for sampled in sampled_token_ids]

    def _draft(self, last: int) -> list[int]:
        start = last + self._vocab_size // 2
        return [(start + i * _APART) % self._vocab_size for i in range(self._k)]


class NoDrafts(FixedDrafter):
    """A proposer that finds nothing: an empty draft for every request."""

    def _draft(self, last: int) -> list[int]:
        return []
