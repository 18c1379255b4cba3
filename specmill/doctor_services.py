"""The doctor on what lies outside this process: Git, DVC's remotes, MLflow, other servers."""

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from specmill import paths
from specmill.finding import Finding
from specmill.params import Params
from specmill.revision import git_state

_WAIT_S = 15.0
_NO_REMOTE = "runs go on without it; dvc push and pull do not (dvc remote list)"


def check_git(root: Path) -> list[Finding]:
    """Whether results will say which commit they are of."""
    state = git_state(root)
    if not state:
        return [Finding("problem", "git", "no repository with a commit here",
                        "dvc exp run and provenance need one: git init, git commit")]  # fmt: skip
    commit = state["git.commit"][:10]
    if state["git.dirty"] == "true":
        return [Finding("warning", "git", f"{commit} with changes",
                        "results will say so; commit before a run that counts")]  # fmt: skip
    return [Finding("ok", "git", f"{commit}, no changes")]


def check_remotes(root: Path, wait_s: float = _WAIT_S) -> list[Finding]:
    """Whether each DVC remote can be reached."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(str(root)) as repo:
            remotes = {name: str(one["url"]) for name, one in repo.config["remote"].items()}
    except DvcException as error:
        return [Finding("problem", "dvc", str(error), "dvc init, or run in the repository")]
    return [_remote(root, name, url, wait_s) for name, url in remotes.items()]


def cache_is_linked(root: Path) -> bool:
    """Whether DVC's cache and the workspace share files (`cache.type`), so that each is kept once.

    Not where DVC is not set up, of which `check_remotes` tells.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(str(root)) as repo:
            return bool({"hardlink", "symlink"} & set(repo.config["cache"].get("type") or []))
    except DvcException:
        return False


_ASK = """
import sys
from dvc.repo import Repo
store = Repo(sys.argv[1]).cloud.get_remote_odb(sys.argv[2])
try:
    store.fs.info(store.path)  # `exists` takes a store that is away for an empty one
except FileNotFoundError:
    pass  # nothing was pushed yet
"""


def _remote(root: Path, name: str, url: str, wait_s: float) -> Finding:
    check = f"dvc remote {name}"
    if "://" not in url:
        place = Path(url).expanduser()
        while not place.exists():
            place = place.parent
        if os.access(place, os.W_OK):
            return Finding("ok", check, f"{url} can be written")
        return Finding("warning", check, f"{place} cannot be written", _NO_REMOTE)

    if url.startswith("http"):  # whose driver says of any fault that there is no such file
        fault = _silent(url, wait_s)
        if fault:
            return Finding("warning", check, f"{url}: {fault}", _NO_REMOTE)
        return Finding("ok", check, f"{url} answers")
    # a process of its own: drivers of S3, SSH and others wait for minutes, each in its own way
    command = [sys.executable, "-c", _ASK, str(root), name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=wait_s)
    except subprocess.TimeoutExpired:
        return Finding("warning", check, f"{url} did not answer in {wait_s:g} s", _NO_REMOTE)
    if done.returncode:
        fault = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        return Finding("warning", check, f"{url}: {fault}"[:300], _NO_REMOTE)
    return Finding("ok", check, f"{url} answers")


def check_tracking(root: Path, params: Params, wait_s: float = _WAIT_S) -> list[Finding]:
    """Whether MLflow's server answers, or its file can be written."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or params.runtime.tracking_uri
    without = "stages go on without; python -m specmill.sync adds results later"
    if uri and uri.startswith("http"):
        fault = _unhealthy(f"{uri.rstrip('/')}/health", wait_s)
        if fault:
            return [Finding("warning", "mlflow", f"{uri}: {fault}", without)]
        return [Finding("ok", "mlflow", f"{uri} answers")]
    if uri:
        return [Finding("ok", "mlflow", f"{uri}, not looked at")]
    file = root / "mlflow.db"
    if os.access(file if file.exists() else root, os.W_OK):
        return [Finding("ok", "mlflow", "mlflow.db beside dvc.yaml")]
    return [Finding("warning", "mlflow", f"{file} cannot be written", without)]


def check_endpoints(params: Params, wait_s: float = _WAIT_S) -> list[Finding]:
    """Whether the servers of runtime.extract_endpoints answer."""
    found = []
    for url in params.runtime.extract_endpoints:
        fault = _unhealthy(f"{url}/health", wait_s)
        found.append(
            Finding("problem", "endpoint", f"{url}: {fault}", "start it with `python -m "
                    "specmill.serve_states`, or set runtime.extract_endpoints: []")
            if fault else Finding("ok", "endpoint", f"{url} is healthy")
        )  # fmt: skip
    return found


def check_hub(params: Params, wait_s: float = _WAIT_S) -> list[Finding]:
    """Whether the Hub answers, where something is read from it."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    sources = [params.verifier.source]
    sources += [one.source for one in (*params.prepare.dataset, *params.prepare.bench)]
    sources += [head.source for head in params.heads.values()]
    wanted = [source for source in sources if source.startswith("hub:")]
    if not wanted:
        return []
    if HF_HUB_OFFLINE:
        return [Finding("ok", "hub", f"offline: {', '.join(wanted)} come from the cache")]
    if fault := _silent(ENDPOINT, wait_s):
        return [
            Finding(
                "problem",
                "hub",
                f"{urlsplit(ENDPOINT).netloc} does not answer: {fault}",
                f"needed for {', '.join(wanted)}; HF_HUB_OFFLINE=1 takes what is cached",
            )
        ]
    return [Finding("ok", "hub", f"{urlsplit(ENDPOINT).netloc} answers")]


def _unhealthy(url: str, wait_s: float) -> str:
    """Why a server is not healthy; empty when it is."""
    try:
        status = httpx.get(url, timeout=wait_s, trust_env=False).status_code
    except (httpx.TransportError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return "" if status == 200 else f"status {status}"


def _silent(url: str, wait_s: float) -> str:
    """Why there is no answer at all; empty when there is any."""
    try:
        httpx.head(url, timeout=wait_s)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return ""


def check_all(params: Params) -> list[Finding]:
    """Everything of this file."""
    return [
        *check_git(paths.ROOT),
        *check_remotes(paths.ROOT),
        *check_tracking(paths.ROOT, params),
        *check_endpoints(params),
        *check_hub(params),
    ]
