"""One file per speculative method, one row here.

A method says what it can be told (`Settings`) and what vLLM is told: a function of K, the settings,
the artefact it serves and the verifier, which returns the `--speculative-config`, or None to serve
without speculation. Rows of the comparison are entries of params.yaml: `methods`; several may be
served by one method. A method that serves an artefact also says how the sampling check gets one
(`draft_on_twin`).
"""

from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from specmill import paths
from specmill.methods import dflash, draft_model, eagle3, medusa, ngram, none, peagle, suffix
from specmill.params import Method, Params

METHODS: dict[str, ModuleType] = {
    "none": none,
    "ngram": ngram,
    "suffix": suffix,
    "eagle3": eagle3,
    "peagle": peagle,
    "dflash": dflash,
    "medusa": medusa,
    "draft_model": draft_model,
}


def speculative_configs(
    name: str, chosen: Method, ks: list[int], verifier: dict[str, Any]
) -> dict[int, dict[str, Any] | None]:
    """What vLLM is told for a row at every K; None without speculation.

    Raises:
        DoesNotFit: when the row's artefact cannot serve this verifier.
        ValueError: when its parameters are wrong.
    """
    settings = read_settings(name, chosen)
    make = METHODS[chosen.method].speculative_config
    return {k: make(k, settings, Path(chosen.head), verifier) for k in ks}


def draft_on_twin(name: str, chosen: Method, make: Any, folder: Path) -> None:
    """Write what a row's method drafts with on the sampling check's twin, if it serves an artefact.

    Args:
        name: The row.
        chosen: Its entry of params.yaml; its own artefact is not asked for.
        make: A TwinDrafts.
        folder: Receives the artefact.

    Raises:
        ValueError: as `read_settings`.
    """
    read_settings(name, chosen)
    write = getattr(METHODS[chosen.method], "draft_on_twin", None)
    if write is not None:
        write(make, folder)


def read_settings(name: str, chosen: Method) -> Any:
    """`methods.NAME.settings` as the method's own `Settings`.

    Raises:
        ValueError: naming the method that is not known, or the setting that is wrong.
    """
    if chosen.method not in METHODS:
        raise ValueError(
            f"methods.{name}.method: there is no method {chosen.method!r}; there are "
            f"{', '.join(METHODS)} (specmill/methods)"
        )
    known = METHODS[chosen.method].Settings
    for key in chosen.settings.keys() - known.model_fields.keys():
        near = get_close_matches(key, known.model_fields, n=1, cutoff=0.5)
        raise ValueError(
            f"methods.{name}.settings.{key}: there is no such key; "
            + (f"did you mean {near[0]}?" if near
               else f"{chosen.method} has {', '.join(known.model_fields) or 'none'}")
        )  # fmt: skip
    try:
        return known.model_validate(chosen.settings)
    except ValidationError as error:
        wrong = [
            ".".join([f"methods.{name}.settings", *map(str, item["loc"])])
            + f": {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors()
        ]
        raise ValueError("\n".join(wrong)) from None


def check_methods(params: Params) -> None:
    """Refuse entries of `methods` that no stage could serve.

    Raises:
        ValueError: naming what is not known, or the artefact that no stage makes.
    """
    made_here = {str(paths.EAGLE3), str(paths.VERIFIER), str(paths.IDENTITY)}
    for folder, names in (
        (paths.SIBLINGS, params.siblings),
        (paths.MEDUSA, params.medusa),
        (paths.DRAFT, params.draft_models),
        (paths.HEADS, params.heads | params.foreign_heads | params.spoiled_heads),
    ):
        made_here |= {str(folder / name) for name in names}
    for name, chosen in params.methods.items():
        read_settings(name, chosen)
        if chosen.head not in made_here and not Path(chosen.head).exists():
            raise ValueError(
                f"methods.{name}.head is {chosen.head}, which is not there and which no stage "
                f"makes; there are {', '.join(sorted(made_here))}"
            )
