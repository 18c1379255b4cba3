"""Engines over several GPUs, in the words of vLLM: the same in 0.26 and 0.32."""

import json
from pathlib import Path
from typing import Any

from specmill.files import read_object
from specmill.params_parallel import Parallel
from specmill.processes import check_gpus
from specmill.text_decoder import text_config


def server_flags(settings: dict[str, Any]) -> list[str]:
    """Arguments of vLLM's `LLM` as flags of its server."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def parallel_flags(model: Path, verifier: dict[str, Any], chosen: Parallel) -> list[str]:
    """Flags of a server that is spread over GPUs; none where it has one.

    Args:
        model: The verifier's checkpoint.
        verifier: Its identity.json.
        chosen: Section `parallel`.

    Raises:
        ValueError: when the verifier cannot be spread like that, or there are too few GPUs.
    """
    settings = parallel_settings(model, verifier, chosen)
    if chosen.data_parallel_size > 1:
        settings["data_parallel_size"] = chosen.data_parallel_size
        check_gpus(
            chosen.tensor_parallel_size * chosen.data_parallel_size,
            "parallel.tensor_parallel_size x data_parallel_size",
        )
    return server_flags(settings)


def parallel_settings(model: Path, verifier: dict[str, Any], chosen: Parallel) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`, which refuses data parallelism, for one copy of the engine.

    Raises:
        ValueError: as `parallel_flags`.
    """
    settings: dict[str, Any] = {}
    if chosen.tensor_parallel_size > 1:
        _check_heads(model, chosen.tensor_parallel_size)
        check_gpus(chosen.tensor_parallel_size, "parallel.tensor_parallel_size")
        settings["tensor_parallel_size"] = chosen.tensor_parallel_size
    if chosen.enable_expert_parallel:
        if "experts" not in verifier:
            raise ValueError(
                f"parallel.enable_expert_parallel is on, but {verifier['name']} has no experts; "
                "set it to false"
            )
        settings["enable_expert_parallel"] = True
    return settings


def _check_heads(model: Path, size: int) -> None:
    config = read_object(model / "config.json")
    heads = text_config(config).get("num_attention_heads")
    if heads is not None and heads % size:
        fitting = [number for number in range(1, heads + 1) if heads % number == 0]
        raise ValueError(
            f"parallel.tensor_parallel_size is {size}, which does not divide the verifier's "
            f"{heads} attention heads; take one of {', '.join(map(str, fitting))}"
        )
