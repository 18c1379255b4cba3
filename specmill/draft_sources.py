"""The shape of the draft model and the head to start from, looked at before anything runs.

Called by the stage `sources`, which always runs. The verifier may not have been fetched yet; what
its config says is checked as soon as that is on this machine, and by `train` in any case.
"""

from pathlib import Path
from typing import Any

from specmill import paths
from specmill.draft_config import Surroundings, check_draft, flattened, read_draft
from specmill.files import file_digest, read_json, read_object
from specmill.layers import aux_layer_ids
from specmill.params import Params, Train, Verifier
from specmill.sources import identify_head
from specmill.text_decoder import text_config


def check_shape(params: Params) -> None:
    """Refuse a draft model that does not fit the verifier, as far as that is known here.

    Raises:
        ValueError: as `check_draft`; when `vocab` has another size than the geometry.
    """
    draft = read_draft(params.train.draft)
    if draft is None:
        return
    size = params.vocab.draft_vocab_size
    if (own := draft.get("draft_vocab_size", size)) != size:
        raise ValueError(
            f"train.draft {params.train.draft} has draft_vocab_size {own}, and "
            f"vocab.draft_vocab_size is {size}: write {own}"
        )
    verifier = verifier_config(params.verifier)
    if verifier is not None:
        ids = aux_layer_ids(params.extract.aux_layer_ids, verifier["num_hidden_layers"])
        source, longest = params.verifier.source, params.verifier.max_model_len
        check_draft(params.train, Surroundings(verifier, source, size, ids, longest))


def verifier_config(chosen: Verifier) -> dict[str, Any] | None:
    """The text config of a verifier, without the network; None when it is not here yet."""
    kind, _, place = chosen.source.partition(":")
    if kind == "folder":
        return text_config(read_object(Path(place) / "config.json"))
    if kind == "hub":
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(place, "config.json", revision=chosen.revision)
        return text_config(read_json(Path(found))) if isinstance(found, str) else None
    if not paths.HEAD_IDENTITY.is_file():
        return None
    origin = read_json(paths.HEAD_IDENTITY)["origin"]
    is_it = origin.startswith(f"GGUF of package {place},")
    return read_object(paths.VERIFIER_HEAD / "config.json") if is_it else None


def identify_draft(draft: str) -> dict[str, Any]:
    """What a draft model's shape depends on: its name, and a file's content."""
    described = {"draft": draft}
    if not draft.startswith("file:"):
        return described
    return described | {"sha256": file_digest(Path(draft.partition(":")[2]))}


def identify_start(chosen: Train, draft_vocab_size: int) -> dict[str, Any]:
    """What the head that training starts from depends on; as `identify_head`.

    Args:
        chosen: Of params.yaml: train.
        draft_vocab_size: Of vocab.

    Raises:
        ValueError: when a folder is not there, holds no head of this vocabulary, or is the one that
            training writes.
    """
    head = chosen.from_
    if head is None:
        return {"source": None}
    kind, _, place = head.source.partition(":")
    if kind == "folder":
        _check_folder(Path(place), head.source, draft_vocab_size)
    return identify_head(head)


def _check_folder(folder: Path, source: str, draft_vocab_size: int) -> None:
    if folder.resolve() == paths.EAGLE3.resolve():
        raise ValueError(
            f"train.from is {source}, which training replaces, so that it would start from another "
            "head each time: copy it to a folder of its own"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(f"train.from is {source}, but {folder.absolute()} holds no config.json")
    own = flattened(read_object(folder / "config.json")).get("draft_vocab_size", draft_vocab_size)
    if own != draft_vocab_size:
        raise ValueError(
            f"train.from {source} has a draft vocabulary of {own}, and vocab.draft_vocab_size is "
            f"{draft_vocab_size}: write {own}"
        )
