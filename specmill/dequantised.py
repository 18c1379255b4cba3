"""The verifier inside an installed package: a GGUF file, turned into safetensors."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch

from specmill.files import file_digest

logger = logging.getLogger(__name__)

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def gguf_file(package: str) -> Path:
    """The GGUF file inside an installed package; raises ValueError when there is not just one."""
    module = importlib.util.find_spec(package.replace("-", "_"))
    places = list(module.submodule_search_locations or []) if module else []
    files = [path for place in places for path in sorted(Path(place).glob("*.gguf"))]
    if len(files) != 1:
        raise ValueError(
            f"verifier.source is wheel:{package}, and {len(files)} GGUF files were found in it; "
            "is the package installed from the lock file (make venv)?"
        )
    return files[0]


def dequantise_wheel(package: str, dtype: str, folder: Path) -> dict[str, Any]:
    """Turn the GGUF file inside an installed package into safetensors with its tokenizer.

    The result is *not* the model the file was quantised from, so its name says what was done.

    Args:
        package: As pip knows it.
        dtype: Of the weights, as torch names it.
        folder: Receives the checkpoint.

    Returns:
        `name` and `origin` (specmill.verifier: obtain).

    Raises:
        ValueError: when the package does not hold just one GGUF file.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_file(package)
    logger.info("dequantising %s to %s", source.name, dtype)
    place, file = source.parent, source.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        place,
        gguf_file=file,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
        trust_remote_code=False,
    )
    model.config._name_or_path = ""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {
        "name": f"{source.stem}-dequantised-{_SHORT[dtype]}",
        "origin": f"GGUF of package {package}, sha256 {file_digest(source)}",
    }
