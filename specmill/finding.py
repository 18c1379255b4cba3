"""What a check of `make doctor` found, and what to do about it."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's answer."""

    level: Level
    """`problem`: the pipeline would end, or measure something else; `warning`: it may."""
    check: str
    """What was looked at."""
    found: str
    do: str = ""
    """The way out; empty where all is well."""

    @property
    def line(self) -> str:
        """As it is printed."""
        return f"{self.level:8} {self.check}: {self.found}" + (f"; {self.do}" if self.do else "")
