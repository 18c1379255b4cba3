"""Step times of a model and a machine that are only described: `predict --from-model`."""

import argparse
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from specmill.expected import Cell, Estimate
from specmill.files import read_object
from specmill.geometry import Geometry, eagle3_weights, read_geometry
from specmill.moe import MeasuredRouting, read_routing
from specmill.roofline import Link, Machine, Model, all_reduce_ms, step_bytes, step_ms
from specmill.weight_bits import bits_by_component

OPTIONS = (
    "bandwidth", "gpus", "peak", "overhead_ms", "link_bandwidth", "link_latency_us", "bits",
    "kv_bits", "kv_read_per_token", "routing", "context", "draft_ms",
)  # fmt: skip

_DRAFT_VOCAB = 32_000
"""Of the heads that the authors of EAGLE-3 published (arXiv 2503.01840)."""


def add_options(group: argparse._ArgumentGroup) -> None:
    """Add what a model and a machine are described by."""
    number: dict[str, Any] = {"type": float, "metavar": "X"}
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    add = group.add_argument
    add("--bandwidth", **number, help="memory bandwidth of all GPUs together, bytes/s (needed)")
    add("--gpus", **count, default=1, help="GPUs of one engine, tensor parallel (default 1)")
    add("--peak", **number, help="FLOP/s of all GPUs; without it arithmetic costs nothing")
    add("--overhead-ms", **number, default=0.0, help="fixed time of every step (default 0)")
    add("--link-bandwidth", **number, help="of one GPU, one direction, bytes/s")
    add("--link-latency-us", **number, help="of one small all-reduce; without both none is counted")
    add("--bits", **number, help="of a weight with scales, instead of what the config says")
    add("--kv-bits", **number, default=16.0, help="of a number in the KV cache (default 16)")
    add("--kv-read-per-token", action="store_true",
        help="attention reads the KV cache anew for each verified token")  # fmt: skip
    add("--routing", type=Path, metavar="FILE",
        help="measured overlap of experts: reports/routing.json")  # fmt: skip
    add("--context", **count, default=0, help="tokens in the KV cache of a request (default 0)")
    add("--draft-ms", **number, default=0.0, help="time of drafting one token (default 0)")


