"""Sample the twin through the engine, with a method or without, and say whether it is lossless."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from specmill import compat
from specmill.acceptance import acceptance, subtract
from specmill.client import Client, run_closed_loop
from specmill.params import Runtime
from specmill.sampling_check import check_samples
from specmill.sampling_twin import MAX_MODEL_LEN, next_token_probabilities, prompts
from specmill.section import DoesNotFit
from specmill.server import EngineRefused, Server, serve

K = 2
"""Draft tokens: more than one, so that a draft is also accepted in part; so few that all of it is
accepted often enough for the bonus token to be tested."""
NUM_POSITIONS = K + 3
"""Tokens of an answer: the first comes from the prompt's own step and has no draft, then K drafted
ones, the bonus token, and the first of the draft after it."""
NUM_SAMPLES = 8192
"""tests/test_sampling_check.py: what it takes to find a sampler that is only a little wrong."""
TEMPERATURE = 1.0
_PER_REQUEST = 128
_IN_FLIGHT = 4
_LEAST_OF_EACH = 100
"""Accepted and rejected drafts without which the samples say nothing about the method."""


def check_lossless(
    twin: Path, speculation: dict[str, Any] | None, log: Path, runtime: Runtime
) -> dict[str, Any]:
    """Serve the twin, sample it and test the samples against what it says of each token.

    It is served in float32, in which engine and transformers agree to far more digits than samples
    show, and uncompiled, which starts sooner. The sampler is the same in any dtype.

    Args:
        twin: Checkpoint.
        speculation: What vLLM is told of the method; None serves without.
        log: Receives the server's output.
        runtime: Limits of time and memory.

    Returns:
        `lossless`, `p_value`, `num_samples`, `num_tests`, `temperature`, the engine's
        `model_runner`, and of drafts `num_drafts`, `acceptance_length` and `acceptance_rate`
        (None without speculation).

    Raises:
        RuntimeError: when nothing was found and there were too few drafts of either fate.
        DoesNotFit: when the engine does not start with the method.
    """
    answers, counts = _serve_and_sample(twin, speculation, log, runtime)
    exact = [next_token_probabilities(twin, *pair) for pair in zip(prompts(), answers, strict=True)]
    before = np.repeat([prompt[-1] for prompt in prompts()], answers.shape[1])
    verdict = check_samples(before, answers.reshape(-1, NUM_POSITIONS), np.concatenate(exact))
    if speculation and verdict.lossless:  # a difference that was found needs no drafts to count
        check_both_fates(counts)
    drafts = acceptance(counts, K) if speculation else {}
    shown = ("num_drafts", "acceptance_length", "acceptance_rate")
    return {
        "lossless": verdict.lossless,
        "p_value": verdict.p_value,
        "num_samples": len(before),
        "num_tests": verdict.num_tests,
        "temperature": TEMPERATURE,
        "model_runner": compat.engine_facts(log.read_text(errors="replace"))["model_runner"],
        **{name: drafts.get(name) for name in shown},
    }


def _serve_and_sample(
    twin: Path, speculation: dict[str, Any] | None, log: Path, runtime: Runtime
) -> tuple[np.ndarray, dict[str, int]]:
    flags = ["--max-model-len", str(MAX_MODEL_LEN), "--dtype", "float32"]
    flags += ["--enforce-eager", "--skip-tokenizer-init"]
    # a seeded request whose prompt is read in parts ends a CPU engine: it winds the generator back,
    # which only CUDA's can (vllm v1/worker/gpu_model_runner.py, 0.32: "does not use offset")
    flags.append("--no-enable-chunked-prefill")
    if speculation:
        flags += ["--speculative-config", json.dumps(speculation)]
    try:
        with serve(
            twin,
            flags,
            log,
            cpu_kv_cache_gib=runtime.cpu_kv_cache_gib,
            gpu_memory_utilization=runtime.gpu_memory_utilization,
            startup_timeout_s=runtime.startup_timeout_s,
            label="sampling",
        ) as server:
            return asyncio.run(_sample(server, runtime.request_timeout_s))
    except EngineRefused as error:
        if speculation is None:
            raise
        raise DoesNotFit(f"vLLM does not start with it: {error.reason}") from error


def check_both_fates(counts: dict[str, int]) -> None:
    """Refuse samples in which drafts were hardly ever accepted, or hardly ever rejected.

    Raises:
        RuntimeError: naming how many there were.
    """
    drafts, accepted = counts.get("num_drafts", 0), counts.get("accepted_at_0", 0)
    if min(accepted, drafts - accepted) < _LEAST_OF_EACH:
        raise RuntimeError(
            f"of {drafts} drafts {accepted} had their first token accepted; fewer than "
            f"{_LEAST_OF_EACH} accepted or rejected ones say nothing about the method's sampling. "
            "Its artefact (draft_on_twin in its file of specmill/methods) must draft better, or "
            "worse; settings may also keep it from drafting at all"
        )


async def _sample(server: Server, timeout_s: float) -> tuple[np.ndarray, dict[str, int]]:
    """Answers, int [num_prompts, samples per prompt, NUM_POSITIONS], and what counters gained.

    Every second request seeds its samples, for which the engine keeps a generator each; the
    others share one.
    """
    per_prompt = NUM_SAMPLES // _PER_REQUEST // len(prompts())
    bodies = [
        {
            "model": "verifier",
            "prompt": prompt,
            "n": _PER_REQUEST,
            "temperature": TEMPERATURE,
            "max_tokens": NUM_POSITIONS,
            "ignore_eos": True,
            "return_token_ids": True,
            # n samples are seeded by this number and those after it
            **({"seed": _PER_REQUEST * len(prompts()) * i + _PER_REQUEST * j} if i % 2 else {}),
        }
        for j, prompt in enumerate(prompts())
        for i in range(per_prompt)
    ]
    async with (
        Client(server, timeout_s) as client,
        httpx.AsyncClient(
            base_url=server.url,
            headers={"Authorization": f"Bearer {server.api_key}"},
            timeout=timeout_s,
            trust_env=False,
        ) as http,
    ):
        start = await client.counters()

        async def ask(body: dict[str, Any]) -> list[list[int]]:
            reply = await http.post("/v1/completions", json=body)
            if reply.status_code != 200:
                raise RuntimeError(f"the server answered {reply.status_code}: {reply.text[:500]}")
            return [choice["token_ids"] for choice in reply.json()["choices"]]

        answers = await run_closed_loop(bodies, ask, _IN_FLIGHT, progress="sampling")
        counts = subtract(await client.counters(), start)
    return np.array(answers).reshape(len(prompts()), -1, NUM_POSITIONS), counts
