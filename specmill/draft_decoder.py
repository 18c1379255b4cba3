"""The decoder of a draft model as transformers' config: after the verifier, or as train.draft says.

After the verifier it is what speculators derives (train/cli.py, create_transformer_layer_config).
Otherwise it is the given config, with the attention window of `train`.
"""

from pathlib import Path
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError
from speculators.train.cli import create_transformer_layer_config
from transformers import LlamaConfig, PreTrainedConfig

from specmill.draft_config import HEAD_KEYS, Config, Surroundings
from specmill.files import read_json, read_object
from specmill.params import Train
from specmill.text_decoder import text_config

_OTHERS = ("architectures", "auto_map", "eagle_config", "model_type", "transformers_version")
"""Of a config, what names whose it is."""


def decoder_config(
    verifier_head: Path, chosen: Train, kind: Literal["llama", "qwen3"], draft: Config | None
) -> PreTrainedConfig:
    """The config of a draft model's decoder layers.

    Args:
        verifier_head: What training needs of the verifier.
        chosen: Number of layers and attention window.
        kind: Whose layers it has; of a given geometry Llama's.
        draft: The geometry (`check_draft`); None takes the verifier's.

    Raises:
        ValueError: when transformers makes no config of the geometry.
    """
    layers, window = chosen.num_layers, chosen.sliding_window
    if draft is None:
        config = create_transformer_layer_config(
            verifier_name_or_path=str(verifier_head),
            num_layers=layers,
            draft_arch=kind,
            hidden_act=None,
            sliding_window=window or 0,
            full_attention_indices=[] if window else list(range(layers)),
        )
    else:
        own = {key: value for key, value in draft.items() if key not in (*HEAD_KEYS, *_OTHERS)}
        layer_type = "sliding_attention" if window else "full_attention"
        own |= {
            "tie_word_embeddings": False,
            "use_sliding_window": window is not None,
            "layer_types": [layer_type] * layers,
        }
        try:
            config = LlamaConfig.from_dict(own)
        except (StrictDataclassError, TypeError) as error:
            raise ValueError(f"train.draft {chosen.draft} is no Llama's config: {error}") from None
    config.sliding_window = window
    return config


def further_flags(draft: Config | None) -> dict[str, Any]:
    """What a geometry says of a head that no parameter does, as speculators' model is told it."""
    given = draft or {}
    flags = ("norm_before_residual", "fc_norm")
    return {flag: bool(given[flag]) for flag in flags if flag in given}


def surroundings(verifier_head: Path, draft_vocab_size: int, aux_ids: list[int]) -> Surroundings:
    """What a draft model has to fit, by the verifier's slice.

    Args:
        verifier_head: The slice; identity.json in it says for how many tokens engines are started.
        draft_vocab_size: Of the mapping that it trains with.
        aux_ids: Depths whose states it is fed.
    """
    config = text_config(read_object(verifier_head / "config.json"))
    identity = verifier_head / "identity.json"
    about = read_json(identity) if identity.is_file() else {}
    return Surroundings(
        config,
        about.get("name", verifier_head.name),
        draft_vocab_size,
        aux_ids,
        about.get("max_model_len"),
    )
