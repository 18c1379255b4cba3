"""The profiles for real verifiers, each with the machine it is for and its verifier's config.json.

Memory is what nvidia-smi names; speeds of one GPU (memory, dense bf16 arithmetic) are round figures
of data sheets. Disks and their room are assumed, that of the RTX PRO 6000 so that the weights take
the half hour that they took there. Nothing here is measured.
"""

from dataclasses import dataclass

from specmill.machine_look import MachineNow
from specmill.probe import Speed
from tests.configs import QWEN3_8B, Config
from tests.patients import h200, rig
from tests.verifiers import KIMI

KIMI_K25: Config = KIMI | {
    "text_config": KIMI["text_config"]
    | {
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 262144,
    }
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Where a profile is meant to run."""

    machine: MachineNow
    config: Config
    speed: Speed
    """Of one GPU."""
    disk_bytes: int


TARGETS = {
    "kimi-k2.5-8x-rtx-pro-6000": Target(
        rig("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887, 8, "GPU0  X   NODE"),
        KIMI_K25,
        Speed(1.8e12, 500e12, 0.33e9, 3e9),
        15 * 10**12,
    ),
    "kimi-k2.5-b200": Target(
        rig("NVIDIA B200", 183_359, 8, "GPU0  X   NV18"),
        KIMI_K25,
        Speed(8.0e12, 2250e12, 10e9, 6e9),
        30 * 10**12,
    ),
    "qwen3-8b-1x-h200": Target(
        h200(gpu_bytes=((143_771 * 2**20, 143_171 * 2**20),)),
        QWEN3_8B | {"architectures": ["Qwen3ForCausalLM"]},
        Speed(4.8e12, 989e12, 5e9, 3e9),
        3 * 10**12,
    ),
}
"""By the profile's name."""
