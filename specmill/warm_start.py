"""Training that goes on from a head which the vocab stage has taken (specmill.start_head)."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from transformers import LlamaConfig

from specmill.draft_config import Surroundings, check_draft, flattened, geometry
from specmill.draft_decoder import decoder_config, further_flags
from specmill.files import read_json, read_object
from specmill.head_checks import OPTIONAL, Shapes
from specmill.head_facts import PROVENANCE
from specmill.head_shapes import WEIGHTS, shapes_of, tensor_shapes
from specmill.params import Train

_PARAMETERS = {
    "num_hidden_layers": "train.num_layers",
    "sliding_window": "train.sliding_window",
    "norm_before_fc": "train.norm_before_fc",
    "norm_output": "train.norm_output",
    "eagle_aux_hidden_state_layer_ids": "extract.aux_layer_ids",
}
"""Keys of `geometry` that a parameter decides."""


def check_start(
    chosen: Train, around: Surroundings, verifier_head: Path, tables_in_use: str, folder: Path
) -> None:
    """Refuse a head that the chosen draft model cannot go on from.

    Args:
        chosen: Of params.yaml: train.
        around: What the draft model has to fit.
        verifier_head: The verifier's slice.
        tables_in_use: `tables_digest` of the mapping that it is to train with.
        folder: Where `take_head` left the head.

    Raises:
        ValueError: when the vocab stage took another head or none, when the mapping is another, or
            naming every key and tensor that differs, with both values.
    """
    if chosen.from_ is None:
        return
    about = read_json(folder / PROVENANCE) if (folder / PROVENANCE).is_file() else {}
    if about.get("from") != chosen.from_.model_dump():
        raise ValueError(
            f"train.from is {chosen.from_.source}, and {folder} holds "
            f"{about.get('from', {}).get('source', 'no head')}: run `dvc repro vocab`"
        )
    if about["vocabulary"] != tables_in_use:
        raise ValueError(
            f"the vocabulary mapping is not that of train.from {chosen.from_.source}, whose "
            "lm_head would mean other tokens under it: run `dvc repro -f vocab`"
        )
    wanted = _wanted(chosen, around, verifier_head)
    differing = [
        *_geometry_misfits(wanted, flattened(read_object(folder / "config.json"))),
        *_tensor_misfits(shapes_of(_as_head(wanted, around)), tensor_shapes(folder)),
    ]
    if differing:
        raise ValueError(
            f"train.from {chosen.from_.source} is another model than train.draft {chosen.draft}: "
            f"{'; '.join(differing)}. Give its config.json as train.draft (file:PATH), and these "
            "parameters its values"
        )


def load_weights(model: Any, folder: Path) -> None:
    """Put a head's weights into a draft model; `check_start` has compared them.

    Raises:
        ValueError: naming tensors that found no place, or none in the file.
    """
    weights = load_file(folder / WEIGHTS)
    missing, unknown = model.load_state_dict(weights, strict=False)
    lost = {name for name in missing if not name.startswith("verifier_")} - {*OPTIONAL, "d2t"}
    if lost or unknown:
        raise ValueError(
            f"{folder} lacks {', '.join(sorted(lost)) or 'nothing'}, and the draft model has no "
            f"place for {', '.join(sorted(unknown)) or 'nothing'} of it"
        )


def _wanted(chosen: Train, around: Surroundings, verifier_head: Path) -> dict[str, Any]:
    """The config of the draft model that is to be trained, flat."""
    draft = check_draft(chosen, around)
    flags = {"norm_before_fc": chosen.norm_before_fc, "norm_output": chosen.norm_output}
    return {
        **decoder_config(verifier_head, chosen, "llama", draft).to_dict(),
        **flags,
        **further_flags(draft),
        "eagle_aux_hidden_state_layer_ids": around.aux_layer_ids,
    }


def _as_head(wanted: dict[str, Any], around: Surroundings) -> Eagle3SpeculatorConfig:
    flags = ("norm_before_fc", "fc_norm", "eagle_aux_hidden_state_layer_ids")
    return Eagle3SpeculatorConfig(
        transformer_layer_config=LlamaConfig.from_dict(wanted),
        draft_vocab_size=around.draft_vocab_size,
        **{flag: wanted[flag] for flag in flags if flag in wanted},
    )


def _geometry_misfits(wanted: dict[str, Any], given: dict[str, Any]) -> list[str]:
    ours, theirs = geometry(wanted), geometry(given)
    return [
        f"{_PARAMETERS.get(key, key)} is {json.dumps(ours[key])} and the head's "
        f"{json.dumps(theirs[key])}"
        for key in ours
        if ours[key] != theirs[key]
    ]


def _tensor_misfits(wanted: Shapes, given: Shapes) -> list[str]:
    missing = sorted(wanted.keys() - given.keys() - OPTIONAL)
    return [
        *([f"the head has no {', '.join(missing)}"] if missing else []),
        *(f"the head's {name} has no place" for name in sorted(given.keys() - wanted.keys())),
        *(
            f"{name} is {wanted[name]} and the head's {given[name]}"
            for name in sorted(wanted.keys() & given.keys())
            if wanted[name] != given[name]
        ),
    ]
