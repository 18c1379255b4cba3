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


def load_sentence(row: Row) -> str:
    """The same in words, for headings."""
    if row["concurrency"] is None:
        load = f"{row['rate']:g} requests a second arriving"
    else:
        load = f"{row['concurrency']} request{'s' if row['concurrency'] > 1 else ''} in flight"
    return load + (f", {row['context']} tokens of context" if row["context"] else "")


def headline_rows(result: dict[str, Any]) -> list[Row]:
    """The rows of spec.tokens, of all rows over spec.tokens and spec.sweep."""
    k = result["num_speculative_tokens"]
    return [row for row in result["rows"] if row["num_speculative_tokens"] == k]
