"""Replay while a head validates: the held-out drafts of every epoch, gone through as by an engine.

speculators' validation already makes every draft that replay needs (specmill.replay_heads), so it
costs no forward pass; a hook on the model reads them.
"""

from types import TracebackType
from typing import Any, Self

import torch

from specmill.walk import Runs, figures, walk


def chain_runs(
    draft_ids: torch.Tensor, fed: torch.Tensor, answered: torch.Tensor, d2t: torch.Tensor | None
) -> Runs:
    """What a head's drafts of one sample are worth.

    Args:
        draft_ids: int64 [most_k, num_fed], ids of the draft vocabulary by step and position.
        fed: int64 [num_fed], the token fed at each position at step 0: the sample's, from its
            second on.
        answered: bool [num_fed], whether that token is of the answer.
        d2t: Offsets, int64 [draft_vocab_size]; None when both vocabularies are one.
    """
    target_ids = draft_ids if d2t is None else draft_ids + d2t[draft_ids]
    most_k = len(target_ids)
    starts = torch.nonzero(answered).flatten()[:-1]  # nothing follows the last token
    following = torch.nn.functional.pad(fed, (0, most_k), value=-1)
    places = starts[:, None] + torch.arange(most_k, device=fed.device)
    # the draft of step k is fed.shift(1 + k)
    right = target_ids.T[starts] == following[places + 1]
    return Runs.of_chain(right.cpu().numpy())


class Replayed:
    """Runs of the documents that an EAGLE-3 model sees inside a `with` block.

    Args:
        model: speculators' model; its forward pass returns the drafts of every step first.
    """

    def __init__(self, model: Any):
        self._model = model
        self.runs: list[Runs] = []

    def __enter__(self) -> Self:
        self._hook = self._model.register_forward_hook(self._take, with_kwargs=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hook.remove()

    def _take(self, model: Any, _args: Any, given: dict[str, Any], output: Any) -> None:
        """Split a packed batch into its documents.

        Args:
            model: The model.
            given: `input_ids`, `loss_mask` and `document_ids` (-1 is padding), each [1, num_fed],
                shifted as specmill.replay_heads shows.
            output: The drafts, one [1, num_fed] a step, then what does not matter here.
        """
        drafts = torch.cat(output[0])  # [most_k, num_fed]
        documents = given["document_ids"][0]
        for document in documents.unique().tolist():
            at = documents == document
            answered = given["loss_mask"][0, at].bool()
            if document >= 0 and answered.any():
                fed = given["input_ids"][0, at]
                self.runs.append(chain_runs(drafts[:, at], fed, answered, model.d2t))

    def lengths(self) -> dict[str, float]:
        """Tokens per step of the answers seen, which is acceptance length since every step drafts.

        Returns:
            `replayed_length_kK` for every K. Empty when no answer has a second token.
        """
        runs = [one for one in self.runs if len(one.accepted)]
        if not runs:
            return {}
        return {
            f"replayed_length_k{k}": figures([walk(one, k) for one in runs])["tokens_per_step"]
            for k in range(1, runs[0].most_k + 1)
        }
