import fcntl
import hashlib
import json
import os
import struct
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from specmill.shard_writing import write_shard
from specmill.shards import FP8, Piece, StateSpec, damaged_rows, read_shard
from specmill.states import check_states, quantise, restore, stage, wait_for
from tests.fakes import sample

SPEC = StateSpec("fingerprint", (2, 4), hidden_size=3, dtype="bfloat16")
KEPT_FP8 = replace(SPEC, dtype=FP8)


def states(num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[num_tokens, 2 layers, 3]: small whole numbers, which every dtype holds exactly."""
    return torch.arange(num_tokens * 6).reshape(num_tokens, 2, 3).to(dtype)


# fp8


def test_values_that_e4m3_has_are_exact_when_the_largest_is_448() -> None:
    # 448 = 1.75 x 2^8 is the largest; 208 = 1.625 x 2^7; 2^-6 the smallest normal, 2^-9 subnormal
    row = [448.0, -208.0, 1.0, -0.5, 0.0, 2.0**-6, 2.0**-9, -448.0]
    kept, scales = quantise(torch.tensor([[row]]))
    assert scales.tolist() == [[1.0]]
    assert kept.float().tolist() == [[row]]
    assert restore(kept, scales, torch.float32).tolist() == [[row]]


def test_values_between_two_of_e4m3_become_the_nearer_one_and_a_tie_the_even_one() -> None:
    # from 16 to 32 the step is 2, from 256 to 448 it is 32
    row = [448.0, 17.2, 18.9, 17.0, 19.0, -17.2, 300.0]
    kept, scales = quantise(torch.tensor([[row]]))
    expected = [448.0, 18.0, 18.0, 16.0, 20.0, -18.0, 288.0]
    assert restore(kept, scales, torch.float32).tolist() == [[expected]]


def test_the_scale_is_the_largest_of_a_layer_by_448_for_each_token_and_layer() -> None:
    given = torch.tensor([[[896.0, -2.0], [0.5, -44.8]], [[0.0, 0.0], [-3584.0, 7.0]]])
    kept, scales = quantise(given)
    assert kept.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float32
    # 896 / 448, 44.8 / 448; zeros, 3584 / 448
    assert torch.equal(scales, torch.tensor([[2.0, 44.8 / 448], [1.0, 8.0]]))
    # -2 / 2 = -1; 0.5 / 0.1 = 5; 7 / 8 = 0.875
    assert kept.float().tolist() == [[[448, -1], [5, -448]], [[0, 0], [-448, 0.875]]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_normal_values_come_back_within_a_sixteenth_and_small_ones_within_half_a_step(
    dtype: torch.dtype,
) -> None:
    given = torch.randn(50, 4, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    given[:, 1] *= 1000  # the residual stream grows from layer to layer
    kept, scales = quantise(given)
    error = (restore(kept, scales, torch.float32) - given.float()).abs()
    # 3 bits of mantissa: half a step is 2^-4 of a normal value (from 2^-6 on), 2^-10 below
    bound = torch.maximum(given.float().abs() / 16, scales.unsqueeze(-1) * 2.0**-10)
    assert bool((error <= bound * (1 + 1e-5)).all())
    # and the largest of each layer comes back as it was, up to float32's rounding
    largest = given.float().abs().amax(-1)
    assert torch.allclose(kept.float().abs().amax(-1), torch.tensor(448.0))
    assert torch.allclose(scales * 448, largest, rtol=1e-6)


@pytest.mark.parametrize("value", [1e-45, 1e-42, 1e-38, 1e30, 3e38])
def test_no_finite_value_becomes_nan(value: float) -> None:
    kept, scales = quantise(torch.tensor([[[value, -value, 0.0]]]))
    assert bool(torch.isfinite(kept.float()).all())
    assert bool(torch.isfinite(restore(kept, scales, torch.float32)).all())


def test_states_that_are_not_fp8_are_restored_as_they_are() -> None:
    assert torch.equal(restore(states(2), None, torch.bfloat16), states(2))
    assert restore(states(2), None, torch.float32).dtype == torch.float32
    kept, scales = quantise(states(2))
    assert restore(kept, scales, torch.bfloat16).dtype == torch.bfloat16


# refusals


def test_states_of_these_tokens_are_accepted_and_fp8_is_made_of_any_dtype() -> None:
    check_states(SPEC, torch.tensor([5, 6]), states(2))
    check_states(KEPT_FP8, torch.tensor([5, 6]), states(2))
    check_states(KEPT_FP8, torch.tensor([5, 6]), states(2, torch.float16))


@pytest.mark.parametrize("shape", [(1, 2, 3), (3, 2, 3), (2, 3, 3), (2, 2, 4), (2, 6)])
def test_states_of_another_shape_are_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"hidden states are \(.*\), expected \(2, 2, 3\)"):
        check_states(SPEC, torch.tensor([5, 6]), torch.zeros(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_states_of_another_dtype_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"are {dtype}, expected bfloat16"):
        check_states(SPEC, torch.tensor([5, 6]), states(2, dtype))


@pytest.mark.parametrize("spec", [SPEC, KEPT_FP8])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_states_that_are_not_finite_are_refused_and_nothing_is_staged(
    tmp_path: Path, spec: StateSpec, value: float
) -> None:
    bad = states(2)
    bad[1, 1, 2] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        stage(tmp_path / "request.safetensors", spec, torch.tensor([5, 6]), bad)
    assert os.listdir(tmp_path) == []


# staging


def test_a_staged_sample_is_a_shard_of_its_own_that_safetensors_reads_too(tmp_path: Path) -> None:
    path = tmp_path / "request.safetensors"
    row = stage(path, SPEC, torch.tensor([5, 6]), states(2))
    shard = read_shard(path, named=False)
    assert (shard.spec, shard.rows) == (SPEC, (row,))
    assert damaged_rows(shard, path) == []
    assert os.listdir(tmp_path) == [path.name]
    with safe_open(path, framework="pt") as handle:
        assert list(handle.keys()) == [f"ids/{row.sample_key}", f"states/{row.sample_key}"]
        assert torch.equal(
            handle.get_tensor(f"ids/{row.sample_key}"), torch.tensor([5, 6], dtype=torch.int32)
        )
        assert torch.equal(handle.get_tensor(f"states/{row.sample_key}"), states(2))


def test_the_bytes_of_a_staged_sample_are_ids_and_states_in_order(tmp_path: Path) -> None:
    path = tmp_path / "request.safetensors"
    row = stage(path, SPEC, torch.tensor([5, 6]), states(2))
    # bfloat16 is the upper half of float32
    halves = b"".join(struct.pack("<f", number)[2:] for number in range(12))
    content = struct.pack("<2i", 5, 6) + halves
    assert path.read_bytes().endswith(content)
    assert row.checksum == hashlib.sha256(content).hexdigest()
    assert row.num_tokens == 2


def test_the_bytes_of_a_staged_fp8_sample_are_scales_ids_and_states(tmp_path: Path) -> None:
    path = tmp_path / "request.safetensors"
    given = torch.tensor([[[448.0, 1.0, 0.0], [-896.0, 2.0, 448.0]]], dtype=torch.bfloat16)
    row = stage(path, KEPT_FP8, torch.tensor([5]), given)
    # e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa. 448 = 1.75 x 2^8: 0 1111 110,
    # 1 = 0 0111 000, 224 = 1.75 x 2^7: 0 1110 110
    content = struct.pack("<2f", 1.0, 2.0) + struct.pack("<i", 5)
    content += bytes([0x7E, 0x38, 0x00, 0xFE, 0x38, 0x76])
    assert path.read_bytes().endswith(content)
    assert row.checksum == hashlib.sha256(content).hexdigest()
    with safe_open(path, framework="pt") as handle:
        found = restore(
            handle.get_tensor(f"states/{row.sample_key}"),
            handle.get_tensor(f"scales/{row.sample_key}"),
            torch.bfloat16,
        )
    assert torch.equal(found, given)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_sample_key_is_that_of_the_same_ids_in_the_dataset(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    one = sample([151_643, 7], [8, 9])
    ids = torch.tensor(one.input_ids.tolist(), dtype=dtype)
    row = stage(tmp_path / "request.safetensors", SPEC, ids, states(4))
    assert row.sample_key == one.sample_key


def test_states_that_lie_apart_in_memory_are_staged_like_others(tmp_path: Path) -> None:
    apart = states(2).transpose(1, 2).contiguous().transpose(1, 2)
    assert not apart.is_contiguous()
    ids = torch.tensor([1, 5, 2, 6])[1::2]
    rows = [
        stage(tmp_path / "one.safetensors", SPEC, torch.tensor([5, 6]), states(2)),
        stage(tmp_path / "two.safetensors", SPEC, ids, apart),
    ]
    assert rows[0] == rows[1]


def test_a_shard_made_of_staged_files_holds_the_same_bytes(tmp_path: Path) -> None:
    pieces: list[Piece] = []
    for number in range(3):
        path = tmp_path / f"{number}.safetensors"
        stage(path, KEPT_FP8, torch.arange(number + 1), states(number + 1))
        pieces += read_shard(path, named=False).pieces(path)
    (tmp_path / "store").mkdir()
    shard = write_shard(tmp_path / "store", KEPT_FP8, pieces)
    assert [row.num_tokens for row in shard.rows] == [1, 2, 3]
    assert damaged_rows(shard, tmp_path / "store" / shard.name) == []


def test_the_spec_travels_as_json(tmp_path: Path) -> None:
    for spec in (SPEC, KEPT_FP8):
        fields = json.loads(json.dumps(vars(spec)))
        assert StateSpec.of(fields) == spec


def test_waiting_for_a_file_waits_for_the_lock_of_its_engine(tmp_path: Path) -> None:
    path = tmp_path / "request.safetensors"
    wait_for(path)  # no lock, nothing to wait for
    order = []
    with (tmp_path / "request.safetensors.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def wait() -> None:
            wait_for(path)
            order.append("waited")

        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.05)
        order.append("released")
    waiting.join()
    assert order == ["released", "waited"]
