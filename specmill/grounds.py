"""What a decision is made of: results, predictions, and what is known of the trained head."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmill.files import read_json
from specmill.params import Method
from specmill.rows import Results, Row, load_label, load_order
from specmill.samples import ALL


@dataclass(frozen=True)
class Grounds:
    """Content of files below reports; None, or an empty list of rows, where there is no file."""

    results: Results
    """reports/bench/NAME.json by name, what was found out about sampling in `sampling`."""
    methods: Mapping[str, Method]
    """Entries of params.yaml: `methods`."""
    hardware: dict[str, Any]
    predicted: dict[str, Any] | None = None
    schedules: dict[str, Any] | None = None
    check: dict[str, Any] | None = None
    curves: dict[str, Any] | None = None
    training: list[Row] | None = None
    """reports/plots/train.json: held-out accuracy by epoch and position."""
    prepared: dict[str, Any] | None = None
    vocab: dict[str, Any] | None = None

    @classmethod
    def read(
        cls,
        reports: Path,
        results: Results,
        methods: Mapping[str, Method],
        hardware: dict[str, Any],
    ) -> "Grounds":
        """Read what there is besides the results.

        Raises:
            ValueError: naming a file that is not JSON.
        """
        files = {
            "predicted": "predicted.json",
            "schedules": "schedule.json",
            "check": "check.json",
            "curves": "curves.json",
            "training": "plots/train.json",
            "prepared": "prepare.json",
            "vocab": "vocab.json",
        }
        found = {
            name: read_json(reports / file)
            for name, file in files.items()
            if (reports / file).is_file()
        }
        return cls(results, methods, hardware, **found)

    def measured(self, name: str, k: int) -> list[Row]:
        """Rows of a method at one K over all prompt types that have a speed-up."""
        return [
            row
            for row in self.results.get(name, {"rows": []})["rows"]
            if row["num_speculative_tokens"] == k
            and row["category"] == ALL
            and row.get("speedup") is not None
        ]

    def foreseen(self, name: str, k: int) -> dict[int, Row]:
        """Predicted rows of a method at one K over all prompt types, by requests in flight."""
        rows = self.predicted["rows"] if self.predicted else []
        return {
            row["concurrency"]: row
            for row in rows
            if (row["method"], row["k"], row["category"]) == (name, k, ALL)
        }

    def load_labels(self) -> list[str]:
        """Every load that something was measured at or predicted for, in order."""
        rows = [row for result in self.results.values() for row in result["rows"]]
        predicted = self.predicted["rows"] if self.predicted else []
        rows += [in_flight(row["concurrency"]) for row in predicted]
        return list(dict.fromkeys(load_label(row) for row in sorted(rows, key=load_order)))

    def heads(self, name: str, k: int) -> dict[int, list[Row]]:
        """What heads of other acceptance would bring, by requests in flight; poorest first."""
        found: dict[int, list[Row]] = {}
        for row in self.predicted["better_head"] if self.predicted else []:
            if (row["method"], row["k"]) == (name, k):
                found.setdefault(row["concurrency"], []).append(row)
        return {
            load: sorted(rows, key=lambda row: float(row["tokens_per_step"]))
            for load, rows in sorted(found.items())
        }


def plain_load(row: Row) -> int | None:
    """Requests in flight of a measured row that predictions speak of; None of any other."""
    load: int | None = row["concurrency"]
    return None if row["context"] else load


def in_flight(requests: int) -> Row:
    """Such a load as the coordinates of a row, to be named (specmill.rows)."""
    return {"concurrency": requests, "rate": None, "context": 0}
