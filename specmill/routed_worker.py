"""Worker extension of vLLM that says which experts an engine on a CPU routed its tokens to.

Loaded by vLLM inside its worker through `worker_extension_cls`. vLLM's own way to tell, the option
`enable_return_routed_experts`, is for its V2 runner (config/vllm.py, 0.32), and a CPU build without
Triton has V1 alone. What the option binds to the routers, V1 has too: here it is bound to lists. It
sees uncompiled routers only.
"""

import base64
import io
from typing import Any

import numpy as np
import torch


class Listener:
    """Stands for vLLM's RoutedExpertsCapturer, as far as routers know it."""

    def __init__(self) -> None:
        self.heard: dict[int, list[torch.Tensor]] = {}
        """Expert ids [num_tokens, top_k] of every forward pass, by layer."""

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Keep what a layer's router chose in one forward pass."""
        self.heard.setdefault(layer_id, []).append(topk_ids.clone())

    def take(self) -> np.ndarray:
        """Ids since the last call, uint16 [num_tokens, num_layers, top_k], layers in their order.

        Layers without a router are not there.
        """
        layers = [torch.cat(self.heard[number]) for number in sorted(self.heard)]
        self.heard.clear()
        taken: np.ndarray = torch.stack(layers, dim=1).numpy().astype(np.uint16)
        return taken


class RoutedWorker:
    """What vLLM adds to its worker; both methods are called through `collective_rpc`."""

    model_runner: Any
    """Of the worker."""

    def listen_to_routers(self) -> None:
        """Begin to keep what routers choose.

        Raises:
            ValueError: when the model has no router that can be listened to.
        """
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            bind_routed_experts_capturer,
        )

        self.listener = Listener()
        bind_routed_experts_capturer(self.model_runner.get_model(), self.listener)

    def take_routed_experts(self) -> str:
        """What was chosen since the last call, as vLLM's OpenAI server writes it (base64, .npy)."""
        with io.BytesIO() as buffer:
            np.save(buffer, self.listener.take(), allow_pickle=False)
            return base64.b64encode(buffer.getvalue()).decode("ascii")
