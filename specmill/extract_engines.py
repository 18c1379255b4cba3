"""How engines stage hidden states.

Eager mode: prefill gains nothing from compilation that would be worth its start. Prefix caching is
off because a cache hit leaves the hidden states of the hit out (vllm#44485); chunked prefill is off
for the same reason. Everything here depends on the engine's version (specmill/tested.py).
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from specmill.compat import trusted_code
from specmill.shards import StateSpec

_BUDGET = 8192  # tokens a step; more gains nothing on a CPU or on an H200


def extraction_settings(spec: StateSpec, staging: Path, verifier: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments with which vLLM stages hidden states, under the names of its `LLM`."""
    max_model_len = verifier["max_model_len"]
    return {
        "dtype": verifier["dtype"],
        **trusted_code(verifier),
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
