"""A row of a bench's result: what it is about, and what it is called."""

from typing import Any

PLACE = ("num_speculative_tokens", "concurrency", "rate", "context", "category")
"""What a row is about; its other fields are figures."""

Row = dict[str, Any]

Results = dict[str, dict[str, Any]]
"""reports/bench/NAME.json by name."""


def load_name(row: Row) -> str:
    """`c8`, or `r2.5` of an open loop, and `_ctx1024` behind it when there is a context."""
    load = f"r{row['rate']:g}" if row["concurrency"] is None else f"c{row['concurrency']}"
    return load + (f"_ctx{row['context']}" if row["context"] else "")


def load_label(row: Row) -> str:
    """The same for people: `8 in flight`, `8 in flight +1024`, `2.5/s`."""
    load = f"{row['rate']:g}/s" if row["concurrency"] is None else f"{row['concurrency']} in flight"
    return load + (f" +{row['context']}" if row["context"] else "")


def load_sentence(row: Row) -> str:
    """The same in words, for headings."""
    count = f"{row['rate']:g}" if row["concurrency"] is None else str(row["concurrency"])
    load = f"{count} request{'' if count == '1' else 's'} "
    load += "per second" if row["concurrency"] is None else "in flight"
    return load + (f", {row['context']} tokens of context" if row["context"] else "")


def load_order(row: Row) -> tuple[bool, int, float]:
    """To sort loads by: those in flight first, then by context, then by requests."""
    requests = row["concurrency"] if row["rate"] is None else row["rate"]
    return row["rate"] is not None, row["context"], requests


def headline_rows(result: dict[str, Any]) -> list[Row]:
    """The rows of spec.tokens, of all rows over spec.tokens and spec.sweep."""
    k = result["num_speculative_tokens"]
    return [row for row in result["rows"] if row["num_speculative_tokens"] == k]
