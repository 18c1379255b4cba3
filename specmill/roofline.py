"""How long a step takes, from the bytes it moves: a lower bound for a machine one does not have.

A step verifies t = B * (K + 1) tokens of B requests (K = 0 is decoding without speculation):

    step = overhead + max(bytes / memory bandwidth, FLOP / peak) + all-reduces

    bytes       every weight outside the experts once, the experts N(t) loaded in each MoE layer
                (specmill.moe), the KV cache of every request
    FLOP        2 for each weight that a token is multiplied with, and attention's
    all-reduces two a layer (Megatron-LM, arXiv 1909.08053, section 3), each latency + what a ring
                moves over one GPU's link: 2 * (n - 1) / n of t * hidden_size * 2 bytes
                (nccl-tests, doc/PERFORMANCE.md)

Time is memory's or arithmetic's, whichever is longer, as if they overlapped perfectly (Williams et
al., "Roofline", CACM 52, 2009); all-reduces overlap with neither. Drafting is no part of it.
"""

from dataclasses import dataclass

from specmill.geometry import Geometry
from specmill.moe import experts_loaded

_ACTIVATION_BYTES = 2
"""Of one number that is reduced between GPUs: activations are bf16 whatever the weights are."""


@dataclass(frozen=True)
class Link:
    """What joins the GPUs of an engine."""

    bandwidth_bytes_per_s: float
    """Of one GPU, in one direction."""
    latency_us: float
    """Of one all-reduce that moves next to nothing."""


@dataclass(frozen=True)
class Machine:
    """Where an engine runs."""

    bandwidth_bytes_per_s: float
    """Memory bandwidth of all GPUs together."""
    num_gpus: int = 1
    peak_flop_per_s: float | None = None
    """Of all GPUs together; None leaves arithmetic out."""
    overhead_ms: float = 0.0
    """What a step takes whatever it does."""
    link: Link | None = None
    """None leaves all-reduces out."""


@dataclass(frozen=True)
class Model:
    """What is served."""

    geometry: Geometry
    bits: dict[str, float]
    """Of one weight, by component (specmill.weight_bits)."""
    kv_bits: float = 16.0
    """Of one number in the KV cache."""
    reads_kv_per_query: bool = False
    """Whether the KV cache is read anew for each of the K + 1 tokens of a request, as by an
    attention kernel that takes them for requests of their own (vLLM 0.32: TRITON_MLA, forward_mqa)
    instead of once for all of them."""

    @property
    def expert_bytes(self) -> float:
        """Of one routed expert in all the layers that have it; 0 of a dense model."""
        routed = self.geometry.experts
        each = routed.num_layers * routed.weights_each if routed else 0
        return each * self.bits["routed"] / 8

    @property
    def kv_token_bytes(self) -> float:
        """KV cache of one token, over all layers."""
        return self.geometry.num_layers * self.geometry.kv_values * self.kv_bits / 8


def step_bytes(
    model: Model,
    batch: int,
    k: int,
    context: int,
    num_gpus: int = 1,
    experts: float | None = None,
) -> dict[str, float]:
    """Bytes that one step reads, by component, over all GPUs together.

    A KV cache with fewer heads than there are GPUs is kept, and read, by several of them.

    Args:
        model: What is served.
        batch: Requests in flight, B.
        k: num_speculative_tokens, K; 0 without speculation.
        context: Tokens that each request has in the KV cache.
        num_gpus: Of one engine, tensor parallel.
        experts: Different experts loaded in a layer, if measured; None takes the upper bound.

    Returns:
        The components of `specmill.geometry`, and `kv`.
    """
    geometry = model.geometry
    found = {name: count * model.bits[name] / 8 for name, count in geometry.weights.items()}
    if geometry.experts:
        routed = geometry.experts
        if experts is None:
            experts = experts_loaded(routed.num, routed.top_k, batch * (k + 1))
        found["routed"] = experts * model.expert_bytes
    readers = max(1.0, num_gpus / geometry.kv_heads)
    queries = k + 1 if model.reads_kv_per_query else 1
    kept = geometry.context_layers(context) * geometry.kv_values * model.kv_bits / 8
    return found | {"kv": batch * queries * readers * kept}


def step_flop(geometry: Geometry, batch: int, k: int, context: int) -> float:
    """Floating-point operations of one step; arguments as of `step_bytes`."""
    attention = geometry.attention_flop * geometry.context_layers(context)
    return float(batch * (k + 1) * (2 * geometry.weights_per_token + attention))


def all_reduce_ms(geometry: Geometry, link: Link, num_gpus: int, tokens: int) -> float:
    """Milliseconds that the all-reduces of one step take, two in every layer.

    Args:
        geometry: Of the model.
        link: Between the GPUs.
        num_gpus: That hold a part of every layer.
        tokens: Verified in the step, over all requests.
    """
    moved = tokens * geometry.hidden_size * _ACTIVATION_BYTES * 2 * (num_gpus - 1) / num_gpus
    each_s = link.latency_us / 1e6 + moved / link.bandwidth_bytes_per_s
    return 2 * geometry.num_layers * each_s * 1e3


def step_ms(
    machine: Machine,
    model: Model,
    batch: int,
    k: int,
    context: int = 0,
    experts: float | None = None,
) -> float:
    """Milliseconds of one step; arguments as of `step_bytes`."""
    moved = sum(step_bytes(model, batch, k, context, machine.num_gpus, experts).values())
    busy_s = moved / machine.bandwidth_bytes_per_s
    if machine.peak_flop_per_s is not None:
        flop = step_flop(model.geometry, batch, k, context)
        busy_s = max(busy_s, flop / machine.peak_flop_per_s)
    reduced_ms = 0.0
    if machine.link is not None:
        tokens = batch * (k + 1)
        reduced_ms = all_reduce_ms(model.geometry, machine.link, machine.num_gpus, tokens)
    return machine.overhead_ms + 1e3 * busy_s + reduced_ms


def hidden_share(growth: float, tokens_per_step: float) -> float:
    """Share of the time for all-reduces, per output token, that speculation saves.

    A step with drafts spends `growth` times as long in them and gives `tokens_per_step` tokens. Few
    tokens move so little that latency is all, so that growth is next to 1 and the share
    1 - 1 / tokens_per_step, whatever K is. Negative when there is more of it per token.

    Args:
        growth: All-reduce time of a step that verifies over that of a step that does not.
        tokens_per_step: Emitted with speculation.
    """
    return 1 - growth / tokens_per_step


def hiding_speedup(share: float, hidden: float) -> float:
    """Speed-up from that alone, when the rest takes as long per token as before (Amdahl's law).

    Args:
        share: Of a step's time without speculation that all-reduces take.
        hidden: Of `hidden_share`.
    """
    return 1 / (1 - share * hidden)
