"""How many experts a model's config names, whatever it calls them."""

from typing import Any


def experts_of(text: Any) -> dict[str, int] | None:
    """`num_experts` of a layer and `top_k` routed to, of a text config; None when it has neither.

    Models name them differently (vllm transformers_utils/model_arch_config_convertor.py).
    """

    def number(*names: str) -> int:
        values = (getattr(text, name, None) for name in names)
        return next((value for value in values if isinstance(value, int)), 0)

    num_experts = number("num_experts", "num_local_experts", "n_routed_experts")
    top_k = number("num_experts_per_tok", "top_k_experts", "moe_topk")
    return {"num_experts": num_experts, "top_k": top_k} if num_experts > 1 and top_k else None
