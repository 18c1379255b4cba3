"""Keeping what is secret out of logs and messages: passwords in URLs, and keys of the environment.

Errors of MLflow, DVC and HTTP clients quote the URL that they failed at, userinfo and all.
"""

import logging
import os
import re

_SECRET_NAME = re.compile(r"(KEY|KEY_ID|TOKEN|SECRET|PASSWORD|PASSWD)$")
"""How variables end whose value nobody may see: HF_TOKEN, AWS_SECRET_ACCESS_KEY."""
_SHORTEST = 6
"""Characters of a secret: shorter values, as `true`, are words that stand in any message."""
_PASSWORD = re.compile(r"(?i)\b(https?://)[^/\s?#]+@|\b([a-z][a-z0-9+.-]*://)[^/\s?#:@]*:[^/\s]*@")


def masked(text: str) -> str:
    """`text` without userinfo in URLs and without the value of any secret variable."""
    text = _PASSWORD.sub(lambda found: f"{found[1] or found[2]}***@", text)
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, f"${name}")
    return text


class MaskedFormatter(logging.Formatter):
    """Masks whole records, tracebacks and those of other libraries too."""

    def format(self, record: logging.LogRecord) -> str:
        """The line that is written."""
        return masked(super().format(record))
