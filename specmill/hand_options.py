"""Options and gates written by hand, in decisions.yaml beside params.yaml; there may be no file.

    options:
      - name: the head that the vendor published for the earlier release
        status: pending              # or ruled out; pending if left out
        reason: it was trained for another verifier and never served here
        gate: its acceptance at position 0, offline, is above 0.4
    gates:                           # in place of the one that is computed
      eagle3, K=3: the all-reduce takes less than half of a step

Names, reasons and gates are one line each, without `|`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from specmill.options import BY_HAND, PENDING, Option
from specmill.params_file import read_yaml
from specmill.section import Section

Line = Annotated[str, Field(pattern=r"^[^|\n\r]*[^\s|][^|\n\r]*$")]
"""Text that fits into a line of a table."""


class HandOption(Section):
    """An option that nothing here measures or predicts."""

    name: Line
    reason: Line
    """Why it has the status it has: its evidence."""
    gate: Line | None
    """What would have to be the case for another one."""
    status: Literal["pending", "ruled out"] = "pending"
    """Nothing is adopted by hand."""


class Decisions(Section):
    """All of decisions.yaml."""

    options: list[HandOption] = Field(default_factory=list)
    gates: dict[Line, Line] = Field(default_factory=dict)
    """Gate by the name of an option that is computed."""

    @model_validator(mode="after")
    def _names_are_distinct(self) -> "Decisions":
        names = [option.name for option in self.options]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"options has {twice[0]!r} twice")
        return self


def read_decisions(path: Path) -> Decisions:
    """What was written by hand; nothing when there is no file.

    Raises:
        ValueError: naming the file and every key that is wrong.
    """
    if not path.is_file():
        return Decisions()
    try:
        return Decisions.model_validate(read_yaml(path) or {})
    except ValidationError as error:
        lines = [
            f"  {'.'.join(map(str, item['loc'])) or 'decisions'}: "
            + item["msg"].removeprefix("Value error, ")
            for item in error.errors()
        ]
        raise ValueError("\n".join([f"{path} is not valid:", *lines])) from None


def with_hand(options: list[Option], written: Decisions) -> list[Option]:
    """The options with those written by hand, and with the gates written for them.

    A gate for an option that is not there is kept as one without evidence.

    Raises:
        ValueError: when an option has the name of one that is computed.
    """
    computed = {option.name for option in options}
    for one in written.options:
        if one.name in computed:
            raise ValueError(
                f"decisions.yaml: options has {one.name!r}, which is computed; write its gate "
                "below `gates`, or choose another name"
            )
    by_hand = [
        Option(one.name, None, None, one.status, [one.reason], one.gate, BY_HAND)
        for one in written.options
    ]
    kept = [*options, *by_hand]
    known = {option.name for option in kept}
    orphans = [
        Option(name, None, None, PENDING, ["Not measured and not predicted."], gate, BY_HAND)
        for name, gate in written.gates.items()
        if name not in known
    ]
    gated = [replace(one, gate=written.gates.get(one.name, one.gate)) for one in kept]
    return gated + orphans
