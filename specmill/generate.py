"""On-policy samples: every prompt answered by the verifier itself, turn after turn."""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from specmill.client import Answer, Client, run_closed_loop
from specmill.prompts import Prompt
from specmill.responses import ResponseCache, response_key
from specmill.samples import Sample, make_sample
from specmill.server import Server

Job = tuple[str, Prompt, dict[str, Any]]
"""(split, prompt, sampling parameters)"""


def greedy(max_tokens: int) -> dict[str, Any]:
    """Sampling parameters of a greedy answer."""
    return {"temperature": 0.0, "max_tokens": max_tokens}


def sampled(
    prompt: Prompt, max_tokens: int, temperature: float, top_p: float, seed: int
) -> dict[str, Any]:
    """Sampling parameters of one training answer; seeded by its prompt, so order is no input."""
    if temperature == 0:
        return greedy(max_tokens)
    mixed = hashlib.sha256(f"{seed}:{prompt.key}".encode()).digest()
    return {
        "temperature": temperature,
        "top_p": top_p,
        "seed": int.from_bytes(mixed[:4], "big"),
        "max_tokens": max_tokens,
    }


async def generate(
    jobs: list[Job],
    verifier: dict[str, Any],
    cache: ResponseCache,
    start_server: Callable[[], AbstractContextManager[Server]],
    *,
    concurrency: int,
    timeout_s: float,
    source: str,
) -> tuple[list[list[Sample]], int]:
    """Answer every job; the server is started only when an answer is missing from the cache.

    Returns:
        The assistant turns of each job, in job order, and the number of answers generated now. A
        conversation goes on after an answer that was cut by its length, as a served one does.
    """
    generated = 0

    async def answer_turns(job: Job, client: Client | None) -> list[Sample] | None:
        nonlocal generated
        split, prompt, sampling = job
        messages: list[dict[str, str]] = []
        samples = []
        for turn, question in enumerate(prompt.turns):
            messages.append({"role": "user", "content": question})
            key = response_key(messages, verifier, sampling)
            answer = cache.get(key)
            if answer is None:
                if client is None:
                    return None
                try:
                    answer = await client.chat(messages, sampling)
                except RuntimeError as error:
                    raise RuntimeError(
                        f"{split} prompt {prompt.turns[0][:60]!r} ({prompt.category}), turn "
                        f"{turn + 1}: {error}. A conversation must fit verifier.max_model_len "
                        f"({verifier['max_model_len']}) with its answers (prepare.max_tokens)"
                    ) from None
                cache.add(key, answer)
                generated += 1
            samples.append(_as_sample(answer, prompt, split, turn, source))
            messages.append({"role": "assistant", "content": answer.text})
        return samples

    known = [await answer_turns(job, None) for job in jobs]
    missing = [job for job, samples in zip(jobs, known, strict=True) if samples is None]
    if missing:
        with start_server() as server:
            async with Client(server, timeout_s) as client:
                fresh = iter(
                    await run_closed_loop(
                        missing,
                        lambda job: answer_turns(job, client),
                        concurrency,
                        progress="answers",
                    )
                )
        known = [samples if samples is not None else next(fresh) for samples in known]
    return [samples for samples in known if samples is not None], generated


def _as_sample(answer: Answer, prompt: Prompt, split: str, turn: int, source: str) -> Sample:
    return make_sample(
        answer.prompt_token_ids,
        answer.token_ids,
        category=prompt.category,
        source=source,
        split=split,
        turn=turn,
        text=answer.text,
        finish_reason=answer.finish_reason,
    )
