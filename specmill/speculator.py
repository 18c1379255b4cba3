"""A checkpoint in speculators' format, as its config.json describes it; read without torch."""

from pathlib import Path

from specmill.files import read_json


def check_type(head: Path, method: str) -> None:
    """Refuse a head of another type than the method that is to serve it.

    vLLM takes the type from the checkpoint and how it drafts from what it is told: a head of
    another type loads, and drafts from weights that it leaves out or never had.

    Raises:
        ValueError: naming the method that serves it.
    """
    found = read_json(head / "config.json").get("speculators_model_type")
    if found != method:
        raise ValueError(f"{head} is a head of type {found}: serve it with method {found}")
