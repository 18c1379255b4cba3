"""Constructed machines and verifiers for the doctor's tests."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from specmill.doctor import Seen
from specmill.doctor_verifier import Card
from specmill.machine_look import MachineNow
from specmill.params import Params
from specmill.params_file import load_params
from specmill.probe import Speed

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30

SMOLLM: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""SmolLM2-135M, the demo's verifier."""

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

ENGINE: dict[str, Any] = {
    "import_s": 10.0,
    "drift": [],
    "serves": True,
    "hands_states_out": True,
    "quantisations": ["fp8", "gptq"],
}
SPEED = Speed(20e9, 100e9, 500e6, 200e6)

VERSIONS = {
    "vllm": "0.32.0",
    "speculators": "0.9.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.19.0",
    "python": "3.11.7",
}


def tokenizer(template: str | None = CHATML) -> Any:
    """Words are tokens."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"?": 0}, unk_token="?")), chat_template=template
    )
    made.backend_tokenizer.pre_tokenizer = Whitespace()
    return made


def machine(**changes: Any) -> MachineNow:
    """Two healthy cores, with some facts changed; `versions` changes single ones."""
    versions = VERSIONS | changes.pop("versions", {})
    values: dict[str, Any] = {
        "hardware": {
            "cpu_model": "X", "cpu_features": ["avx2"], "num_usable_cores": 2, "memory_gib": 24,
            "gpus": changes.pop("gpus", []), "versions": versions, "machine": "0",
        },
        "device": "cpu",
        "native_dtype": "bfloat16",
        "torch_cuda": None,
        "driver_cuda": None,
        "gpu_bytes": (),
        "links": "",
        "available_bytes": 20 * GIB,
        "shm_bytes": GIB,
        "open_files": 100_000,
        "compiler": "/usr/bin/g++",
    }  # fmt: skip
    return MachineNow(**values | changes)


def h200(**changes: Any) -> MachineNow:
    """One H200 with the versions that were tested on it."""
    gpu = {"name": "NVIDIA H200", "memory": "143771 MiB", "driver": "580.159.04"}
    versions = {"vllm": "0.26.0", "torch": "2.11.0", "transformers": "5.17.0", "python": "3.12.3"}
    values: dict[str, Any] = {
        "gpus": [gpu],
        "versions": versions | changes.pop("versions", {}),
        "device": "cuda",
        "torch_cuda": "13.0",
        "driver_cuda": "13.0",
        "gpu_bytes": ((140 * GIB, 139 * GIB),),
    }
    return machine(**values | changes)


def rig(name: str, memory_mib: int, number: int, links: str) -> MachineNow:
    """A node of equal GPUs, almost all of whose memory is free."""
    gpu = {"name": name, "memory": f"{memory_mib} MiB", "driver": "580.159.04"}
    free = (memory_mib - 600) * 2**20
    return h200(gpus=[gpu] * number, gpu_bytes=((memory_mib * 2**20, free),) * number, links=links)


def card(config: dict[str, Any] = SMOLLM, template: str | None = CHATML) -> Card:
    """A verifier that is only described."""
    return Card("folder:x", config, tokenizer(template), Path("x"))


def seen(**changes: Any) -> Seen:
    """A healthy machine with the demo's verifier, with some facts changed."""
    values: dict[str, Any] = {
        "machine": machine(),
        "card": card(),
        "engine": ENGINE,
        "speed": SPEED,
        "is_linked": False,
    }
    return Seen(**values | changes)


def params(**changes: dict[str, Any]) -> Params:
    """params.yaml with some keys of its sections changed."""
    values = load_params(ROOT / "params.yaml").model_dump()
    for section, keys in changes.items():
        values[section] |= keys
    return Params.model_validate(values)
