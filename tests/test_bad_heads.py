"""Heads and results that somebody may hand in: each is refused with what is wrong about it."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specmill import compare
from specmill.head_tensors import read_tensors
from specmill.outside import convert
from specmill.params_heads import OutsideHead
from specmill.section import DoesNotFit
from specmill.start_head import take_head
from tests.test_imported import DETAILED, GUIDELLM, SPECULATION, Edit, edited, rows
from tests.test_inspection import (
    DECODER,
    VERIFIER,
    WIDTH,
    inspect,
    plain_weights,
    verifier_head,
    view,
    write_head,
)
from tests.test_outside import eagle_head

__all__ = ["verifier_head", "view"]  # fixtures

Bytes = Callable[[bytes], bytes]


def header(change: Callable[[dict[str, Any]], object]) -> Bytes:
    """A change of the JSON at a safetensors file's start."""

    def changed(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        about = json.loads(content[8 : 8 + length])
        change(about)
        encoded = json.dumps(about).encode()
        return struct.pack("<Q", len(encoded)) + encoded + content[8 + length :]

    return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: struct.pack("<Q", 2**62) + content[8:],
        lambda content: struct.pack("<Q", 99_000_000) + content[8:],
        lambda content: struct.pack("<Q", 100_000) + b"[" * 100_000,
        lambda content: content[:-10],
        lambda content: content + b"x",
        header(lambda about: about["norm.weight"].update(about["fc.weight"])),
        header(lambda about: about["norm.weight"].update(shape=[10**12])),
        header(lambda about: about["norm.weight"].update(dtype="Q9")),
        header(lambda about: about["norm.weight"].update(data_offsets=[-8, 0])),
    ],
)
def test_a_damaged_safetensors_file_is_refused_by_name_before_and_after_conversion(
    tmp_path: Path, verifier_head: Path, view: Any, change: Bytes
) -> None:
    head = write_head(tmp_path / "head")
    file = head / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=r"head/model\.safetensors cannot be read: "):
        read_tensors(head)
    assert "model.safetensors cannot be read: " in inspect(head, view, verifier_head)["refused"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (torch.ones(2), "a Tensor"),
        ([torch.ones(2)], "a list"),
        ({"model": {"fc.weight": torch.ones(2)}}, r"more than tensors by their names: \['model'\]"),
        ({"epoch": 5}, r"more than tensors by their names: \['epoch'\]"),
    ],
)
def test_a_file_of_torch_without_tensors_by_name_is_refused(
    tmp_path: Path, content: Any, reason: str
) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=rf"pytorch_model\.bin holds .*{reason.split('holds ')[-1]}"
    ):
        read_tensors(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": null}'])
def test_an_index_of_a_checkpoint_that_lists_nothing_is_refused(
    tmp_path: Path, content: str
) -> None:
    head = write_head(tmp_path / "head")
    (head / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json "):
        read_tensors(head)


WEIGHTS = plain_weights()
TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "fc of one dimension": ({"fc.weight": torch.ones(48)}, r"fc\.weight is \(48,\)"),
    "fc of none": ({"fc.weight": torch.tensor(1.0)}, r"fc\.weight is \(\)"),
    "fc transposed": ({"fc.weight": WEIGHTS["fc.weight"].T.contiguous()}, "fc takes 16 values"),
    "fc of whole numbers": ({"fc.weight": WEIGHTS["fc.weight"].int()}, r"fc\.weight in int32"),
    "fc of yes and no": ({"fc.weight": WEIGHTS["fc.weight"].bool()}, r"fc\.weight in bool"),
    "fc of 8 bits": (
        {"fc.weight": WEIGHTS["fc.weight"].to(torch.float8_e4m3fn)},
        r"fc\.weight in float8_e4m3fn",
    ),
    "lm_head transposed": (
        {"lm_head.weight": WEIGHTS["lm_head.weight"].T.contiguous()},
        r"lm_head\.weight is \(16, 4\)",
    ),
    "norm of NaN": ({"norm.weight": torch.full((WIDTH,), torch.nan)}, r"NaN or infinity in norm"),
    "norm of infinity": ({"norm.weight": torch.full((WIDTH,), torch.inf)}, r"NaN or infinity in"),
    "d2t with halves": ({"d2t": WEIGHTS["d2t"] + 0.5}, "d2t in float32"),
    "d2t of yes and no": ({"d2t": WEIGHTS["d2t"].bool()}, "d2t in bool"),
    "d2t of two dimensions": ({"d2t": WEIGHTS["d2t"][None]}, r"d2t is \(1, 4\)"),
    "d2t too short": ({"d2t": WEIGHTS["d2t"][:3]}, r"d2t is \(3,\)"),
    "d2t far too large": ({"d2t": torch.tensor([0, 0, 0, 2**62])}, "ids outside"),
    "d2t below 0": ({"d2t": torch.tensor([0, 0, 0, -9])}, "ids outside"),
    "t2d too short": ({"t2d": WEIGHTS["t2d"][:5]}, r"t2d is \(5,\)"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_head_with_wrong_tensors_is_nothing_to_train_from(
    tmp_path: Path, verifier_head: Path, name: str
) -> None:
    weights, reason = TENSORS[name]
    head = OutsideHead(source=f"folder:{write_head(tmp_path / 'head', weights)}")
    with pytest.raises(ValueError, match=rf"train\.from folder:.*/head: .*{reason}"):
        take_head(head, 4, VERIFIER, verifier_head, tmp_path / "taken")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no decoder": ({"transformer_layer_config": None}, r"transformer_layer_config\.hidden_size"),
    "a decoder in a list": ({"transformer_layer_config": []}, r"transformer_layer_config\."),
    "a width in words": (
        {"transformer_layer_config": DECODER | {"hidden_size": "16"}},
        r"transformer_layer_config\.hidden_size",
    ),
    "0 attention heads": (
        {"transformer_layer_config": DECODER | {"num_attention_heads": 0}},
        "its config makes no head",
    ),
    "a rope in a word": (
        {"transformer_layer_config": DECODER | {"rope_parameters": "x"}},
        "its config makes no head",
    ),
    "an unknown decoder": (
        {"transformer_layer_config": DECODER | {"model_type": "nosuch"}},
        "its config makes no head",
    ),
    "no draft vocabulary": ({"draft_vocab_size": None}, "lacks draft_vocab_size"),
    "a draft vocabulary in words": ({"draft_vocab_size": "4"}, "lacks draft_vocab_size"),
    "a draft vocabulary of 0": ({"draft_vocab_size": 0}, "lacks draft_vocab_size"),
    "a verifier in a list": ({"speculators_config": []}, r"lacks speculators_config\.verifier"),
    "no verifier": ({"speculators_config": None}, r"lacks speculators_config\.verifier"),
    "layers in a word": (
        {"eagle_aux_hidden_state_layer_ids": "abc"},
        "eagle_aux_hidden_state_layer_ids",
    ),
    "layers in lists": (
        {"eagle_aux_hidden_state_layer_ids": [[1]]},
        "eagle_aux_hidden_state_layer_ids",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_whose_config_lacks_what_is_read_is_refused_by_key(
    tmp_path: Path, verifier_head: Path, view: Any, name: str
) -> None:
    config, reason = CONFIGS[name]
    place = write_head(tmp_path / "head", config=config)
    chosen = OutsideHead(source=f"folder:{place}")
    with pytest.raises(ValueError, match=rf"train\.from folder:.*/head: .*{reason}"):
        take_head(chosen, 4, VERIFIER, verifier_head, tmp_path / "taken")
    assert inspect(place, view, verifier_head)["refused"].startswith("head: its config")


@pytest.mark.parametrize(
    ("config", "weights", "reason"),
    [
        ({"vocab_size": None}, {}, "vocab_size None in its config"),
        ({"vocab_size": "32"}, {}, "vocab_size '32' in its config"),
        ({"vocab_size": 10**13}, {}, "vocab_size 10000000000000 in its config"),
        ({"hidden_size": None}, {}, "hidden_size None in its config"),
        ({"eagle_config": [1]}, {}, r"eagle_config \[1\] in its config"),
        ({"num_attention_heads": 3}, {}, "speculators cannot convert"),
        ({}, {"fc.weight": torch.tensor(1.0)}, r"fc\.weight of shape \(\)"),
        ({}, {"lm_head.weight": torch.ones(4)}, r"lm_head\.weight of shape \(4,\)"),
    ],
)
def test_an_eagle_head_that_cannot_be_converted_says_why(
    tmp_path: Path,
    verifier_head: Path,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor | None],
    reason: str,
) -> None:
    head = OutsideHead(source=f"folder:{eagle_head(tmp_path / 'eagle', weights, config)}")
    with pytest.raises(DoesNotFit, match=reason):
        convert(Path(head.source[7:]), head, VERIFIER, verifier_head, tmp_path / "made")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.update(completed=-3), "completed: "),
        (lambda c: c.update(request_rate=float("nan")), "request_rate: "),
        (lambda c: c.update(request_rate=-1.0), "request_rate: "),
        (lambda c: c.update(max_concurrency=0), "max_concurrency: "),
        (lambda c: c.update(total_input_tokens=-1), "total_input_tokens: "),
        (lambda c: c.update(date="yesterday"), "time data 'yesterday'"),
        (lambda c: c.update(SPECULATION, spec_decode_draft_tokens=0), "contradict each other"),
        (lambda c: c.update(SPECULATION, spec_decode_draft_tokens=9), "contradict each other"),
        (
            lambda c: c.update(SPECULATION, spec_decode_per_position_acceptance_rates=[2, 1, 0]),
            "spec_decode_per_position_acceptance_rates.0: ",
        ),
    ],
)
def test_a_result_of_vllm_with_impossible_figures_is_refused_by_file_and_key(
    tmp_path: Path, change: Edit, reason: str
) -> None:
    with pytest.raises(ValueError, match=r"edited\.json: ") as caught:
        rows(edited(tmp_path, DETAILED, change), k=3)
    assert reason in str(caught.value)


