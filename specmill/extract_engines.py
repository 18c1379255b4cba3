"""How engines stage hidden states, and servers of our own that share an extraction.

Eager mode: prefill gains nothing from compilation that would be worth its start. Prefix caching is
off because a cache hit leaves the hidden states of the hit out (vllm#44485); chunked prefill is off
for the same reason. Everything here depends on the engine's version (specmill/tested.py).

The servers, each on GPUs of its own, are what `runtime.extract_endpoints` names when somebody else
has started them: each takes samples from one queue, so a slow one gets fewer, and what one that
dies had under way goes to the others.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specmill.engine_flags import server_flags
from specmill.params import Runtime
from specmill.processes import check_gpus, visible_gpus
from specmill.server import starting
from specmill.shards import StateSpec

_BUDGET = 8192  # tokens a step; more gains nothing on a CPU or on an H200


def extraction_settings(spec: StateSpec, staging: Path, verifier: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments with which vLLM stages hidden states, under the names of its `LLM`."""
    max_model_len = verifier["max_model_len"]
    return {
        "dtype": verifier["dtype"],
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max(max_model_len, _BUDGET),
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": list(spec.layer_ids)},
            },
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "specmill.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": str(staging.absolute()),
                "states": asdict(spec),
                "num_writer_threads": 4,  # more of them hold up the engine's own Python
            },
        },
    }


@contextlib.contextmanager
def own_servers(
    model: Path, settings: dict[str, Any], runtime: Runtime, logs: Path
) -> Iterator[dict[str, str]]:
    """Start `runtime.extract_engines` servers, all at once.

    Args:
        model: The verifier's checkpoint.
        settings: Those of `extraction_settings`, and how each is spread over GPUs.
        runtime: Of params.yaml.
        logs: Folder that receives each server's output.

    Yields:
        Key of each server by its address.

    Raises:
        ValueError: when there are too few GPUs.
        EngineRefused, RuntimeError: when one does not start.
    """
    count = runtime.extract_engines
    each = settings.get("tensor_parallel_size", 1)
    check_gpus(count * each, "runtime.extract_engines (x parallel.tensor_parallel_size)")
    gpus = visible_gpus()
    with contextlib.ExitStack() as stack:
        waits = [
            stack.enter_context(
                starting(
                    model,
                    [*server_flags(settings), "--disable-uvicorn-access-log"],
                    logs / f"extract-{number}.log",
                    cpu_kv_cache_gib=runtime.cpu_kv_cache_gib,
                    gpu_memory_utilization=runtime.gpu_memory_utilization,
                    startup_timeout_s=runtime.startup_timeout_s,
                    label=f"extraction {number + 1} of {count}",
                    gpus=gpus[number * each : (number + 1) * each],
                )
            )
            for number in range(count)
        ]
        servers = [wait() for wait in waits]
        yield {server.url: server.api_key for server in servers}
