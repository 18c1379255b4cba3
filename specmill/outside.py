"""Heads that were trained elsewhere: found, read, and brought into speculators' format.

speculators converts the EAGLE authors' format, and reports success whatever it did not find: it
loads with strict=False, so a tensor under an unknown name is dropped and its place keeps what was
drawn there at random (speculators#1114). So only the config is its; the tensors written here are
the source's own bytes, and what the converter lost or drew is told.
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specmill.files import read_object, write_json
from specmill.head_checks import check_config, rope_of
from specmill.head_facts import trained_for
from specmill.head_tensors import Tensors, check_types, read_tensors
from specmill.layers import default_aux_layer_ids
from specmill.params_heads import OutsideHead
from specmill.section import DoesNotFit

logger = logging.getLogger(__name__)

_MOST = 10**7
"""A vocabulary or a width beyond it is a slip, and its tables would fill the memory."""
_PLACED_HERE = ("input_norm.", "fc_norm.")
"""Tensors of EAGLE-3.1 that speculators' model has and its converter does not know."""


def fetch(chosen: OutsideHead, parameter: str) -> tuple[Path, str]:
    """The folder that holds a head, and what tells its content: the Hub commit, or `folder`.

    Args:
        chosen: The head.
        parameter: What names it in errors.

    Raises:
        ValueError: when it is not there, or cannot be had.
    """
    kind, _, place = chosen.source.partition(":")
    if kind == "folder":
        if not (Path(place) / "config.json").is_file():
            raise ValueError(
                f"{parameter} is {chosen.source}, but {Path(place).absolute()} holds no config.json"
            )
        return Path(place), "folder"
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        path = Path(
            snapshot_download(
                place,
                revision=chosen.revision,
                allow_patterns=["*.json", "*.safetensors", "pytorch_model*.bin", "README.md"],
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as error:
        raise ValueError(
            f"{parameter} {chosen.source} at revision {chosen.revision} cannot be had: {error}"
        ) from None
    if not (path / "config.json").is_file():
        raise ValueError(f"{parameter} is {chosen.source}, which holds no config.json")
    return path, f"Hub commit {path.name}"


def name_of_verifier(folder: Path) -> str | None:
    """For whom a head says it was made: as any head does, or in its card (`base_model`)."""
    if name := trained_for(folder):
        return name
    card = folder / "README.md"
    if not card.is_file():
        return None
    from huggingface_hub import ModelCard

    try:
        base = ModelCard.load(card).data.base_model
    except ValueError as error:  # a card is written by hand
        logger.warning("%s is no model card: %s", card, error)
        return None
    return base[0] if isinstance(base, list) and base else base or None


def convert(
    source: Path, chosen: OutsideHead, verifier: dict[str, Any], verifier_head: Path, folder: Path
) -> str | None:
    """Write a head in speculators' format, portable.

    Args:
        source: Where it lies, in either format.
        chosen: What is to be done with it.
        verifier: identity.json of the verifier it is to run on.
        verifier_head: Its slice.
        folder: Receives config.json and model.safetensors.

    Returns:
        The format it was converted from, `EAGLE`; None when there was nothing to convert.

    Raises:
        DoesNotFit: when it is no EAGLE-3 head that speculators could hold.
        ValueError: when the source cannot be read.
    """
    config, tensors = read_object(source / "config.json"), read_tensors(source)
    name = name_of_verifier(source) or verifier["name"]
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise DoesNotFit(f"{chosen.source} is a head of kind {kind}, not eagle3")
    check_types(tensors, chosen.source)
    if kind is None:
        config, tensors = _from_eagle(config, tensors, chosen, verifier, verifier_head)
    check_config(config, chosen.source)
    config.setdefault("norm_before_residual", chosen.norm_before_residual)
    own = config.get("eagle_aux_hidden_state_layer_ids")
    if chosen.aux_layer_ids and own and own != chosen.aux_layer_ids:
        logger.warning("%s: aux_layer_ids replaces %s of its config", chosen.source, own)
    config["eagle_aux_hidden_state_layer_ids"] = chosen.aux_layer_ids or own or _default(verifier)
    config["speculators_config"]["verifier"]["name_or_path"] = name
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return None if kind else "EAGLE"


def _default(verifier: dict[str, Any]) -> list[int]:
    try:
        return default_aux_layer_ids(verifier["num_layers"])
    except ValueError as error:
        raise DoesNotFit(f"it names no layers, and {error}") from None


def _from_eagle(
    config: dict[str, Any],
    tensors: Tensors,
    chosen: OutsideHead,
    verifier: dict[str, Any],
    verifier_head: Path,
) -> tuple[dict[str, Any], Tensors]:
    """speculators' config of an EAGLE head, and its tensors under speculators' names.

    Raises:
        DoesNotFit: when speculators' EAGLE-3 cannot hold it.
    """
    tensors = {
        name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()
    }
    if "fc.weight" not in tensors or "lm_head.weight" not in tensors:
        raise DoesNotFit(
            f"{chosen.source} is no EAGLE-3 head: architectures {config.get('architectures')}, "
            f"without fc.weight or lm_head.weight among its {len(tensors)} tensors"
        )
    _check_eagle(config, tensors, chosen.source)
    tensors = _with_one_mapping(tensors, config)
    flags = (config.get("eagle_config") or {}) | config
    with tempfile.TemporaryDirectory() as scratch:
        given, made = Path(scratch) / "given", Path(scratch) / "made"
        given.mkdir()
        write_json(given / "config.json", _as_converter_reads(config, tensors))
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            given / "model.safetensors",
        )
        _run_converter(given, made, verifier_head, flags, chosen)
        converted, drawn = read_object(made / "config.json"), load_file(made / "model.safetensors")
    _check_arrived(tensors, drawn, chosen.source)
    converted["eagle_aux_hidden_state_layer_ids"] = flags.get("eagle_aux_hidden_state_layer_ids")
    converted["dtype"] = str(tensors["lm_head.weight"].dtype).removeprefix("torch.")
    return converted, tensors


def _check_eagle(config: dict[str, Any], tensors: Tensors, source: str) -> None:
    """Refuse what cannot even be converted; whether it fits is asked of the converted head."""
    wrong = [
        f"{key} {config.get(key)!r} in its config"
        for key in ("vocab_size", "hidden_size")
        if type(config.get(key)) is not int or not 1 <= config[key] <= _MOST
    ]
    if not isinstance(config.get("eagle_config") or {}, dict):
        wrong.append(f"eagle_config {config['eagle_config']!r} in its config")
    wrong += [
        f"{name} of shape {tuple(tensors[name].shape)}"
        for name in ("fc.weight", "lm_head.weight")
        if tensors[name].ndim != 2
    ]
    if wrong:
        raise DoesNotFit(f"{source} is no EAGLE-3 head: it has {', '.join(wrong)}")


def _with_one_mapping(tensors: Tensors, config: dict[str, Any]) -> Tensors:
    """Without a mapping where none is needed; with a t2d, which follows from d2t, where it is."""
    vocab_size, draft_size = config["vocab_size"], len(tensors["lm_head.weight"])
    rest = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if draft_size == vocab_size or "d2t" not in tensors:
        mapping = {}
        if draft_size != vocab_size and "t2d" in tensors:
            mapping["t2d"] = tensors["t2d"].bool()
        return rest | mapping
    d2t = tensors["d2t"].long()
    t2d = tensors.get("t2d")
    if t2d is None:
        t2d = torch.zeros(vocab_size)
        t2d[(torch.arange(len(d2t)) + d2t).clamp(0, vocab_size - 1)] = 1
    return rest | {"d2t": d2t, "t2d": t2d.bool()}


def _as_converter_reads(config: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """An EAGLE config with every fact under the one name that the converter looks for.

    It reads rope_theta and rope_scaling, where transformers 5 writes rope_parameters, and would
    serve theta 10000 otherwise; it takes a draft vocabulary of 32000 where none is named.
    """
    rope = rope_of(config)
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    head = tensors["lm_head.weight"]
    width = config["hidden_size"]
    taken = tensors["fc.weight"].shape[-1] // 3
    return config | {
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **rope},
        "draft_vocab_size": len(head),
        "torch_dtype": str(head.dtype).removeprefix("torch."),
        "target_hidden_size": None if taken == width else taken,
    }


def _run_converter(
    given: Path, made: Path, verifier_head: Path, flags: dict[str, Any], chosen: OutsideHead
) -> None:
    from huggingface_hub.errors import StrictDataclassError
    from loguru import logger as converters_log
    from speculators.convert import convert_model

    converters_log.disable("speculators.convert")  # it calls success what _check_arrived judges
    try:
        convert_model(
            model=str(given),
            verifier=str(verifier_head),
            algorithm="eagle3",
            output_path=str(made),
            norm_before_residual=flags.get("norm_before_residual", chosen.norm_before_residual),
            norm_before_fc=flags.get("norm_before_fc", False),
            fc_norm=flags.get("fc_norm", False),
            norm_output=flags.get("norm_output", False),
        )
    # a tensor of another size than the config says, or a config that transformers refuses
    except (RuntimeError, ValueError, StrictDataclassError) as error:
        raise DoesNotFit(f"speculators cannot convert {chosen.source}: {error}") from None


def _check_arrived(given: Tensors, made: Tensors, source: str) -> None:
    """Compare what the converter wrote with what it was given, name by name and bit by bit.

    Raises:
        DoesNotFit: when a tensor of the head has no place in speculators' model, or changed.
    """
    lost = sorted(name for name in given.keys() - made.keys() if not name.startswith(_PLACED_HERE))
    if lost:
        raise DoesNotFit(
            f"{source}: speculators' EAGLE-3 has no place for {', '.join(lost)}; without them it "
            "would compute something else"
        )
    changed = sorted(
        name
        for name in given.keys() & made.keys()
        if not torch.equal(given[name].nan_to_num(), made[name].to(given[name].dtype).nan_to_num())
    )
    if changed:
        raise DoesNotFit(f"{source}: the converter changed {', '.join(changed)}")
    if drawn := sorted(made.keys() - given.keys()):
        logger.warning("%s has no %s; what the converter drew is left out", source, drawn)
