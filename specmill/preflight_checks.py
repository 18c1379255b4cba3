"""What is checked of a twin and of what comes from it, each a function that raises or is silent."""

from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoConfig

from specmill import compat
from specmill.acceptance import acceptance
from specmill.client import Client, run_closed_loop
from specmill.server import Server
from specmill.signatures import USES, drift
from specmill.twin import TOKEN, model_class

_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest relative error of a layer's states. Neighbouring layers of a twin are 0.3 apart or
more."""
_ANSWER = 24
"""Tokens of an answer."""


def look_at_connector() -> str:
    """Refuse a vLLM whose KV connector is not as ours uses it, by the table that the doctor reads.

    Raises:
        TypeError: with every difference.
    """
    used = [use for use in USES if use.user == "connector.py"]
    if faults := drift(compat.device(), used):
        raise TypeError("; ".join(faults))
    return "vLLM's is as ours uses it"


@torch.no_grad()
def own_states(model: Path, token_ids: list[int]) -> torch.Tensor:
    """The states at every depth (specmill.layers) as transformers computes them.

    Args:
        model: A checkpoint.
        token_ids: One sequence.

    Returns:
        float32 [num_layers + 1, num_tokens, hidden_size]; the last is taken before the final norm.
    """
    known = AutoConfig.from_pretrained(model, trust_remote_code=False)
    network = (
        model_class(known)
        .from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
        .eval()
    )
    last: list[torch.Tensor] = []
    decoder = network.get_decoder()
    decoder.norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
    found = network(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.stack([*found[:-1], last[0]])[:, 0]


def check_states(
    found: torch.Tensor, own: torch.Tensor, layer_ids: tuple[int, ...], dtype: str
) -> str:
    """Refuse states of other layers than were asked for.

    Args:
        found: What the connector staged, [num_tokens, num_layers asked for, hidden_size].
        own: Of `own_states`, [num_layers + 1, num_tokens, hidden_size].
        layer_ids: What was asked for, in order.
        dtype: What the engine computed in.

    Returns:
        The largest relative error, in words.

    Raises:
        ValueError: naming the layer whose states they are.
    """
    errors = []
    for place, layer in enumerate(layer_ids):
        states = found[:, place].float()
        distances = ((own - states).norm(dim=(1, 2)) / own.norm(dim=(1, 2))).tolist()
        nearest = min(range(len(own)), key=lambda other: distances[other])
        if nearest != layer:
            shift = f": off by {nearest - layer:+d}" if abs(nearest - layer) == 1 else ""
            raise ValueError(
                f"states asked for as those of layer {layer} are those of layer {nearest}{shift} "
                "(aux id i is the state entering decoder layer i: specmill.layers)"
            )
        errors.append(distances[layer])
    if not max(errors) < _TOLERANCE[dtype]:
        raise ValueError(
            f"states are {max(errors):.2g} from those of transformers, relative to their size; "
            f"{_TOLERANCE[dtype]:g} is rounding in {dtype}: vLLM computes this class otherwise"
        )
    return f"layers {', '.join(map(str, layer_ids))} within {max(errors):.1g} of transformers"


async def answer_greedily(
    server: Server, prompts: list[list[int]], timeout_s: float
) -> tuple[dict[str, int], list[list[int]]]:
    """Have a server answer.

    Returns:
        What its counters show then, and the token ids of the answers, in order.
    """
    async with Client(server, timeout_s) as client:

        async def answer(prompt: list[int]) -> list[int]:
            sampling = {"max_tokens": _ANSWER, "temperature": 0}
            return (await client.complete_timed(prompt, sampling)).token_ids

        answers = await run_closed_loop(prompts, answer, 2, progress="asking")
        counters = await client.counters()
    return {name: int(value) for name, value in counters.items()}, answers


def check_renders(server: Server, timeout_s: float) -> None:
    """Refuse a server that renders no conversation, or renders it otherwise than it answers it.

    Raises:
        RuntimeError: with what it answered.
    """
    asked = {"model": "verifier", "messages": [{"role": "user", "content": "t70 t71"}]}
    answering = {"max_tokens": 1, "temperature": 0, "return_token_ids": True}
    with httpx.Client(
        base_url=server.url,
        headers={"Authorization": f"Bearer {server.api_key}"},
        timeout=timeout_s,
        trust_env=False,
    ) as http:
        rendered = _post(http, "/v1/chat/completions/render", asked).get("token_ids")
        used = _post(http, "/v1/chat/completions", asked | answering).get("prompt_token_ids")
    if not rendered or rendered != used:
        raise RuntimeError(f"the server renders {rendered} and answers to {used}")


def _post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = http.post(path, json=body)
    if reply.status_code != 200:
        raise RuntimeError(f"{path} answered {reply.status_code}: {reply.text[:300]}")
    content: dict[str, Any] = reply.json()
    return content


def check_drafts(counts: dict[str, int], k: int) -> dict[str, Any]:
    """Acceptance figures of a server that must have drafted.

    Raises:
        ValueError: when it exports no counters of speculation, or when they contradict each other.
        RuntimeError: when it has drafted nothing.
    """
    found = acceptance(counts, k)
    if not found["num_drafts"]:
        raise RuntimeError("the server drafted nothing")
    return found


def check_honoured(found: dict[str, Any], answers: list[list[int]], draft_id: int) -> None:
    """Refuse a server that does not add d2t to draft ids.

    Args:
        found: Of `check_drafts`, of a head rigged to draft `draft_id` alone.
        answers: Token ids that the twin said.
        draft_id: What d2t maps to TOKEN.

    Raises:
        RuntimeError: saying what happened instead.
    """
    if said := {token for answer in answers for token in answer} - {TOKEN}:
        raise RuntimeError(
            f"the twin, rigged to say {TOKEN}, also said {sorted(said)[:5]}"
            + (": drafts are accepted as they are" if draft_id in said else "")
        )
    rate = found["acceptance_rate_pos"][0]
    if rate < 1:
        raise RuntimeError(
            f"the head drafts id {draft_id}, which d2t maps to {TOKEN}, the twin says {TOKEN}, and "
            f"{rate:.0%} of drafts are accepted: the engine reads draft ids without d2t, or the "
            "head's weights under other names"
        )
