"""What every section of params.yaml is: frozen and strict."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent type conversion."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # docs/params.md is made of them
    )


class NoSettings(Section):
    """The settings of a method that has none."""


class DoesNotFit(ValueError):
    """Raised where a method cannot serve this verifier: its row says why instead of figures."""
