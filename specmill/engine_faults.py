"""Known faults of engine versions, for the report; compat.py is what training depends on."""

from typing import Any


def known_sampling_fault(hardware: dict[str, Any]) -> str | None:
    """What is known to be wrong with sampling under speculation in this engine, a clause.

    Args:
        hardware: reports/hardware.json.
    """
    if not hardware["gpus"] and hardware["versions"]["vllm"].startswith("0.32."):
        return (
            "a CPU engine of vLLM 0.32 divides the logits of sampled requests by memory that "
            "nothing was written to (vllm#55005); greedy requests do not come there"
        )
    return None
