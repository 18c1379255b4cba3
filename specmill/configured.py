"""A verifier's config, and the names of its tensors, without loading or downloading weights."""

import json
import tempfile
from pathlib import Path
from typing import Any

from specmill.cut import read_header
from specmill.dequantised import gguf_file
from specmill.files import read_json, write_json
from specmill.params import Verifier
from specmill.relaid import relaid_config


def verifier_config(given: Path | None, chosen: Verifier) -> dict[str, Any]:
    """Content of a verifier's config.json.

    Args:
        given: A config.json or its folder, instead of what is chosen.
        chosen: params.yaml: verifier. Of a Hub model the config is downloaded, if it is not in the
            cache; of a GGUF file the metadata are read.

    Raises:
        ValueError: when it is not to be had.
    """
    kind, _, place = chosen.source.partition(":")
    if given is None and kind == "wheel":
        config = _of_gguf(gguf_file(place))
    else:
        config = read_json(_config_file(given, chosen))
    if given is None and chosen.experts is not None:
        with tempfile.TemporaryDirectory() as dense:
            write_json(Path(dense) / "config.json", config)
            config = _as_written(relaid_config(Path(dense), chosen.experts))
    return config


def weight_dtypes(given: Path | None, chosen: Verifier) -> dict[str, str]:
    """Of the verifier's tensors by name, as safetensors calls them; {} when they are not here."""
    if given is None and (chosen.source.startswith("wheel:") or chosen.experts is not None):
        return {}
    files = sorted(_config_file(given, chosen).parent.glob("*.safetensors"))
    headers = [read_header(file)[0] for file in files]
    return {name: tensor["dtype"] for header in headers for name, tensor in header.items()}


def _config_file(given: Path | None, chosen: Verifier) -> Path:
    kind, _, place = chosen.source.partition(":")
    if given is None and kind == "hub":
        return _from_hub(place, chosen.revision)
    folder = Path(place) if given is None else given
    file = folder / "config.json" if folder.is_dir() else folder
    if not file.is_file():
        raise ValueError(f"{file.absolute()} is not there; name a model's folder or a config.json")
    return file


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as error:
        raise ValueError(
            f"config.json of verifier.source hub:{name} at revision {revision} cannot be had: "
            f"{error}"
        ) from None


def _of_gguf(file: Path) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    # the class that it is made into; a GGUF file names none
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return _as_written(config)


def _as_written(config: Any) -> dict[str, Any]:
    """What transformers would write to config.json, with what it would leave to its defaults."""
    content: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return content