def told(**speculation: Any) -> Edit:
    def change(content: dict[str, Any]) -> None:
        for run in content["benchmarks"]:
            for request in run["requests"]["successful"]:
                request["response_metrics"] = {"speculative_decoding": speculation}

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c["benchmarks"][0].update(start_time=1e30), "start_time"),
        (lambda c: c["benchmarks"][0].update(start_time=float("nan")), "start_time"),
        (lambda c: c.update(benchmarks=[5]), "benchmarks.0"),
        (told(num_draft_tokens=2), "acceptance_histogram"),
        (told(acceptance_histogram="abc", num_draft_tokens=2), "acceptance_histogram"),
        (told(acceptance_histogram=[], num_draft_tokens=2), "acceptance_histogram"),
        (told(acceptance_histogram=[-1, 2], num_draft_tokens=2), "acceptance_histogram.0"),
        (told(acceptance_histogram=[1, 2], num_draft_tokens="x"), "num_draft_tokens"),
        (told(acceptance_histogram=[1, 2], num_draft_tokens=0), "contradict each other"),
    ],
)
def test_a_report_of_guidellm_with_impossible_figures_is_refused_by_file_and_key(
    tmp_path: Path, change: Edit, reason: str
) -> None:
    with pytest.raises(ValueError, match=r"edited\.json: ") as caught:
        rows(edited(tmp_path, GUIDELLM, change), k=1)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"config": None}, {"config": {"spec": {"data": 5}, "metadata": [1]}}],
)
def test_what_a_report_of_guidellm_says_beside_its_figures_may_be_anything(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    if change["config"] is None:
        with pytest.raises(ValueError, match=r"edited\.json: config"):
            rows(edited(tmp_path, GUIDELLM, lambda c: c.update(change)), k=2)
    else:
        assert rows(edited(tmp_path, GUIDELLM, lambda c: c.update(change)), k=2)


HARDWARE = {"cpu_model": "a", "num_usable_cores": 1, "gpus": [], "versions": {}}


@pytest.mark.parametrize(
    ("lock", "hardware", "reason"),
    [
        ("- 1", HARDWARE, "its dvc.lock is none that DVC wrote"),
        ("stages: [1]", HARDWARE, "its dvc.lock is none that DVC wrote"),
        ("stages: {bench@a: 5}", HARDWARE, "its dvc.lock is none that DVC wrote"),
        ("stages: {bench@a: {outs: 5}}", HARDWARE, "its dvc.lock is none that DVC wrote"),
        ("stages: {bench@a: {outs: [{md5: x}]}}", HARDWARE, "its dvc.lock is none that DVC wrote"),
        ("stages: !!int x", HARDWARE, "its dvc.lock is none that DVC wrote"),
        ("stages: {}", [], "reports/hardware.json is none that the stage hardware wrote"),
        ("stages: {}", {}, "reports/hardware.json is none that the stage hardware wrote"),
    ],
)
def test_a_report_edited_by_hand_is_not_compared(
    tmp_path: Path, lock: str, hardware: Any, reason: str
) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "dvc.lock").write_text(lock)
    (tmp_path / "reports" / "hardware.json").write_text(json.dumps(hardware))
    with pytest.raises(SystemExit, match="not comparable: ") as caught:
        compare.main([str(tmp_path), str(tmp_path)])
    assert reason in str(caught.value)
