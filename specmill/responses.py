"""The verifier's answers, kept by content: a prompt that was answered is not answered again.

The key of an answer is everything that shapes it: the messages, the verifier's identity and the
sampling parameters. One append-only JSON Lines file; a line torn by an interruption is skipped.
"""

import fcntl
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specmill.client import Answer
from specmill.files import digest

_FORMAT = 1
_SYNC_S = 1.0
"""How much of the answers may be lost to a power cut. A kill of the process loses none."""


def response_key(
    messages: list[dict[str, Any]], verifier: dict[str, Any], sampling: dict[str, Any]
) -> str:
    """Digest of all that shapes an answer."""
    return digest(
        {
            "format": _FORMAT,
            "messages": messages,
            "verifier": {
                name: verifier[name]
                for name in ("fingerprint", "chat_template", "dtype", "max_model_len")
            },
            "sampling": sampling,
        }
    )


class ResponseCache:
    """Answers by key, in memory and in one file."""

    def __init__(self, path: Path):
        self._path = path
        self._synced_at = 0.0
        self._known: dict[str, Answer] = {}
        if path.exists():
            for line in path.read_bytes().split(b"\n"):
                try:
                    row = json.loads(line)
                    self._known[row["key"]] = Answer(**row["answer"])
                except (ValueError, TypeError, KeyError):
                    continue  # a line that an interruption cut; its prompt is simply asked again

    def get(self, key: str) -> Answer | None:
        """The answer kept under `key`, or None."""
        return self._known.get(key)

    def add(self, key: str, answer: Answer) -> None:
        """Keep `answer`: in its file when this returns, on the disk with what follows in a second.

        Waiting for the disk each time would hold up every request in flight.
        """
        self._known[key] = answer
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"key": key, "answer": asdict(answer)}, ensure_ascii=False)
        with self._path.open("ab+") as out:
            fcntl.flock(out, fcntl.LOCK_EX)
            if out.tell() and out.seek(-1, os.SEEK_END) >= 0 and out.read(1) != b"\n":
                out.write(b"\n")  # close a torn line
            out.write(line.encode() + b"\n")
            out.flush()
            if time.monotonic() - self._synced_at > _SYNC_S:
                os.fsync(out.fileno())
                self._synced_at = time.monotonic()