@dataclass(frozen=True)
class Served:
    """A model on a machine."""

    config: dict[str, Any]
    name: str
    machine: Machine
    model: Model
    routing: MeasuredRouting | None
    """What its tokens load of its experts; None takes the upper bound."""
    context: int
    """Tokens in the KV cache of every request."""
    draft_ms: float
    """Of one drafted token."""

    def cell(self, k: int, batch: int) -> Cell:
        """What steps take, prefill left out.

        Raises:
            NotMeasured: when routing was not measured for so many tokens.
        """
        none_ms = self._step_ms(0, batch)
        drafted_ms = self._step_ms(k, batch) + k * self.draft_ms
        # to bytes and operations a step that drafts nothing is one without speculation
        same = Estimate.exact(1.0)
        return Cell(none_ms, 0.0, 0.0, Estimate.exact(drafted_ms / none_ms), same)

    def _step_ms(self, k: int, batch: int) -> float:
        experts = self.routing.experts(batch, k + 1) if self.routing else None
        return step_ms(self.machine, self.model, batch, k, self.context, experts)

    def assumptions(self) -> list[str]:
        """What the figures stand on, a line each."""
        machine, model = self.machine, self.model
        parts = step_bytes(model, 1, 0, self.context, machine.num_gpus)
        moved = ", ".join(f"{name} {size / 1e9:.3g}" for name, size in parts.items() if size)
        head = eagle3_weights(self.config, _DRAFT_VOCAB) * 2  # bf16
        least = 1e3 * head / machine.bandwidth_bytes_per_s
        read = "anew for each verified token" if model.reads_kv_per_query else "once a step"
        peak = machine.peak_flop_per_s
        return [
            f"{self.name}: {model.geometry.weights_per_token / 1e9:.3g} B weights a token; a step "
            f"of one request reads GB: {moved}",
            f"memory {machine.bandwidth_bytes_per_s / 1e12:.3g} TB/s over {machine.num_gpus} "
            f"GPU(s), {machine.overhead_ms:g} ms more for every step",
            "arithmetic costs nothing (--peak)" if peak is None else f"at most {peak:.3g} FLOP/s",
            self._reduced(),
            self._experts(),
            f"{self.context} tokens of context, {model.kv_bits:g} bits a number, "
            f"{model.kv_token_bytes:,.0f} bytes a token, read {read}",
            f"drafting takes {self.draft_ms:g} ms a token (an EAGLE-3 head of this geometry with "
            f"{_DRAFT_VOCAB:,} draft tokens reads {head / 1e9:.2g} GB: {least:.2g} ms at least)",
            "prefill is left out: figures are of decoding",
        ]

    def _reduced(self) -> str:
        link = self.machine.link
        if link is None:
            return "all-reduces cost nothing (--link-bandwidth, --link-latency-us)"
        took = all_reduce_ms(self.model.geometry, link, self.machine.num_gpus, 1)
        share = took / self._step_ms(0, 1)
        return (
            f"all-reduces of {link.latency_us:g} us and {link.bandwidth_bytes_per_s / 1e9:g} GB/s: "
            f"{took:.2g} ms of a step of one request, {share:.0%} of it"
        )

    def _experts(self) -> str:
        routed = self.model.geometry.experts
        if routed is None:
            return "no experts: a step reads all weights"
        bound = (
            f"t tokens load {routed.num} * (1 - (1 - {routed.top_k} / {routed.num}) ** t) experts "
            f"of each of {routed.num_layers} layers"
        )
        if self.routing is None:
            return f"{bound}, which is an upper bound (--routing)"
        return f"{bound}, times the share that was measured"


def served(options: argparse.Namespace) -> Served:
    """The model and machine that the options describe.

    Raises:
        ValueError: naming the option or the key of config.json that is missing or wrong.
    """
    if options.bandwidth is None:
        raise ValueError("--from-model needs --bandwidth, of all GPUs together in bytes/s")
    if (options.link_bandwidth is None) != (options.link_latency_us is None):
        raise ValueError("--link-bandwidth and --link-latency-us belong together")
    _check(options)
    config = read_object(options.from_model)
    link = None
    if options.link_bandwidth is not None:
        link = Link(options.link_bandwidth, options.link_latency_us)
    geometry = read_geometry(config)
    bits = bits_by_component(config, options.bits)
    return Served(
        config=config,
        name=str(options.from_model),
        machine=Machine(options.bandwidth, options.gpus, options.peak, options.overhead_ms, link),
        model=Model(geometry, bits, options.kv_bits, options.kv_read_per_token),
        routing=_routing(options.routing, geometry) if options.routing else None,
        context=options.context,
        draft_ms=options.draft_ms,
    )


def _check(options: argparse.Namespace) -> None:
    for name in ("bandwidth", "gpus", "peak", "link_bandwidth", "bits", "kv_bits"):
        value = getattr(options, name)
        if value is not None and not 0 < value < inf:
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}; it must be above 0")
    for name in ("overhead_ms", "link_latency_us", "context", "draft_ms"):
        value = getattr(options, name)
        if value is not None and not 0 <= value < inf:
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}; it cannot be negative")


def _routing(path: Path, geometry: Geometry) -> MeasuredRouting:
    """Measured routing, which must be of a model with as many experts."""
    routing, routed = read_routing(read_object(path)), geometry.experts
    if routed is None or (routing.num_experts, routing.top_k) != (routed.num, routed.top_k):
        has = f"top {routed.top_k} of {routed.num}" if routed else "no experts"
        raise ValueError(
            f"{path} was measured on a model with top {routing.top_k} of {routing.num_experts} "
            f"experts, this one has {has}"
        )
    return routing
