import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MixtralForCausalLM

from specmill import routing
from specmill.moe import experts_loaded
from specmill.moe_counts import busiest_share, overlap, unique_experts
from specmill.params_experts import Experts
from specmill.params_file import load_params
from specmill.params_parallel import Parallel
from specmill.relaid import relay
from specmill.routed_worker import Listener
from specmill.routing import decode, pick_answers, routed_experts, routed_layers
from tests.fakes import sample
from tests.llamas import NUM_LAYERS, VOCAB_SIZE, write_llama
from tests.workspace import ROOT

# four tokens, two layers, two of five experts each
ONE = np.array(
    [
        [[0, 1], [4, 3]],
        [[1, 2], [3, 4]],
        [[1, 0], [4, 3]],
        [[3, 4], [0, 1]],
    ]
)
# three tokens of another answer
OTHER = np.array(
    [
        [[0, 1], [0, 1]],
        [[0, 1], [2, 3]],
        [[0, 2], [2, 4]],
    ]
)


def test_a_window_of_one_token_loads_the_experts_it_is_routed_to() -> None:
    assert unique_experts([ONE], 1, 5).tolist() == [[2, 2]] * 4


def test_experts_that_tokens_of_a_window_share_are_loaded_once() -> None:
    # layer 0: {0,1,2} {0,1,2} {0,1,3,4}; layer 1: {3,4} {3,4} {0,1,3,4}
    assert unique_experts([ONE], 2, 5).tolist() == [[3, 2], [3, 2], [4, 4]]
    # all four tokens: {0,1,2,3,4}; {0,1,3,4}
    assert unique_experts([ONE], 4, 5).tolist() == [[5, 4]]


def test_requests_of_a_pass_share_experts_too_and_end_with_the_shortest() -> None:
    # layer 0: {0,1} {0,1,2} {0,1,2}; layer 1: {0,1,3,4} {2,3,4} {2,3,4}
    assert unique_experts([ONE, OTHER], 1, 5).tolist() == [[2, 4], [3, 3], [3, 3]]
    # layer 0: {0,1,2} {0,1,2}; layer 1: {0..4} {2,3,4}
    assert unique_experts([ONE, OTHER], 2, 5).tolist() == [[3, 5], [3, 3]]


def test_ids_of_one_byte_are_counted_like_any_other() -> None:
    ids = ONE.astype(np.uint8)
    assert unique_experts([ids], 2, 5).tolist() == unique_experts([ONE], 2, 5).tolist()


def test_independent_tokens_load_by_the_formula() -> None:
    assert experts_loaded(8, 2, 1) == 2
    assert experts_loaded(8, 2, 2) == pytest.approx(3.5)  # 8 (1 - 9/16)
    assert experts_loaded(512, 10, 4) == pytest.approx(38.8, abs=0.05)
    assert experts_loaded(4, 4, 7) == 4


def test_random_routing_loads_what_the_formula_says() -> None:
    draw = np.random.default_rng(0)
    routed = [draw.random((400, 3, 16)).argsort(axis=2)[:, :, :4] for _ in range(8)]
    rows = {(row["batch"], row["t"]): row for row in overlap(routed, 16, 4)}
    assert rows[1, 1]["experts_loaded"] == 4
    for place in [(1, 3), (1, 9), (4, 1), (4, 2)]:
        assert rows[place]["ratio"] == pytest.approx(1, abs=0.01), place


def test_a_row_has_the_mean_over_windows_and_layers_beside_the_bound() -> None:
    rows = overlap([ONE, OTHER], 5, 2)
    assert {row["batch"] for row in rows} == {1}  # four answers there are not
    two = next(row for row in rows if row["t"] == 2)
    # ONE [3 2] [3 2] [4 4]; OTHER {0,1} {0,1,2}, {0,1,2,3} {2,3,4}: [2 4] [3 3]
    # sum 18 + 12 = 30 over five windows of two layers; bound 5 (1 - 9/25) = 3.2
    assert two == {
        "batch": 1,
        "t": 2,
        "experts_loaded": 3.0,
        "upper_bound": 3.2,
        "ratio": 0.9375,
        "num_windows": 5,
    }


