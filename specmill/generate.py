"""On-policy samples: every prompt answered by the verifier itself, turn after turn."""

import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from specmill import compat
from specmill.client import Answer, Client, run_closed_loop
from specmill.conversations import Conversation, Exchange, Message
from specmill.params import Prepare
from specmill.responses import ResponseCache, response_key
from specmill.samples import Sample, make_sample
from specmill.server import Server

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

Job = tuple[str, Conversation, dict[str, Any]]
"""(split, conversation, sampling parameters)"""


def greedy(max_tokens: int) -> dict[str, Any]:
    """Sampling parameters of a greedy answer."""
    return {"temperature": 0.0, "max_tokens": max_tokens}


def own_seed(seed: int, name: object) -> int:
    """A request's seed of 32 bits, from the run's and what the request is for."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big")


def sampled(conversation: Conversation, chosen: Prepare) -> dict[str, Any]:
    """Sampling parameters of a training answer; its own seed, so that order is no input."""
    if chosen.temperature == 0:
        return greedy(chosen.max_tokens)
    return {
        "temperature": chosen.temperature,
        "top_p": chosen.top_p,
        "top_k": chosen.top_k,
        "min_p": chosen.min_p,
        "seed": own_seed(chosen.seed, conversation.key),
        "max_tokens": chosen.max_tokens,
    }


async def generate(
    jobs: list[Job],
    verifier: dict[str, Any],
    cache: ResponseCache,
    start_servers: Callable[[], AbstractContextManager[list[Server]]],
    template_kwargs: dict[str, Any],
    *,
    concurrency: int,
    timeout_s: float,
    strict: bool = False,
) -> tuple[list[list[Sample]], Counter[str]]:
    """Answer every job; servers are started only when an answer is missing from the cache.

    The history of a turn is what the verifier answered before. Where a conversation holds tool
    results, it is what the dataset has: a result belongs to the call that it answers. Each of
    `concurrency` x the number of servers conversations in flight has one server, so that a slow one
    gets fewer.

    A conversation that outgrows the context ends with the turn before, and is left out when there
    is none: unless it is `strict` or a bench prompt, of which none may go in silence.

    Returns:
        The assistant turns of each job that has any, in job order; `num_generated`, answers made
        now, and `num_too_long`, conversations that outgrew the context. A conversation goes on
        after an answer that was cut by its length, as a served one does.
    """
    answering = _Answering(verifier, cache, template_kwargs, strict)
    known = [await answering.turns(job, None) for job in jobs]
    missing = [job for job, samples in zip(jobs, known, strict=True) if samples is None]
    if missing:
        with start_servers() as servers:
            found = shared_out(
                missing, servers, answering.turns, concurrency, timeout_s, progress="answers"
            )
            fresh = iter(await found)
        known = [samples if samples is not None else next(fresh) for samples in known]
    return [samples for samples in known if samples], answering.counts


@dataclass
class _Answering:
    """How jobs are answered, and counts of what became of them."""

    verifier: dict[str, Any]
    cache: ResponseCache
    template_kwargs: dict[str, Any]
    strict: bool
    counts: Counter[str] = field(default_factory=lambda: Counter(num_generated=0, num_too_long=0))

    async def turns(self, job: Job, client: Client | None) -> list[Sample] | None:
        """The assistant turns of a job; None where one is not cached and there is no server."""
        split, conversation, sampling = job
        request = sampling | _rendering(conversation, self.template_kwargs)
        messages: list[Message] = []
        samples: list[Sample] = []
        for turn, exchange in enumerate(conversation.exchanges):
            messages += exchange.messages
            key = response_key(messages, self.verifier, request)
            answer = self.cache.get(key)
            if answer is None:
                if client is None:
                    return None
                try:
                    answer = await client.chat(messages, request)
                except RuntimeError as error:
                    fault = _fault(job, turn, error, self.verifier["max_model_len"])
                    if self.strict or split == "bench" or compat.TOO_LONG not in str(error):
                        raise RuntimeError(fault) from None
                    logger.warning("left out from there on: %s", fault)
                    self.counts["num_too_long"] += 1
                    return samples
                self.cache.add(key, answer)
                self.counts["num_generated"] += 1
            samples.append(_as_sample(answer, conversation, split, turn))
            messages.append(_remembered(conversation, exchange, answer))
        return samples


def _fault(job: Job, turn: int, error: RuntimeError, max_model_len: int) -> str:
    """What went wrong with which prompt, and what to do where it is too long."""
    split, conversation, _ = job
    way_out = (
        f". A conversation must fit verifier.max_model_len ({max_model_len}) with its answers "
        "(prepare.max_tokens)"
    )
    return (
        f"{split} prompt {conversation.said[0][:60]!r} ({conversation.category}), turn {turn + 1}: "
        f"{error}{way_out if compat.TOO_LONG in str(error) else ''}"
    )


async def shared_out(
    items: list[Item],
    servers: list[Server],
    work: Callable[[Item, Client], Awaitable[Result]],
    concurrency: int,
    timeout_s: float,
    *,
    progress: str,
) -> list[Result]:
    """Apply `work` to every item and a server that is free; results in item order.

    Args:
        items: What is to be done.
        servers: All healthy; each has `concurrency` items in flight, so that a slow one gets fewer.
        work: Asks the server it is given.
        concurrency: Of one server.
        timeout_s: Of one request.
        progress: What the bar is called.
    """
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(server, timeout_s)) for server in servers]
        free = clients * concurrency

        async def somewhere(item: Item) -> Result:
            client = free.pop(0)
            try:
                return await work(item, client)
            finally:
                free.append(client)

        return await run_closed_loop(items, somewhere, len(free), progress=progress)


def _rendering(conversation: Conversation, template_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What shapes a prompt besides its messages, as request fields; absent when it shapes nothing.

    With tool_choice "none" the server offers the tools and hands the model's call out as text.
    """
    fields: dict[str, Any] = {}
    if conversation.tools:
        fields |= {"tools": list(conversation.tools), "tool_choice": "none"}
    if template_kwargs:
        fields["chat_template_kwargs"] = template_kwargs
    return fields


def _remembered(conversation: Conversation, exchange: Exchange, answer: Answer) -> Message:
    if conversation.holds_tool_results and exchange.answer is not None:
        return exchange.answer
    return {"role": "assistant", "content": answer.text}


def _as_sample(answer: Answer, conversation: Conversation, split: str, turn: int) -> Sample:
    return make_sample(
        answer.prompt_token_ids,
        answer.token_ids,
        category=conversation.category,
        source=conversation.source,
        split=split,
        turn=turn,
        text=answer.text,
        finish_reason=answer.finish_reason,
    )
