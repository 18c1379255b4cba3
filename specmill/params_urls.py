"""URLs in params.yaml: it is in Git and in MLflow, so that none may hold a password."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from specmill.masked import masked


def _endpoints(urls: list[str]) -> list[str]:
    """Base URLs, each once, without a slash at the end."""
    for url in urls:
        host = r"([\w.\-]+|\[[0-9a-f:]+\])"
        if not re.fullmatch(rf"https?://{host}(:[0-9]+)?/?", url) or urlsplit(url).port == 0:
            raise ValueError(f"{url!r} is no server; write http:// and host:port")
    bare = [url.rstrip("/") for url in urls]
    if len(set(bare)) != len(bare):
        raise ValueError(f"a server is named twice in {urls}")
    return bare


Endpoints = Annotated[list[str], AfterValidator(_endpoints)]


def _without_password(uri: str | None) -> str | None:
    if uri is not None and masked(uri) != uri:
        raise ValueError(
            "params.yaml is in Git, and this has a password; set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI with all of it, in the environment"
        )
    return uri


TrackingUri = Annotated[str | None, AfterValidator(_without_password)]
