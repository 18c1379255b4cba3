"""Which experts a mixture of experts routes the tokens of its own answers to: its engine tells.

The verifier's recorded answers are read again, each with its prompt in one prefill. A token is
routed by its hidden state, which is the same, rounding aside, whether it was prefilled, decoded or
verified, so nothing needs to be generated again.

On a GPU vLLM tells by itself: `enable_return_routed_experts`, which needs its V2 runner and prefix
caching, puts the ids into every output (its OpenAI server: `choices[i].routed_experts`, base64 of a
.npy). The V1 runner, the only one on a CPU, refuses the option; there specmill.routed_worker
listens to the same routers. Everything here depends on the engine's version
(specmill/tested.py).
"""

import base64
import io
from collections.abc import Callable
from itertools import zip_longest
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np

from specmill import compat
from specmill.engine_flags import parallel_settings
from specmill.engines import local_engine
from specmill.params import Runtime
from specmill.params_parallel import Parallel
from specmill.samples import Sample

NUM_ANSWERS = 32
_LEAST_TOKENS = 16
"""Of an answer: shorter ones would end the windows of their group early."""
_BUDGET = 4096  # tokens of one forward pass
_MOMENT_S = 1.0
_DIED = "the engine died while it was asked for its routing; its last lines above say why"


def pick_answers(samples: list[Sample], max_model_len: int) -> list[Sample]:
    """Up to NUM_ANSWERS answers that are long enough, one of each category in turn.

    Args:
        samples: Recorded answers.
        max_model_len: What an engine reads, in tokens, the one that it adds included.

    Raises:
        ValueError: when no answer is long enough.
    """
    decks: dict[str, list[Sample]] = {}
    for sample in samples:
        fits = len(sample.input_ids) < max_model_len
        if fits and len(sample.answer_token_ids) >= _LEAST_TOKENS:
            decks.setdefault(sample.category, []).append(sample)
    dealt = [
        sample
        for turn in zip_longest(*(decks[category] for category in sorted(decks)))
        for sample in turn
        if sample is not None
    ]
    if not dealt:
        raise ValueError(
            f"no bench answer has {_LEAST_TOKENS} tokens: routing cannot be measured on less; "
            "raise prepare.max_tokens"
        )
    return dealt[:NUM_ANSWERS]


def routed_experts(
    model: Path,
    verifier: dict[str, Any],
    samples: list[Sample],
    parallel: Parallel,
    runtime: Runtime,
) -> list[np.ndarray]:
    """Experts that an engine routes the tokens of recorded answers to.

    Returns:
        Of each sample, int [num_answer_tokens, num_routed_layers, top_k], ids from 0.

    Raises:
        RuntimeError: when the engine dies or does not tell of every token.
    """
    tells = compat.device() == "cuda"
    settings = {
        "dtype": verifier["dtype"],
        "max_model_len": verifier["max_model_len"],
        **compat.trusted_code(verifier),
        "max_num_batched_tokens": max(verifier["max_model_len"], _BUDGET),
        "enforce_eager": True,  # a compiled router cannot be listened to
        # a cached token is not routed again; the option remembers how it was
        "enable_prefix_caching": tells,
        **(
            {"enable_return_routed_experts": True}
            if tells
            else {"worker_extension_cls": "specmill.routed_worker.RoutedWorker"}
        ),
    }
    settings |= parallel_settings(model, verifier, parallel)
    with local_engine(model, settings, runtime) as engine:
        if not tells:
            engine.collective_rpc("listen_to_routers")
        told = _while_alive(engine, lambda: [_read(engine, sample, tells) for sample in samples])
    return [
        ids[sample.loss_mask == 1] for ids, sample in zip(routed_layers(told), samples, strict=True)
    ]


def _while_alive(engine: Any, drive: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
    """Drive an engine in a thread: vLLM leaves whoever waits for a core that was killed waiting.

    Raises:
        RuntimeError: when the engine dies.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    with ThreadPool(1) as pool:
        driving = pool.apply_async(drive)
        while not driving.ready():
            driving.wait(_MOMENT_S)
            if engine.engine_core.resources.engine_dead:
                raise RuntimeError(_DIED)
        try:
            return driving.get()
        except EngineDeadError:
            raise RuntimeError(_DIED) from None


def _read(engine: Any, sample: Sample, tells: bool) -> np.ndarray:
    """Ids of all tokens of a sample, [num_tokens, num_layers, top_k]."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    prompt = {"prompt_token_ids": sample.input_ids.tolist()}
    engine.add_request(sample.sample_key, prompt, params)
    ids = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ids = output.outputs[0].routed_experts
    if not tells:
        ids = decode(engine.collective_rpc("take_routed_experts")[0])
    if ids is None or len(ids) != len(sample.input_ids):
        raise RuntimeError(
            f"the engine told the experts of {0 if ids is None else len(ids)} of "
            f"{len(sample.input_ids)} tokens; tested versions: specmill/tested.py"
        )
    return np.asarray(ids)


def decode(text: str) -> np.ndarray:
    """Expert ids [num_tokens, num_layers, top_k] as vLLM's OpenAI server writes them.

    Of a completion there are all its tokens, prompt included, but for the last, which no forward
    pass has read (vllm entrypoints/openai/completion/protocol.py, `routed_experts`).
    """
    ids = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return np.asarray(ids)


def routed_layers(told: list[np.ndarray]) -> list[np.ndarray]:
    """Without the dense layers, whose ids vLLM leaves at 0: no router chooses 0 alone all along.

    Args:
        told: Of each sample, int [num_tokens, num_layers, top_k].
    """
    routed = np.any([ids.any(axis=(0, 2)) for ids in told], axis=0)  # [num_layers]
    return [ids[:, routed] for ids in told]
