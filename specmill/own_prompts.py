"""Prompts that the verifier writes itself: what it expects a user to say.

Magpie (Xu et al., arXiv 2406.08464):

    chat template     <|im_start|>system ... <|im_start|>user\\n MARK <|im_end|>\\n ...
    sent              <|im_start|>system ... <|im_start|>user\\n
    answered, kept                                             How do I ... ?
    ends at                                                                  <|im_end|>

For a verifier whose users' prompts one does not have: a model that was aligned on conversations has
learnt both sides of them. Every prompt is drawn with a seed of its own and kept by content, so that
what was interrupted goes on. What is cut by its length, shorter than three words or there already
is left out and counted.

Run      python -m specmill.own_prompts 20000    (needs `dvc repro verifier`)
then     dvc exp run -S prepare.dataset=file:data/prompts/own.jsonl
"""

import argparse
import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from specmill import paths
from specmill.client import Answer, Client
from specmill.files import digest, read_json, write_atomically
from specmill.generate import own_seed, shared_out
from specmill.own_servers import answering_servers
from specmill.params_file import load_params
from specmill.responses import ResponseCache
from specmill.server import Server
from specmill.verifier import load_tokenizer, model_path

logger = logging.getLogger(__name__)

CATEGORY = "own"
_OUT = paths.ROOT / "data" / "prompts" / "own.jsonl"
_MARK = "\u2042specmill\u2042"
_FEWEST_WORDS = 3


def frame(tokenizer: Any, template_kwargs: dict[str, Any]) -> tuple[list[int], int]:
    """What stands before a first user turn, as token ids, and the token that ends it.

    Args:
        tokenizer: A transformers tokenizer with a chat template.
        template_kwargs: Passed to the template.

    Raises:
        ValueError: when the template does not hand a user's words out as they are, or ends them
            with text instead of a special token.
    """
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, **template_kwargs
    )
    before, _, after = whole.partition(_MARK)
    ids = tokenizer(after, add_special_tokens=False).input_ids
    if not after or _MARK in after or ids[0] not in tokenizer.all_special_ids:
        raise ValueError(
            "the chat template does not end a user's turn with a special token of its own: the "
            "verifier cannot be asked for one; name a dataset (prepare.dataset)"
        )
    return tokenizer(before, add_special_tokens=False).input_ids, ids[0]


def draws(
    number: int, end: int, *, temperature: float, max_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """Sampling parameters of every prompt; seeds differ, so that order is no input."""
    return [
        {
            "temperature": temperature,
            "max_tokens": max_tokens,
            "stop_token_ids": [end],
            "seed": own_seed(seed, each),
        }
        for each in range(number)
    ]


async def write_prompts(
    prefix: list[int],
    drawn: list[dict[str, Any]],
    verifier: dict[str, Any],
    cache: ResponseCache,
    start_servers: Callable[[], AbstractContextManager[list[Server]]],
    *,
    concurrency: int,
    timeout_s: float,
) -> list[Answer]:
    """A prompt for each draw, in their order; servers are started only when one is missing.

    Args:
        prefix: Token ids that every prompt follows.
        drawn: Of `draws`.
        verifier: identity.json.
        cache: Keeps every prompt as it comes.
        start_servers: Of the verifier.
        concurrency: Requests in flight at each.
        timeout_s: Of one request.
    """

    def key(sampling: dict[str, Any]) -> str:
        of = {name: verifier[name] for name in ("fingerprint", "dtype")}
        return digest({"prefix": prefix, "verifier": of, "sampling": sampling})

    async def ask(sampling: dict[str, Any], client: Client) -> None:
        found = await client.complete_timed(prefix, sampling)
        cache.add(key(sampling), Answer(prefix, found.token_ids, "", found.finish_reason))

    missing = [sampling for sampling in drawn if cache.get(key(sampling)) is None]
    if missing:
        with start_servers() as servers:
            await shared_out(missing, servers, ask, concurrency, timeout_s, progress="prompts")
    found = [cache.get(key(sampling)) for sampling in drawn]
    return [answer for answer in found if answer is not None]


def usable(answers: Iterable[Answer], tokenizer: Any) -> tuple[list[str], Counter[str]]:
    """The prompts worth asking, and how many are kept and left out, by reason."""
    counts: Counter[str] = Counter(kept=0, cut=0, too_short=0, repeated=0)
    kept: dict[str, None] = {}
    for answer in answers:
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True).strip()
        if answer.finish_reason != "stop":
            counts["cut"] += 1
        elif len(text.split()) < _FEWEST_WORDS:
            counts["too_short"] += 1
        elif text in kept:
            counts["repeated"] += 1
        else:
            kept[text] = None
    counts["kept"] = len(kept)
    return list(kept), counts


def main(arguments: list[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        prog="python -m specmill.own_prompts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("number", type=int, help="prompts to draw; a fifth or so is left out")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=200, help="of a prompt")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--out", type=Path, default=_OUT, help="default: data/prompts/own.jsonl")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every look at a server
    try:
        counts = asyncio.run(_write(chosen))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"own_prompts: {error}")
    logger.info("%s: %s", chosen.out, ", ".join(f"{n} {name}" for name, n in counts.items()))


async def _write(chosen: argparse.Namespace) -> Counter[str]:
    if min(chosen.number, chosen.max_tokens) < 1 or not 0 < chosen.temperature <= 2:
        raise ValueError("number and --max-tokens must be 1 or more, --temperature above 0 to 2")
    params = load_params(paths.PARAMS)
    runtime = params.runtime
    verifier, model = read_json(paths.IDENTITY), model_path(paths.VERIFIER)
    tokenizer = load_tokenizer(paths.VERIFIER)
    prefix, end = frame(tokenizer, params.prepare.chat_template_kwargs)
    drawn = draws(
        chosen.number,
        end,
        temperature=chosen.temperature,
        max_tokens=chosen.max_tokens,
        seed=chosen.seed,
    )
    log = paths.ROOT / "logs" / "own_prompts.log"
    start_servers = partial(answering_servers, model, verifier, params, log)
    answers = await write_prompts(
        prefix,
        drawn,
        verifier,
        ResponseCache(paths.CACHE / "own_prompts" / "prompts.jsonl"),
        start_servers,
        concurrency=runtime.request_concurrency,
        timeout_s=runtime.request_timeout_s,
    )
    prompts, counts = usable(answers, tokenizer)
    if not prompts:
        raise ValueError(f"none of {chosen.number} prompts can be used: {dict(counts)}")
    rows = [{"category": CATEGORY, "turns": [prompt]} for prompt in prompts]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(chosen.out, lines.encode())
    return counts


if __name__ == "__main__":
    main()
