from typing import Any

import numpy as np
import pytest

from specmill.between import NotMeasured, neighbours
from specmill.moe import experts_loaded, read_routing


def test_experts_loaded_is_the_published_formula() -> None:
    # of Kimi-K2.5, 384 experts and 8 a token: by hand 384 * (1 - (47 / 48) ** t)
    table = {1: 8.0, 2: 15.8, 3: 23.5, 4: 31.0, 5: 38.4, 6: 45.6, 8: 59.5, 16: 109.8, 32: 188.2,
             64: 284.2, 128: 358.1, 256: 382.2}  # fmt: skip
    assert {t: round(experts_loaded(384, 8, t), 1) for t in table} == table
    assert round(experts_loaded(512, 10, 4), 1) == 38.8


def test_experts_loaded_is_the_mean_of_tokens_that_choose_at_random() -> None:
    generator = np.random.default_rng(17)
    chosen = [len(np.unique(np.concatenate([generator.permutation(16)[:3] for _ in range(5)])))
              for _ in range(4000)]  # fmt: skip
    # the mean of 4000 draws has a standard error of about 0.02
    assert abs(float(np.mean(chosen)) - experts_loaded(16, 3, 5)) < 0.1


def test_uniform_routing_of_dummy_weights_on_a_gpu_is_at_the_bound() -> None:
    # 30B-A3B with random weights on an H200: experts of 128 that vLLM loaded, by tokens per step
    measured = {1: 8, 2: 15.47, 3: 22.53, 4: 29.16, 6: 41.34, 8: 51.97,
                16: 82.38, 24: 100.56, 32: 111.53, 48: 122.03, 64: 125.56}  # fmt: skip
    for tokens, experts in measured.items():
        assert experts == pytest.approx(experts_loaded(128, 8, tokens), rel=0.012), tokens


@pytest.mark.parametrize(("top_k", "tokens"), [(0, 1), (9, 1), (2, -1)])
def test_routing_that_cannot_be_is_refused(top_k: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="is no routing"):
        experts_loaded(8, top_k, tokens)


def windows(*rows: tuple[int, int, float]) -> dict[str, Any]:
    return {
        "num_experts": 8,
        "top_k": 2,
        "windows": [{"batch": batch, "t": t, "ratio": ratio} for batch, t, ratio in rows],
    }


def test_measured_routing_is_a_share_of_the_bound_and_linear_between_points() -> None:
    routing = read_routing(windows((1, 1, 1.0), (1, 3, 0.8), (4, 1, 0.9), (4, 3, 0.6)))
    # one request, two tokens: halfway from 1 to 0.8; N(2) = 8 * (1 - 0.75 ** 2) = 3.5
    assert routing.experts(1, 2) == pytest.approx(0.9 * 3.5)
    # two requests are a third of the way to four: 1 - 0.1 / 3, N(2) again
    assert routing.experts(2, 1) == pytest.approx((1 - 0.1 / 3) * 3.5)


def test_routing_beyond_what_was_measured_has_no_figure() -> None:
    routing = read_routing(windows((1, 1, 1.0), (1, 3, 0.8)))
    with pytest.raises(NotMeasured, match=r"tokens of a request in a step: 4 is outside .*1-3"):
        routing.experts(1, 4)
    with pytest.raises(NotMeasured, match=r"requests in a step: 2 is outside .*\(1\)"):
        routing.experts(2, 1)


def test_routing_of_a_dense_verifier_is_refused() -> None:
    with pytest.raises(ValueError, match="without experts"):
        read_routing({"experts": None})


def test_neighbours_share_by_distance() -> None:
    assert neighbours([1, 3, 8], 3, "K") == {3: 1.0}
    assert neighbours([1, 3, 8], 4, "K") == {3: pytest.approx(0.8), 8: pytest.approx(0.2)}