def test_answers_too_short_for_a_window_have_none() -> None:
    rows = overlap([ONE, OTHER], 5, 2)
    assert [row["t"] for row in rows] == [1, 2, 3, 4]
    # t = 4 fits into ONE alone
    assert rows[-1]["num_windows"] == 1
    assert rows[-1]["experts_loaded"] == 4.5


def test_the_busiest_experts_share_is_its_part_of_all_choices() -> None:
    # ONE: layer 0 chooses 1 three times of eight, layer 1 3 and 4 three times each
    assert busiest_share([ONE], 5) == pytest.approx(3 / 8)
    # both: layer 0 has 0 five times and 1 five times of 14; layer 1 has 4 four times, 3 four times
    assert busiest_share([ONE, OTHER], 5) == pytest.approx((5 / 14 + 4 / 14) / 2)


def answer(category: str, length: int, first: int = 0) -> Any:
    return sample([9, first], list(range(length)), category=category, split="bench")


def test_answers_are_taken_of_each_category_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "NUM_ANSWERS", 4)
    samples = [answer("maths", 20, n) for n in range(3)] + [answer("coding", 20, n) for n in (7, 8)]
    picked = pick_answers(samples, 100)
    assert [(one.category, one.prompt_token_ids[1]) for one in picked] == [
        ("coding", 7), ("maths", 0), ("coding", 8), ("maths", 1),
    ]  # fmt: skip


def test_answers_that_are_short_or_fill_the_context_are_left_out() -> None:
    fits, short, long = answer("a", 17), answer("a", 15), answer("a", 18)
    assert pick_answers([short, long, fits], 20) == [fits]  # 2 + 17 + the one that is added
    with pytest.raises(ValueError, match=r"no bench answer has 16 tokens.*prepare\.max_tokens"):
        pick_answers([short], 100)


def test_a_servers_answer_is_read_back_as_the_ids_it_was_made_of() -> None:
    buffer = io.BytesIO()
    np.save(buffer, ONE.astype(np.uint8), allow_pickle=False)
    text = base64.b64encode(buffer.getvalue()).decode()
    assert decode(text).tolist() == ONE.tolist()


def test_layers_that_no_token_is_routed_in_are_dropped_and_no_others() -> None:
    dense = np.zeros((3, 1, 2), dtype=int)
    told = [np.concatenate([dense, OTHER], axis=1), np.concatenate([dense, OTHER * 0], axis=1)]
    first, second = routed_layers(told)
    assert first.tolist() == OTHER.tolist()
    assert second.shape == OTHER.shape  # all zeros here, yet routed as the first shows


def test_what_was_heard_in_several_passes_is_put_together_by_layer() -> None:
    listener = Listener()
    for tokens in (ONE[:3], ONE[3:]):
        for layer in (7, 2):  # in any order
            ids = torch.tensor(tokens[:, 0 if layer == 2 else 1])
            listener.capture(layer, ids)
            ids.zero_()  # a buffer that the next pass writes into
    assert listener.take().tolist() == ONE.tolist()
    assert listener.heard == {}


@pytest.mark.e2e
def test_the_real_engine_tells_what_transformers_routes(tmp_path: Path) -> None:
    dense = write_llama(tmp_path / "dense")
    relay(dense, tmp_path / "moe", Experts(num=8, top_k=2, noise=0.1, seed=3))
    draw = np.random.default_rng(0)
    samples = [
        sample(draw.integers(3, VOCAB_SIZE, 20).tolist(), draw.integers(3, VOCAB_SIZE, n).tolist())
        for n in (30, 50)
    ]
    runtime = load_params(ROOT / "params.yaml").runtime
    verifier = {"max_model_len": 128, "dtype": "float32"}
    told = routed_experts(tmp_path / "moe", verifier, samples, Parallel(), runtime)
    model = MixtralForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32).eval()
    for ids, one in zip(told, samples, strict=True):
        assert ids.shape == (len(one.answer_token_ids), NUM_LAYERS, 2)
        with torch.no_grad():
            found = model(torch.tensor(one.input_ids[None]).long(), output_router_logits=True)
        expected = torch.stack([layer.topk(2).indices for layer in found.router_logits], dim=1)
        same = np.sort(expected[20:].numpy(), axis=2) == np.sort(ids, axis=2)
        # all but those whose second and third expert are as good as equal
        assert same.mean() > 0.98
