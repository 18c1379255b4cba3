"""The scheduler that asks requests for K, and the drafter that drafts for nothing."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specmill.acceptance import subtract
from specmill.client import Client
from specmill.fixed_drafter import FixedDrafter, NoDrafts
from specmill.params_file import load_params
from specmill.sampling_drafts import TwinDrafts
from specmill.sampling_twin import MAX_MODEL_LEN, prompts, write_twin
from specmill.server import Server, serve
from specmill.steered import Steering
from tests.workspace import ROOT


class Base:
    """What of vLLM's scheduler is steered."""

    def __init__(self) -> None:
        self.num_spec_tokens = 8
        self.dynamic_sd_lookup: list[int] | None = None
        self.scheduler_config = SimpleNamespace(max_num_seqs=4)
        self.requests: dict[str, Any] = {}
        self.taken: Any = None

    def schedule(self, throttled: bool = False) -> Any:
        return self.dynamic_sd_lookup, throttled

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        self.taken = draft_token_ids


class Scheduler(Steering, Base):
    pass


def scheduler_of(*asked: int | None) -> Scheduler:
    """One request in flight for each K; None asks for none."""
    scheduler = Scheduler()
    for number, k in enumerate(asked):
        extra = None if k is None else {"k": k}
        params = SimpleNamespace(extra_args=extra)
        scheduler.requests[str(number)] = SimpleNamespace(sampling_params=params)
    return scheduler


def test_every_batch_size_gets_the_k_that_requests_ask_for() -> None:
    # index 0 is not used; at most 4 requests are scheduled together
    assert scheduler_of(3, 3).schedule(True) == ([3, 3, 3, 3, 3], True)


def test_a_request_that_says_nothing_gets_the_engine_s_k() -> None:
    assert scheduler_of(None).schedule() == ([8, 8, 8, 8, 8], False)


def test_without_requests_nothing_is_changed() -> None:
    assert scheduler_of().schedule() == (None, False)


def test_drafts_of_a_proposer_that_is_not_told_are_cut() -> None:
    scheduler = scheduler_of(2, 2)
    scheduler.schedule()
    scheduler.update_draft_token_ids(
        SimpleNamespace(req_ids=["0", "1"], draft_token_ids=[[1, 2, 3, 4], [5]])
    )
    assert scheduler.taken.draft_token_ids == [[1, 2], [5]]
    assert scheduler.taken.req_ids == ["0", "1"]


def test_requests_that_ask_for_different_k_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"ask for K \[1, 3\]: a step has one"):
        scheduler_of(3, 1).schedule()


@pytest.mark.parametrize("k", [-1, 9])
def test_a_k_that_the_engine_does_not_draft_is_an_error(k: int) -> None:
    with pytest.raises(ValueError, match=f"asks for K {k}; this engine drafts 0 to 8"):
        scheduler_of(k).schedule()


def drafter(k: int, vocab_size: int, kind: type[FixedDrafter] = FixedDrafter) -> FixedDrafter:
    return kind(
        SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=k),
            model_config=SimpleNamespace(get_vocab_size=lambda: vocab_size),
        )
    )


def test_a_draft_is_k_scattered_tokens_half_a_vocabulary_from_the_last() -> None:
    # 99 + 10000 = 10099; 10099 + 7919 = 18018; 18018 + 7919 = 25937, less the vocabulary 5937
    drafts = drafter(3, 20_000).propose([[5, 99], []], None, None, slot_mappings=None)
    assert drafts == [[10_099, 18_018, 5_937], []]


def test_a_drafter_that_finds_nothing_has_an_empty_draft_for_every_request() -> None:
    assert drafter(3, 20_000, NoDrafts).propose([[5, 99], []], None, None, slot_mappings=None) == [
        [],
        [],
    ]


@pytest.mark.e2e
@pytest.mark.parametrize("method", ["custom_class", "eagle3"])
def test_one_engine_drafts_as_many_tokens_as_its_requests_ask_for(
    method: str, tmp_path: Path
) -> None:
    twin = tmp_path / "twin"
    identity = write_twin(twin)
    told: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "custom_class":
        told["model"] = "specmill.fixed_drafter.FixedDrafter"
    else:
        TwinDrafts(twin, identity, 3).head("eagle3", tmp_path / "head")
        told["model"] = str(tmp_path / "head")
    runtime = load_params(ROOT / "params.yaml").runtime
    with serve(
        twin,
        ["--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32", "--enforce-eager",
         "--skip-tokenizer-init", "--speculative-config", json.dumps(told),
         "--scheduler-cls", "specmill.steered.SteeredScheduler"],
        tmp_path / "log",
        cpu_kv_cache_gib=1,
        gpu_memory_utilization=runtime.gpu_memory_utilization,
        startup_timeout_s=runtime.startup_timeout_s,
        label="steered",
    ) as server:  # fmt: skip
        # a head drafts at every step; what looks drafts up may find none
        for k in (3, 1, 3, 2, *((0, 1) if method == "custom_class" else ())):
            tokens, drafts = asyncio.run(drafted(server, k))
            assert tokens == k * drafts
            assert (drafts > 0) == (k > 0)


async def drafted(server: Server, k: int) -> tuple[float, float]:
    """Draft tokens and drafts by the engine's counters, while three requests ask for K."""
    sampling = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "vllm_xargs": {"k": k}}
    async with Client(server, 60) as client:
        before = await client.counters()
        answers = await asyncio.gather(
            *(client.complete_timed(prompt, sampling) for prompt in prompts()[:3])
        )
        gained = subtract(await client.counters(), before)
    assert [len(answer.token_ids) for answer in answers] == [24, 24, 24]
    return gained["num_draft_tokens"], gained["num_drafts"]
