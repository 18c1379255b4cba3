"""What a mixture of experts has to load for the tokens of one forward pass."""


def experts_loaded(num_experts: int, top_k: int, tokens: float) -> float:
    """Experts of a layer that at least one of `tokens` tokens is routed to, on average.

    Each token choosing its `top_k` of `num_experts` experts independently and uniformly,

        N(t) = E (1 - (1 - k / E)^t)

    (MoESD, arXiv 2505.19645). Tokens of real text choose alike, so that fewer are loaded.
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)
