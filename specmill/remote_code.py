"""Code in a model's own repository, as some tokenizers are: run only where params.yaml trusts it.

transformers asks at the terminal when nobody has said yes or no, so that no is always said. Configs
are of classes that transformers has itself, for training needs those.
"""

from pathlib import Path
from typing import Any

from specmill.files import read_json

TRUST = "trust_remote_code"
"""Of params.yaml: verifier, and of identity.json, which has it only where it is true."""


def is_trusted(identity: Path) -> bool:
    """Whether the verifier of an identity.json may run code; without that file it may not."""
    return identity.is_file() and bool(read_json(identity).get(TRUST, False))


def load_own_tokenizer(model: Path, *, trusted: bool) -> Any:
    """The tokenizer of a checkpoint.

    Args:
        model: The checkpoint.
        trusted: Whether code in its folder may run.

    Raises:
        ValueError: when it is code that may not, or code of another repository, which no revision
            pins and no fingerprint covers.
    """
    from transformers import AutoTokenizer

    if trusted:
        _refuse_elsewhere(model)
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trusted)
    except ValueError as error:
        if trusted or TRUST not in str(error):
            raise
        raise ValueError(
            f"the tokenizer of {model} is code in its folder; read it, then set "
            "verifier.trust_remote_code: true to run it, here and in every engine"
        ) from None


def _refuse_elsewhere(model: Path) -> None:
    for file in ("config.json", "tokenizer_config.json", "processor_config.json"):
        mapped = read_json(model / file).get("auto_map", {}) if (model / file).is_file() else {}
        for value in mapped.values():
            for name in value if isinstance(value, list) else [value]:
                if name and "--" in name:
                    raise ValueError(
                        f"{model / file} wants code of {name.split('--')[0]}, another repository; "
                        "put it into the model's folder and name it without `--`"
                    )
