import pytest

from specmill.geometry import read_geometry
from specmill.moe import experts_loaded
from specmill.roofline import (
    Link,
    Machine,
    Model,
    all_reduce_ms,
    hidden_share,
    hiding_speedup,
    step_bytes,
    step_flop,
    step_ms,
)
from specmill.weight_bits import bits_by_component
from tests.configs import KIMI_K25, LLAMA_8B, MIXTRAL, Config


def model(config: Config, kv_bits: float = 16.0, reads_kv_per_query: bool = False) -> Model:
    return Model(read_geometry(config), bits_by_component(config), kv_bits, reads_kv_per_query)


LLAMA, KIMI = model(LLAMA_8B), model(KIMI_K25)


def test_kimi_reads_what_was_worked_out_for_it_by_component() -> None:
    gigabytes = {name: size / 1e9 for name, size in step_bytes(KIMI, 1, 0, 0).items()}
    assert gigabytes["routed"] == pytest.approx(11.9, abs=0.05)
    assert gigabytes["shared"] == pytest.approx(5.3, abs=0.05)
    assert gigabytes["attention"] == pytest.approx(12.3, abs=0.05)
    assert gigabytes["dense"] == pytest.approx(0.8, abs=0.05)
    assert gigabytes["lm_head"] == pytest.approx(2.3, abs=0.05)
    # 60 layers of 7168 * 384 in bf16; left out where the others were worked out
    assert gigabytes["router"] == pytest.approx(0.3303, abs=1e-4)
    always = sum(gigabytes[name] for name in ("shared", "attention", "dense", "lm_head"))
    assert always == pytest.approx(20.8, abs=0.05)
    assert KIMI.expert_bytes / 60 == pytest.approx(24.8e6, abs=0.05e6)


@pytest.mark.parametrize(
    ("batch", "ratios"),
    [
        (1, {1: 1.36, 2: 1.71, 3: 2.05, 5: 2.71}),
        (8, {1: 1.68, 2: 2.26, 3: 2.75, 5: 3.51}),
        (16, {1: 1.63, 2: 2.09, 3: 2.41, 5: 2.80}),
        (32, {1: 1.47, 2: 1.72, 3: 1.84, 5: 1.93}),
        (64, {1: 1.25, 2: 1.31, 3: 1.33, 5: 1.33}),
        (128, {1: 1.07, 2: 1.07, 3: 1.07, 5: 1.07}),
    ],
)
def test_byte_ratios_of_kimi_are_those_of_the_table(batch: int, ratios: dict[int, float]) -> None:
    def moved(k: int) -> float:
        parts = step_bytes(KIMI, batch, k, 0)
        return sum(parts.values()) - parts["router"]  # which the table leaves out

    assert {k: round(moved(k) / moved(0), 2) for k in ratios} == ratios


def test_the_kv_cache_of_kimi_takes_what_is_published() -> None:
    assert KIMI.kv_token_bytes == 70_272  # 61 layers of 576 numbers in bf16
    assert model(KIMI_K25, kv_bits=8).kv_token_bytes == 35_136


def test_a_dense_step_reads_the_same_weights_whatever_it_verifies() -> None:
    # 7,504,658,432 weights in bf16
    assert sum(step_bytes(LLAMA, 32, 7, 0).values()) == 2 * 7_504_658_432


def test_the_kv_cache_is_read_once_a_step_for_every_request() -> None:
    assert step_bytes(LLAMA, 4, 3, 1000)["kv"] == 4 * 1000 * 131_072
    anew = model(LLAMA_8B, reads_kv_per_query=True)
    assert step_bytes(anew, 4, 3, 1000)["kv"] == 4 * (4 * 1000 * 131_072)


def test_a_latent_cache_is_read_by_every_gpu_and_kv_heads_by_as_many_as_share_one() -> None:
    assert step_bytes(KIMI, 1, 0, 1000, num_gpus=8)["kv"] == 8 * 1000 * 70_272
    assert step_bytes(LLAMA, 1, 0, 1000, num_gpus=8)["kv"] == 1000 * 131_072  # eight KV heads
    assert step_bytes(LLAMA, 1, 0, 1000, num_gpus=16)["kv"] == 2 * 1000 * 131_072


def test_measured_experts_take_the_place_of_the_bound() -> None:
    mixtral = model(MIXTRAL)
    bound = step_bytes(mixtral, 1, 3, 0)["routed"]
    assert bound == pytest.approx(experts_loaded(8, 2, 4) * mixtral.expert_bytes)
    assert step_bytes(mixtral, 1, 3, 0, experts=4.0)["routed"] == 4.0 * mixtral.expert_bytes
    assert mixtral.expert_bytes == 32 * 176_160_768 * 2


def test_a_token_takes_two_operations_a_weight_and_those_of_attention() -> None:
    # 32 layers, 16,384 operations for each token of context
    expected = 4 * 3 * (2 * 7_504_658_432 + 32 * 16_384 * 1000)
    assert step_flop(LLAMA.geometry, 4, 2, 1000) == expected


def test_a_step_takes_its_bytes_or_its_arithmetic_whichever_is_longer() -> None:
    machine = Machine(15.009316864e12, peak_flop_per_s=15.009316864e12, overhead_ms=2.0)
    assert step_ms(machine, LLAMA, 1, 0) == pytest.approx(2 + 1.0)  # both take a millisecond
    assert step_ms(machine, LLAMA, 1, 3) == pytest.approx(2 + 4.0)  # arithmetic takes four
    memory = Machine(15.009316864e12, overhead_ms=2.0)
    assert step_ms(memory, LLAMA, 1, 3) == pytest.approx(2 + 1.0)


def test_all_reduces_are_two_a_layer_of_a_latency_and_a_ring() -> None:
    link = Link(bandwidth_bytes_per_s=64e9, latency_us=10.0)
    # 8192 bytes a token, 2 * 7 / 8 of them over each link: 0.224 us
    assert all_reduce_ms(LLAMA.geometry, link, 8, 1) == pytest.approx(64 * 10.224e-3)
    assert all_reduce_ms(LLAMA.geometry, link, 8, 100) == pytest.approx(64 * 32.4e-3)
    machine = Machine(15.009316864e12, num_gpus=8, link=link)
    assert step_ms(machine, LLAMA, 1, 0) == pytest.approx(1 + 64 * 10.224e-3)


def test_speculation_hides_latency_by_the_tokens_of_a_step_and_bytes_not_at_all() -> None:
    assert hidden_share(growth=1.0, tokens_per_step=2.0) == 0.5
    assert hidden_share(growth=4.0, tokens_per_step=2.0) == -1.0  # four times the bytes
    assert hiding_speedup(share=0.5, hidden=0.5) == pytest.approx(4 / 3)
