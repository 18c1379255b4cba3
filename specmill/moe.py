"""How many experts of a layer are loaded when several tokens pass at once.

A step reads an expert's weights once however many of its tokens are sent there, so what counts is
the number of different experts. With E experts, k of them a token and t tokens that are routed
independently and uniformly (MoESD, arXiv 2505.19645),

    N(t) = E * (1 - (1 - k / E) ** t)

Routing of real text is skewed, and tokens that follow each other go to the same experts more often
than that: N is an upper bound of the mean. How far below it a model stays can only be measured
(reports/routing.json).
"""

import math
from dataclasses import dataclass
from typing import Any

from specmill.between import neighbours


def experts_loaded(num_experts: int, top_k: int, tokens: float) -> float:
    """Mean number of different experts that `tokens` tokens load in one layer, at most.

    Args:
        num_experts: Experts of the layer, E.
        top_k: Experts of one token, k.
        tokens: Tokens in one step over all its requests, t.

    Returns:
        N(t), from k at one token to E.

    Raises:
        ValueError: when k is not 1 ... E or t is negative.
    """
    if not 1 <= top_k <= num_experts or tokens < 0:
        raise ValueError(f"top {top_k} of {num_experts} experts for {tokens} tokens is no routing")
    return num_experts * (1 - math.pow(1 - top_k / num_experts, tokens))


@dataclass(frozen=True)
class MeasuredRouting:
    """How many experts a verifier's own answers load, as a share of the upper bound."""

    num_experts: int
    top_k: int
    shares: dict[int, dict[int, float]]
    """By requests in a step, then tokens of each."""

    def experts(self, batch: int, tokens: int) -> float:
        """Mean number of different experts that a step loads in one layer.

        The measured share of N is linear between measured points, over tokens and then requests.

        Args:
            batch: Requests in the step.
            tokens: Of each request: K + 1.

        Raises:
            NotMeasured: when that lies outside what was measured.
        """
        share = 0.0
        for number, weight in neighbours(sorted(self.shares), batch, "requests in a step").items():
            at = self.shares[number]
            parts = neighbours(sorted(at), tokens, "tokens of a request in a step")
            share += weight * sum(at[count] * part for count, part in parts.items())
        return share * experts_loaded(self.num_experts, self.top_k, batch * tokens)


def read_routing(routing: dict[str, Any]) -> MeasuredRouting:
    """What the stage `routing` measured.

    Args:
        routing: Content of reports/routing.json.

    Raises:
        ValueError: when it is of a dense verifier, or no such file.
    """
    if not routing.get("windows"):
        raise ValueError("this routing.json is of a verifier without experts: nothing was measured")
    shares: dict[int, dict[int, float]] = {}
    try:
        for row in routing["windows"]:
            shares.setdefault(row["batch"], {})[row["t"]] = float(row["ratio"])
        return MeasuredRouting(routing["num_experts"], routing["top_k"], shares)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"this is no routing.json of the stage routing ({error!r})") from None
