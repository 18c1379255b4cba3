"""Engines spread over several GPUs, as vLLM is told of it."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specmill.engine_flags import parallel_flags, parallel_settings
from specmill.params_parallel import Parallel

DENSE: dict[str, Any] = {"name": "dense"}
MOE: dict[str, Any] = {"name": "moe", "experts": {"num": 8}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of nine heads, some of it nested as in a model that sees too."""
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_attention_heads": 9}}))
    return tmp_path


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_one_gpu_is_no_flag_and_no_setting() -> None:
    assert parallel_flags(Path("nowhere"), DENSE, Parallel()) == []
    assert parallel_settings(Path("nowhere"), DENSE, Parallel()) == {}


def test_a_server_gets_flags_and_an_engine_of_this_process_no_copies(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, 6)
    chosen = Parallel(tensor_parallel_size=3, data_parallel_size=2, enable_expert_parallel=True)
    assert parallel_flags(model, MOE, chosen) == [
        *("--tensor-parallel-size", "3"),
        "--enable-expert-parallel",
        *("--data-parallel-size", "2"),
    ]
    expected = {"tensor_parallel_size": 3, "enable_expert_parallel": True}
    assert parallel_settings(model, MOE, chosen) == expected


def test_the_installed_vllm_knows_the_flags() -> None:
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    text = (Path(str(vllm.origin)).parent / "engine" / "arg_utils.py").read_text()
    for flag in Parallel.model_fields:
        assert f'"--{flag.replace("_", "-")}"' in text


@pytest.mark.parametrize(
    ("chosen", "verifier", "message"),
    [
        ({"tensor_parallel_size": 2}, DENSE, "does not divide .* 9 .* take one of 1, 3, 9"),
        ({"tensor_parallel_size": 9}, DENSE, "tensor_parallel_size asks for 9 GPUs, and 4 can"),
        (
            {"tensor_parallel_size": 3, "data_parallel_size": 2},
            DENSE,
            "x data_parallel_size asks for 6 GPUs, and 4 can be used here",
        ),
        ({"enable_expert_parallel": True}, DENSE, "dense has no experts; set it to false"),
    ],
)
def test_what_cannot_be_spread_is_refused_before_an_engine_starts(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    chosen: dict[str, Any],
    verifier: dict[str, Any],
    message: str,
) -> None:
    gpus(monkeypatch, 4)
    with pytest.raises(ValueError, match=message):
        parallel_flags(model, verifier, Parallel(**chosen))
