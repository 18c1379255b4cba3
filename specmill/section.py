"""What every section of params.yaml is: frozen and strict."""

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Entry = TypeVar("Entry")

Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$")]
"""What a row, a head or a file is called: DVC hands it to a shell, and it is a part of paths."""
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent type conversion."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # docs/params.md is made of them
        serialize_by_alias=True,  # a key that Python reserves is a field of another name
    )


class NoSettings(Section):
    """The settings of a method that has none."""


class DoesNotFit(ValueError):
    """Raised where a method cannot serve this verifier: its row says why instead of figures."""


def entry(section: str, entries: Mapping[str, Entry], name: str) -> Entry:
    """The entry `name` of a section that is a mapping of names.

    Raises:
        ValueError: naming the section and what it has.
    """
    if name not in entries:
        has = ", ".join(entries) or "no entry"
        raise ValueError(f"params.yaml: {section} has no {name!r}; it has {has}")
    return entries[name]
