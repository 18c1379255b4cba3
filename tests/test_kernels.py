"""What a GPU did in a trace, by hand: two steps, a copy and an all-reduce that overlap."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import kind_of, per_step, read_rank, read_trace


def kernel(name: str, start: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": dur}


def step(start: float) -> dict[str, Any]:
    return kernel("execute_context_0(0)_generation_1(1)", start, 900, "user_annotation")


def trace(second_reduce: float = 400.0) -> list[dict[str, Any]]:
    """Microseconds: 1000-1500 product, 1400-1600 copy, 2000-2300 reduce, 3000+ the second one."""
    return [
        {"ph": "M", "name": "process_name", "pid": 1},
        step(900),
        kernel("nvjet_tst_64x8", 1000, 500),
        kernel("Memcpy DtoD", 1400, 200, "gpu_memcpy"),
        step(1900),
        kernel("aten::mm", 1950, 90, "cpu_op"),
        kernel("void vllm::cross_device_reduce_1stage<bf16, 2>", 2000, 300),
        kernel("void vllm::cross_device_reduce_1stage<bf16, 2>", 3000, second_reduce),
    ]


def test_a_step_of_one_gpu_is_what_its_kernels_took_by_kind() -> None:
    """1000 to 3400 us are 2.4 ms of two steps; busy 0.6 + 0.3 + 0.4, for the copy overlaps."""
    found = per_step([read_rank(trace())])
    assert found["steps"] == 2
    assert found["step"] == pytest.approx(1.2)
    assert found["busy"] == pytest.approx(0.65)
    assert found["by_kind"] == pytest.approx(
        {"all-reduce": 0.35, "copies": 0.1, "matrix products": 0.25}
    )
    assert found["all_reduces"] == 1
    assert found["kernels"][0]["ms"] == pytest.approx(0.35)


def test_the_least_all_reduce_is_that_of_the_rank_that_waited_least() -> None:
    """0.3 and min(0.4, 0.1) ms in two steps; the mean of both ranks has the waiting in it."""
    found = per_step([read_rank(trace()), read_rank(trace(second_reduce=100))])
    assert found["all_reduce_least"] == pytest.approx(0.2)
    assert found["by_kind"]["all-reduce"] == pytest.approx((0.35 + 0.2) / 2)


def test_ranks_that_saw_different_all_reduces_have_no_least_one() -> None:
    assert per_step([read_rank(trace()), read_rank(trace()[:-1])])["all_reduce_least"] is None


@pytest.mark.parametrize("events", [trace()[:2], trace()[2:4]])
def test_a_trace_without_kernels_or_steps_is_refused(events: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="on a GPU"):
        read_rank(events)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void flash::flash_fwd_splitkv_kernel<...>", "attention"),
        ("reshape_and_cache_flash_kernel", "attention"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "all-reduce"),
        ("ncclDevKernel_AllGather_RING_LL", "other between GPUs"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "matrix products"),
        ("triton_red_fused_add_rms_norm_2", "norms, activations, rope"),
        ("void at::native::reduce_kernel<ArgMaxOps>", "choosing tokens"),
        ("Memset (Device)", "copies"),
        ("void at::native::elementwise_kernel", "other"),
    ],
)
def test_a_kernel_is_of_the_kind_that_its_name_says(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_trace_is_read_gzipped_or_plain(tmp_path: Path) -> None:
    plain, zipped = tmp_path / "a.json", tmp_path / "a.json.gz"
    text = json.dumps({"traceEvents": trace()})
    plain.write_text(text)
    zipped.write_bytes(gzip.compress(text.encode()))
    assert read_trace(plain) == read_trace(zipped) == trace()
