import pytest

from specmill.incompatibilities import explain
from specmill.server import EngineRefused
from specmill.steps import Steps, as_text


def fail(error: Exception) -> str:
    raise error


def test_a_step_whose_need_failed_is_not_run_and_says_which() -> None:
    steps = Steps()
    assert steps.run("twin", [], lambda: "made")
    assert not steps.run("extract", ["twin"], lambda: fail(ValueError("no\nway")))
    assert not steps.run("train", ["twin", "extract"], lambda: fail(AssertionError()))
    assert not steps.run("export", ["train"], lambda: None)
    verdicts = [(step.name, step.verdict, step.note) for step in steps.done.values()]
    assert verdicts == [
        ("twin", "ok", "made"),
        ("extract", "failed", "no"),
        ("train", "not run", "it needs extract"),
        ("export", "not run", "it needs train"),
    ]
    assert not steps.ended_well


def test_what_a_changed_library_ends_in_is_a_verdict_and_an_interruption_is_none() -> None:
    steps = Steps()
    assert not steps.run("a", [], lambda: fail(AttributeError("no get_text_config")))
    assert not steps.run("b", [], lambda: fail(TypeError("missing 1 argument")))
    with pytest.raises(KeyboardInterrupt):
        steps.run("c", [], lambda: fail(KeyboardInterrupt()))  # type: ignore[arg-type]


def test_a_refusing_engine_is_quoted_by_its_reason_and_the_known_incompatibility_named() -> None:
    reason = "RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs"
    steps = Steps()
    steps.run("extract", [], lambda: fail(EngineRefused("many\nlines", reason)))
    text = as_text(steps.done.values())
    assert reason in text
    assert "known: vLLM's model of this class hands out no aux hidden states" in text
    assert "many" not in text


def test_what_is_not_known_is_said_to_be_unknown() -> None:
    steps = Steps()
    steps.run("extract", [], lambda: fail(RuntimeError("the moon is full")))
    assert "not a known incompatibility" in as_text(steps.done.values())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            "ValueError: Connector HiddenStatesConnector uses deprecated 2-argument constructor "
            "signature. External v1 KV connectors must accept kv_cache_config",
            "makes KV connectors in another way",
        ),
        (
            "TypeError: HiddenStatesConnector.__init__() takes 3 positional arguments but 4",
            "makes KV",
        ),
        ("pin_memory=True requires a CUDA or other accelerator backend", "vLLM's own example"),
        ("Scale-out endpoints are disabled. Restart vllm serve", "--enable-scale-out"),
        ("sample 12: the engine computed other token ids than were sent", "cut or changed"),
        ("ValueError: There is no module or parameter named 'blocks' in X", "another nesting"),
        ("KeyError: 'layers.1.mlp.gate.e_score_correction_bias'", "another nesting"),
        ("Model architectures ['Qwen3VLFor...'] failed to be inspected. Please", "torchvision"),
        ("the engine exports no speculation counters: it is not", "names the counters"),
        ("head lacks d2t: ids would be misread", "whole vocabulary"),
        ("the model has 512 ... asked for a draft vocabulary of 32", "whole vocabulary"),
        ("the checkpoint has model type `kimi_k2` but Transformers does not recognize", "not know"),
    ],
)
def test_errors_as_they_were_seen_are_known(error: str, words: str) -> None:
    assert words in (explain(error) or "")


def test_other_errors_are_not_taken_for_known_ones() -> None:
    for error in ("out of memory", "No space left on device", "vLLM ended with status 1"):
        assert explain(error) is None
