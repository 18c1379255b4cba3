"""The profiles for real verifiers, on constructed machines of the kind that they are for."""

import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specmill import paths
from specmill.budget import NOT_ESTIMATED
from specmill.doctor import Examination, examine
from specmill.doctor_verifier import check_memory, size_of
from specmill.methods import check_methods
from specmill.params import Params
from specmill.params_file import load_params
from specmill.shrunk import NUM_LAYERS, VOCAB_SIZE, shrunk_config
from specmill.text_decoder import text_config
from tests.patients import ENGINE, ROOT, card, rig, seen
from tests.targets import KIMI_K25, TARGETS, Target

KIMI = ("kimi-k2.5-8x-rtx-pro-6000", "kimi-k2.5-b200")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def profile(name: str) -> Params:
    return load_params(ROOT / f"profiles/{name}.yaml")


@pytest.fixture
def visit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Examine a profile on its machine, or on another."""

    def examined(name: str, **changes: Any) -> Examination:
        target = replace(TARGETS[name], **changes)
        room = SimpleNamespace(free=target.disk_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
        return examine(profile(name), looked(target), [])

    return examined


def looked(target: Target) -> Any:
    return seen(
        machine=target.machine,
        card=card(target.config),
        speed=target.speed,
        engine=ENGINE | {"quantisations": ["compressed-tensors"]},
        is_linked=True,
    )


def problems(answer: Examination) -> set[str]:
    return {one.check for one in answer.findings if one.level == "problem"}


@pytest.mark.parametrize("name", TARGETS)
def test_every_row_of_a_target_can_be_made_and_its_heads_are_from_the_hub(name: str) -> None:
    params = profile(name)
    check_methods(params)
    assert {"none", "ngram", "suffix", "eagle3"} < set(params.methods)
    served = {row.head for row in params.methods.values()}
    assert served & {str(paths.HEADS / head) for head in params.heads}
    assert all(head.source.startswith("hub:") for head in params.heads.values())


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_is_well_on_its_machine_and_every_stage_has_a_cost(name: str, visit: Any) -> None:
    answer, chosen = visit(name), profile(name)
    assert [one.line for one in answer.findings if one.level != "ok"] == []
    stages = {cost.stage for cost in answer.costs}
    assert {"prepare", "extract", "train", "curves"} <= stages
    assert {f"bench@{row}" for row in chosen.methods} <= stages
    assert ("routing" in stages) == name.startswith("kimi")
    assert {f"head@{head}" for head in chosen.heads} <= stages
    assert all(cost.seconds or cost.basis == NOT_ESTIMATED for cost in answer.costs)
    (disk,) = [one.found for one in answer.findings if one.check == "disk"]
    assert "blobs" in disk  # the verifier has to be downloaded


@pytest.mark.parametrize("name", TARGETS)
def test_a_disk_that_is_too_small_for_the_states_is_the_only_problem(name: str, visit: Any) -> None:
    assert problems(visit(name, disk_bytes=10**12)) == {"disk"}


@pytest.mark.parametrize("name", KIMI)
def test_half_of_the_gpus_are_too_few(name: str, visit: Any) -> None:
    full = TARGETS[name].machine
    gpu = full.hardware["gpus"][0]
    half = rig(gpu["name"], int(gpu["memory"].split()[0]), 4, full.links)
    assert problems(visit(name, machine=half)) == {"gpus"}


def test_memory_of_a_spread_engine_is_that_of_one_gpu() -> None:
    chosen, machine = profile(KIMI[0]), TARGETS[KIMI[0]].machine
    size = size_of(card(KIMI_K25), chosen, "bfloat16")
    (found,) = check_memory(size, machine, chosen)
    # a latent cache lies whole on each of eight GPUs that hold an eighth of the weights
    cache = int(97_887 * 2**20 * 0.92) - size.weight_bytes // 8
    assert f"{cache / 1e9:.3g} GB a device, {cache / (61 * 576 * 2):,.0f} tokens" in found.found
    beside = chosen.model_copy(
        update={"bench": chosen.bench.model_copy(update={"reference": "beside"})}
    )
    assert [one.level for one in check_memory(size, machine, beside)] == ["problem"]


def test_eight_gpus_do_a_step_and_train_eight_times_as_fast(visit: Any) -> None:
    costs = {cost.stage: cost for cost in visit(KIMI[0]).costs}
    chosen, speed = profile(KIMI[0]), TARGETS[KIMI[0]].speed
    # its own shape, not the verifier's: fc 3H^2; attention on 2H with 64 heads of 128 for q, k and
    # v, then o; MLP 12,288; 32,000 tokens
    head = 3 * 7168**2 + 2 * 7168 * 3 * 8192 + 8192 * 7168 + 3 * 7168 * 12288 + 7168 * 32000
    tokens = chosen.prepare.limit * chosen.verifier.max_model_len  # type: ignore[operator]
    flop = 6 * head * tokens * chosen.train.epochs * chosen.train.ttt_steps
    assert costs["train"].seconds == pytest.approx(flop / (8 * speed.flop_per_s))
    # two processes import for 10 s each; the weights are read once whatever they are spread over
    size = size_of(card(KIMI_K25), chosen, "bfloat16")
    assert costs["curves"].seconds
    started = costs["curves"].seconds - costs["curves"].work_s
    assert started == pytest.approx(8 * (20 + size.weight_bytes / speed.read_bytes_per_s))
    assert costs["sampling@none"].seconds == 20


@pytest.mark.parametrize("name", KIMI)
def test_both_machines_of_kimi_ask_the_same_so_that_states_can_travel(name: str) -> None:
    # a sample's answer depends on these; on limit and heldout only how many there are
    own, first = profile(name), profile(KIMI[0])
    assert own.verifier == first.verifier
    assert own.extract == first.extract
    differs = {"limit", "heldout"}
    assert own.prepare.model_dump(exclude=differs) == first.prepare.model_dump(exclude=differs)


@pytest.mark.parametrize("name", TARGETS)
def test_the_verifier_of_a_target_has_a_twin(name: str) -> None:
    old = text_config(TARGETS[name].config)
    config, left_out = shrunk_config(TARGETS[name].config, "bfloat16")
    text = text_config(config)
    assert config["architectures"] == TARGETS[name].config["architectures"]
    assert text["model_type"] == old["model_type"]
    assert (text["num_hidden_layers"], text["vocab_size"]) == (NUM_LAYERS, VOCAB_SIZE)
    for kept in ("kv_lora_rank", "qk_rope_head_dim", "head_dim", "rope_scaling"):
        assert text.get(kept) == old.get(kept)
    assert any(why.startswith("quantisation") for why in left_out) == name.startswith("kimi")
