"""What a head's config and the shapes of its tensors say about serving it; read without torch.

Names and formats are speculators' (Eagle3SpeculatorConfig); how vLLM reads them is in
vllm/transformers_utils/configs/speculators/algos.py and model_executor/models/llama_eagle3.py.
"""

from typing import Any

from specmill.layers import default_aux_layer_ids
from specmill.section import DoesNotFit

Shapes = dict[str, tuple[int, ...]]
OPTIONAL = {"embed_tokens.weight", "t2d"}
"""What vLLM can do without: it takes the verifier's embeddings, and never reads t2d."""


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary embedding of a decoder's config, in the form of transformers 5, whichever it has."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    theta = found.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    return {"rope_type": kind, "rope_theta": float(theta), **found}


def aux_ids_of(config: dict[str, Any], num_layers: int) -> list[int]:
    """The depths (specmill.layers) that a head is fed: its config's, or vLLM's default three.

    Raises:
        ValueError: when it names none and the verifier is too shallow for the default.
    """
    asked = config.get("eagle_aux_hidden_state_layer_ids")
    return [int(number) for number in asked or default_aux_layer_ids(num_layers)]


def check_config(config: dict[str, Any], name: str) -> None:
    """Refuse a config in speculators' form that lacks what is read of it, or has it as no number.

    Args:
        config: Of the head.
        name: What names the head in the error.

    Raises:
        DoesNotFit: naming the keys.
    """
    decoder, about = config.get("transformer_layer_config"), config.get("speculators_config")
    decoder = decoder if isinstance(decoder, dict) else {}
    about = about if isinstance(about, dict) else {}
    numbers = {
        "draft_vocab_size": config.get("draft_vocab_size"),
        **{
            f"transformer_layer_config.{key}": decoder.get(key)
            for key in ("hidden_size", "vocab_size", "max_position_embeddings")
        },
    }
    wrong = [key for key, value in numbers.items() if type(value) is not int or value < 1]
    if not isinstance(about.get("verifier"), dict):
        wrong.append("speculators_config.verifier")
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and not (isinstance(ids, list) and {*map(type, ids)} <= {int}):
        wrong.append("eagle_aux_hidden_state_layer_ids")
    if wrong:
        raise DoesNotFit(f"{name}: its config.json lacks {', '.join(wrong)}, or has another type")


def misfits(
    config: dict[str, Any], shapes: Shapes, expected: Shapes, verifier: dict[str, Any]
) -> list[str]:
    """Why serving this head would be impossible or meaningless; empty when it is neither.

    Args:
        config: Of the head.
        shapes: Of its tensors.
        expected: Of the tensors that a head of this config has.
        verifier: Its identity.json.
    """
    return [
        *_width_misfits(config, shapes, verifier),
        *_vocabulary_misfits(config, shapes, verifier),
        *_tensor_misfits(shapes, expected),
    ]


def _width_misfits(config: dict[str, Any], shapes: Shapes, verifier: dict[str, Any]) -> list[str]:
    name, width, depth = verifier["name"], verifier["hidden_size"], verifier["num_layers"]
    found = []
    aux_ids = aux_ids_of(config, depth)
    if not all(0 <= number <= depth for number in aux_ids):
        found.append(
            f"it asks for states of layers {aux_ids}, and {name} has the ids 0 to {depth}: it was "
            "made for a deeper model"
        )
    num_fed = len(set(aux_ids))
    # of another form it is told with the tensors
    fc = shapes.get("fc.weight", ())
    taken, given = fc[1] if len(fc) == 2 else 0, num_fed * width
    if taken not in (0, given):
        per_layer = taken / num_fed
        made_for = f", as of a model of hidden size {per_layer:.0f}" if per_layer % 1 == 0 else ""
        found.append(
            f"its fc takes {taken} values a token{made_for}, and {num_fed} layers of {name} "
            f"(hidden size {width}) give {given}"
        )
    own = config["transformer_layer_config"]["hidden_size"]
    if own != width and "embed_tokens.weight" not in shapes:
        found.append(
            f"it is {own} wide and brings no embeddings of its own; those of {name} are {width}"
        )
    return found


def _vocabulary_misfits(
    config: dict[str, Any], shapes: Shapes, verifier: dict[str, Any]
) -> list[str]:
    found = []
    own, theirs = config["transformer_layer_config"]["vocab_size"], verifier["vocab_size"]
    if own < theirs:
        found.append(
            f"its vocabulary has {own} tokens and that of {verifier['name']} {theirs}: it was made "
            f"for another tokenizer and knows no id from {own} on"
        )
    if config["draft_vocab_size"] != own and "d2t" not in shapes:
        found.append(
            f"it drafts {config['draft_vocab_size']} of {own} tokens and has no d2t, so vLLM would "
            "read draft id i as token i; where it has t2d, d2t is nonzero(t2d) - arange"
        )
    return found


def _tensor_misfits(shapes: Shapes, expected: Shapes) -> list[str]:
    found = []
    # a missing d2t is told with the vocabulary
    missing = sorted(expected.keys() - shapes.keys() - OPTIONAL - {"d2t"})
    if missing:
        found.append(f"it lacks {', '.join(missing)}, which vLLM would serve uninitialised")
    if unknown := sorted(shapes.keys() - expected.keys()):
        found.append(f"vLLM has no place for its {', '.join(unknown)}")
    found += [
        f"its {name} is {shapes[name]}, and its config says {expected[name]}"
        for name in sorted(shapes.keys() & expected.keys())
        # a matrix fc is told with the width of the states
        if shapes[name] != expected[name] and (name != "fc.weight" or len(shapes[name]) != 2)
    ]
    return found


def differences(
    config: dict[str, Any], verifier_config: dict[str, Any], verifier: dict[str, Any]
) -> dict[str, str]:
    """What can cost acceptance and need not: a sentence by short key."""
    decoder = config["transformer_layer_config"]
    found = {}
    ours, theirs = rope_of(decoder), rope_of(verifier_config)
    if ours != theirs:
        found["rope"] = (
            f"its rotary embedding is {_plain(ours)}, the verifier's {_plain(theirs)}: right only "
            "if it was trained so; a converter that lost it leaves theta 10000 and no scaling"
        )
    if decoder["max_position_embeddings"] < verifier["max_model_len"]:
        found["positions"] = (
            f"it knows {decoder['max_position_embeddings']} positions, and engines are started "
            f"with {verifier['max_model_len']} (verifier.max_model_len)"
        )
    if decoder["vocab_size"] > verifier["vocab_size"]:
        found["vocabulary"] = (
            f"its vocabulary has {decoder['vocab_size']} tokens and the verifier's "
            f"{verifier['vocab_size']}: harmless if that is padding, fatal if the tokenizer is "
            "another"
        )
    aux_ids = aux_ids_of(config, verifier["num_layers"])
    if sorted(set(aux_ids)) != aux_ids:
        found["aux_order"] = (
            f"it lists its layers as {aux_ids}; vLLM feeds them rising, each once, whatever order "
            "fc was trained on"
        )
    return found


def _plain(rope: dict[str, Any]) -> str:
    return ", ".join(f"{name.removeprefix('rope_')} {value}" for name, value in rope.items())
