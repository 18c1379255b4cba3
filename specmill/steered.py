"""A scheduler for vLLM with which every request says how many tokens are drafted for it.

An engine is started for one K. Step time is wanted at several, and a start takes longer than all
the steps that are timed: one engine, started for the largest K, serves the smaller ones too.

    --scheduler-cls specmill.steered.SteeredScheduler
    {"vllm_xargs": {"k": 3}}        in a request; one without gets the engine's own K

vLLM has a table of K by batch size for its schedules of K (`dynamic_sd_lookup`) and reads it at
each step (v1/core/sched/scheduler.py, 0.32). Here every entry is what the requests in flight ask
for. EAGLE-3, DFlash and draft models then draft as many tokens as the step says, at the cost that
this K has (v1/spec_decode/llm_base_proposer.py). A custom_class proposer is not told and drafts the
engine's K, which is cut before it is scheduled; cut to nothing, the step is one in which nothing
was found. Not for Medusa and suffix decoding, which assert
the K they were started with, nor for P-EAGLE, whose input is laid out for it.

For CPU engines alone: they capture nothing and schedule synchronously (platforms/cpu.py). On a GPU
the graphs of a decode step are captured for the engine's K, so that a step at another would be
timed without them, and drafts stay with the worker: there every K has an engine of its own.
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class Steering:
    """What is put before a scheduler of vLLM."""

    dynamic_sd_lookup: list[int] | None
    num_spec_tokens: int
    requests: dict[str, Any]
    scheduler_config: Any

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step whose drafts have the length that the requests in flight ask for.

        Raises:
            ValueError: as `_asked_for`.
        """
        if self.requests:
            self.dynamic_sd_lookup = [self._asked_for()] * (self.scheduler_config.max_num_seqs + 1)
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Take drafts, cut to that length (a vLLM `DraftTokenIds`, which is changed)."""
        if self.dynamic_sd_lookup is not None:
            k = self.dynamic_sd_lookup[0]
            cut = [drafted[:k] for drafted in draft_token_ids.draft_token_ids]
            draft_token_ids.draft_token_ids = cut
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]

    def _asked_for(self) -> int:
        """K of the requests in flight.

        Raises:
            ValueError: when they differ, or ask for more than the engine was started with.
        """
        asked = {
            (request.sampling_params.extra_args or {}).get("k", self.num_spec_tokens)
            for request in self.requests.values()
        }
        if len(asked) > 1:
            raise ValueError(f"requests in flight ask for K {sorted(asked)}: a step has one")
        (k,) = asked
        if not 0 <= k <= self.num_spec_tokens:
            raise ValueError(f"a request asks for K {k}; this engine drafts 0 to "
                             f"{self.num_spec_tokens}")  # fmt: skip
        return int(k)


class SteeredScheduler(Steering, Scheduler):
    """vLLM's synchronous scheduler, steered."""
