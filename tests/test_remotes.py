"""The pipeline's data through DVC remotes: a folder, an S3 server, an SSH server; loopback only.

Real DVC and stand-in stages: one repository pushes, clones of it pull. Each kind of remote can
give, change and lose single objects behind DVC's back, and hold one back while a client waits.
"""

import asyncio
import contextlib
import copy
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import textwrap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh
import httpx
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from ruamel.yaml import YAML
from werkzeug.serving import WSGIRequestHandler, make_server

from tests.test_wiring import ALWAYS, STAND_IN
from tests.workspace import ROOT, Workspace

pytestmark = pytest.mark.slow

NAMES = ("main", "bulk")


class Remote(ABC):
    """Where both remotes of a team are, and how to get at their objects without DVC."""

    secret: str
    """What must never get into Git."""

    @abstractmethod
    def options(self, name: str) -> dict[str, str]:
        """Options for `dvc remote modify --local NAME OPTION VALUE`."""

    @abstractmethod
    def read(self, name: str, md5: str) -> bytes:
        """The bytes of one object; OSError or httpx.HTTPStatusError when it is not there."""

    @abstractmethod
    def write(self, name: str, md5: str, content: bytes) -> None:
        """Put bytes in place of one object, whatever its name promises."""

    @abstractmethod
    def delete(self, name: str, md5: str) -> None:
        """Lose one object."""

    @abstractmethod
    def held(self, name: str, md5: str) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """Within the block whoever reads this object waits; the value tells whether one does."""

    @contextlib.contextmanager
    def without(self, name: str, md5: str) -> Iterator[None]:
        """Within the block this object is not there."""
        content = self.read(name, md5)
        self.delete(name, md5)
        try:
            yield
        finally:
            self.write(name, md5, content)

    @contextlib.contextmanager
    def flipped(self, name: str, md5: str) -> Iterator[None]:
        """Within the block one byte in the middle of this object is another."""
        content = self.read(name, md5)
        changed = bytearray(content)
        changed[len(changed) // 2] ^= 1
        self.write(name, md5, bytes(changed))
        try:
            yield
        finally:
            self.write(name, md5, content)


def object_path(name: str, md5: str) -> str:
    """Where DVC keeps an object, from the folder that holds both remotes."""
    return f"{name}/files/md5/{md5[:2]}/{md5[2:]}"


class Gate:
    """Stops who asks for one path."""

    def __init__(self) -> None:
        self.held: str | None = None
        self.is_asked = False

    def stops(self, path: str) -> bool:
        """Whether this path, which may have more in front, must wait."""
        if self.held is None or not path.endswith(self.held):
            return False
        self.is_asked = True
        return True

    @contextlib.contextmanager
    def holding(self, path: str) -> Iterator[Callable[[], bool]]:
        """Within the block whoever asks for this path waits."""
        self.held, self.is_asked = path, False
        try:
            yield lambda: self.is_asked
        finally:
            self.held = None


class OnDisk(Remote):
    """Objects are files below a folder."""

    folder: Path

    def read(self, name: str, md5: str) -> bytes:
        return (self.folder / object_path(name, md5)).read_bytes()

    def write(self, name: str, md5: str, content: bytes) -> None:
        self.delete(name, md5)
        (self.folder / object_path(name, md5)).write_bytes(content)

    def delete(self, name: str, md5: str) -> None:
        # DVC writes objects read-only, so they are replaced and never opened for writing
        (self.folder / object_path(name, md5)).unlink(missing_ok=True)


class FolderRemote(OnDisk):
    """Two folders, as on a mounted disk."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.secret = str(folder)

    def options(self, name: str) -> dict[str, str]:
        return {"url": str(self.folder / name)}

    @contextlib.contextmanager
    def held(self, name: str, md5: str) -> Iterator[Callable[[], bool]]:
        content, path = self.read(name, md5), self.folder / object_path(name, md5)
        self.delete(name, md5)
        os.mkfifo(path)  # whoever opens it to read waits until somebody opens it to write

        def has_reader() -> bool:
            with contextlib.suppress(OSError):  # ENXIO: nobody reads
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                return True
            return False

        try:
            yield has_reader
        finally:
            self.write(name, md5, content)


class S3Remote(Remote):
    """moto's S3 in a thread, behind a gate."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(20)
        self._gate = Gate()
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=Silent
        )
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        httpx.put(f"{self.endpoint}/specmill", trust_env=False).raise_for_status()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        while environ["REQUEST_METHOD"] == "GET" and self._gate.stops(environ["PATH_INFO"]):
            time.sleep(0.02)
        answer: Iterable[bytes] = self._moto(environ, start_response)
        return answer

    def options(self, name: str) -> dict[str, str]:
        return {
            "url": f"s3://specmill/{name}",
            "endpointurl": self.endpoint,
            "access_key_id": "somebody",
            "secret_access_key": self.secret,
            "region": "us-east-1",
        }

    def _ask(self, method: str, name: str, md5: str, content: bytes | None = None) -> bytes:
        url = f"{self.endpoint}/specmill/{object_path(name, md5)}"
        # moto wants somebody's signature, and takes any
        signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/here/s3/aws4_request"}
        answer = httpx.request(method, url, content=content, headers=signed, trust_env=False)
        return answer.raise_for_status().content

    def read(self, name: str, md5: str) -> bytes:
        return self._ask("GET", name, md5)

    def write(self, name: str, md5: str, content: bytes) -> None:
        self._ask("PUT", name, md5, content)

    def delete(self, name: str, md5: str) -> None:
        self._ask("DELETE", name, md5)

    def held(self, name: str, md5: str) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        return self._gate.holding(object_path(name, md5))


class Silent(WSGIRequestHandler):
    """Logs no request."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Thousands of lines that say nothing."""


class SSHRemote(OnDisk):
    """SFTP over SSH, with a key under a passphrase."""

    def __init__(self, folder: Path):
        self.folder = folder / "served"
        self.folder.mkdir(parents=True)
        self.secret = secrets.token_hex(20)
        key = asyncssh.generate_private_key("ssh-ed25519")
        self.keyfile = folder / "key"
        key.write_private_key(self.keyfile, passphrase=self.secret)
        self.keyfile.chmod(0o600)
        allowed = folder / "authorized_keys"
        key.write_public_key(allowed)
        self._gate = Gate()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

        async def start() -> asyncssh.SSHAcceptor:
            return await asyncssh.create_server(
                asyncssh.SSHServer,
                "127.0.0.1",
                0,
                server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
                authorized_client_keys=str(allowed),
                sftp_factory=self._sftp,
            )

        self._acceptor: asyncssh.SSHAcceptor = self._run(start())
        self.port = self._acceptor.get_port()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=60)

    def close(self) -> None:
        async def end() -> None:
            self._acceptor.close()
            await self._acceptor.wait_closed()

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _sftp(self, channel: "asyncssh.SSHServerChannel[bytes]") -> asyncssh.SFTPServer:
        remote = self

        class Gated(asyncssh.SFTPServer):
            async def open(self, path: bytes, pflags: int, attrs: asyncssh.SFTPAttrs) -> object:
                while remote._gate.stops(path.decode()):
                    await asyncio.sleep(0.02)
                return super().open(path, pflags, attrs)

        return Gated(channel, chroot=os.fsencode(self.folder))

    def options(self, name: str) -> dict[str, str]:
        return {
            "url": f"ssh://somebody@127.0.0.1/{name}",
            "port": str(self.port),
            "keyfile": str(self.keyfile),
            "passphrase": self.secret,
        }

    def held(self, name: str, md5: str) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        return self._gate.holding(object_path(name, md5))


@contextlib.contextmanager
def remote_of_kind(kind: str, folder: Path) -> Iterator[Remote]:
    """A running remote: "folder", "s3" or "ssh"."""
    if kind == "folder":
        yield FolderRemote(folder / "two remotes")
        return
    server = S3Remote() if kind == "s3" else SSHRemote(folder)
    try:
        yield server
    finally:
        server.close()


# extract writes shards as large as a transfer takes several reads for
SHARDS = textwrap.dedent(
    """
    states = Path("data/hidden_states")
    (states / "content").unlink()
    for i in range(4):
        seed = hashlib.sha256(blob + bytes([i])).digest()
        (states / f"{i}.safetensors").write_bytes(seed * (2 * 2**20 // len(seed)))
    (states / "manifest.json").write_text(json.dumps({"shards": 4}))
    """
)
# paths, since DVC silently drops paths behind names of stages
FOR_TRAINING = ("data/prepared", "data/vocab", "data/verifier_head", "data/hidden_states")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A repository in which everything ran and nothing was pushed."""
    workspace = Workspace(tmp_path_factory.mktemp("home") / "a repository")
    for path in (workspace.folder / "stages").glob("[a-z]*.py"):
        path.write_text(STAND_IN + (SHARDS if path.stem == "extract" else ""))
    workspace.run("dvc", "repro")
    workspace.commit("everything ran")
    return workspace


def on_its_own(workspace: Workspace, machine: Path) -> Workspace:
    """The same commands as if on another machine: its own home folder and caches."""
    other = copy.copy(workspace)
    other.folder = machine / "a repository"
    kept = {k: v for k, v in workspace.environment.items() if not k.startswith("AWS_")}
    other.environment = kept | {
        "HOME": str(machine),
        "DVC_SITE_CACHE_DIR": str(machine / "site-cache"),
        "NO_PROXY": "127.0.0.1",
    }
    return other


@dataclass(frozen=True)
class Team:
    """A remote of some kind, and a repository that pushed to it."""

    remote: Remote
    home: Workspace

    def clone(self, machine: Path) -> Workspace:
        """A clone beside nothing, which knows the remote."""
        node = on_its_own(self.home, machine)
        self.home.run("git", "clone", "--quiet", ".", str(node.folder))
        # what `dvc remote modify --local` wrote in the other
        local = ".dvc/config.local"
        shutil.copy2(self.home.folder / local, node.folder / local)
        return node

    def objects(self) -> dict[str, str]:
        """Names in data/hidden_states, and the MD5 of each."""
        lock = YAML(typ="safe").load((self.home.folder / "dvc.lock").read_text())
        outs = {out["path"]: out["md5"] for out in lock["stages"]["extract"]["outs"]}
        listed = outs["data/hidden_states"]
        listing = self.remote.read("bulk", listed)
        return {entry["relpath"]: entry["md5"] for entry in json.loads(listing)}


@pytest.fixture(scope="module", params=["folder", "s3", "ssh"])
def team(
    request: pytest.FixtureRequest, ran: Workspace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Team]:
    machine = tmp_path_factory.mktemp(f"home with {request.param}")
    shutil.copytree(ran.folder, machine / "a repository", symlinks=True)
    home = on_its_own(ran, machine)
    with remote_of_kind(request.param, machine) as remote:
        for option, value in remote.options("bulk").items():
            home.run("dvc", "remote", "modify", "--local", "bulk", option, value)
        # every such command takes as long as DVC takes to start; the other remote differs by name
        local = home.folder / ".dvc/config.local"
        local.write_text(local.read_text() + local.read_text().replace("bulk", "main"))
        home.run("dvc", "push", *FOR_TRAINING)
        yield Team(remote, home)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_was_pushed_comes_back_byte_equal_in_a_second_clone(
    team: Team, tmp_path: Path
) -> None:
    node = team.clone(tmp_path)
    node.run("dvc", "pull", *FOR_TRAINING)
    for name in FOR_TRAINING:
        there = content(node.folder / name)
        assert there == content(team.home.folder / name)
        assert there
    assert not (node.folder / "models/verifier").exists()


def test_hidden_states_are_in_the_bulk_remote_and_only_there(team: Team) -> None:
    for md5 in team.objects().values():
        assert team.remote.read("bulk", md5)
        with pytest.raises((OSError, httpx.HTTPStatusError)):
            team.remote.read("main", md5)


def test_credentials_are_in_a_file_that_git_ignores_and_in_no_other(
    team: Team, tmp_path: Path
) -> None:
    node = team.clone(tmp_path)
    assert team.remote.secret in (node.folder / ".dvc/config.local").read_text()
    node.run("git", "check-ignore", "--quiet", ".dvc/config.local")
    assert node.run("git", "status", "--porcelain").stdout == ""
    holds = ("git", "grep", "--fixed-strings", "--quiet", "-e")
    assert node.run(*holds, team.remote.secret, "HEAD", check=False).returncode == 1
    assert node.run(*holds, "dvc remote modify", "HEAD", check=False).returncode == 0  # it can find


def test_a_flipped_byte_in_the_bulk_remote_makes_the_pull_fail_and_is_named(
    team: Team, tmp_path: Path
) -> None:
    node = team.clone(tmp_path)
    md5 = team.objects()["3.safetensors"]
    with team.remote.flipped("bulk", md5):
        done = node.run("dvc", "pull", "--verbose", "data/hidden_states", check=False)
    assert done.returncode != 0
    assert "Checkout failed for following targets:\ndata/hidden_states" in done.stderr
    assert "corrupted cache file" in done.stdout + done.stderr
    assert str(cached(node, md5)) in done.stdout + done.stderr
    assert not (node.folder / "data/hidden_states").exists()
    assert not cached(node, md5).exists()  # so the next pull fetches it again


def test_a_missing_object_makes_the_pull_fail_and_leaves_no_folder_as_if_whole(
    team: Team, tmp_path: Path
) -> None:
    node = team.clone(tmp_path)
    md5 = team.objects()["3.safetensors"]
    lost = (
        "dvc",
        "data",
        "status",
        "--not-in-remote",
        "--granular",
        "--json",
        "data/hidden_states",
    )
    with team.remote.without("bulk", md5):
        done = node.run("dvc", "pull", "data/hidden_states", check=False)
        # and whoever pushed can see it
        seen = json.loads(team.home.run(*lost).stdout)
    assert seen == {"not_in_remote": ["data/hidden_states/3.safetensors"]}
    assert done.returncode != 0
    assert md5 in done.stderr
    assert not (node.folder / "data/hidden_states").exists()


def test_a_killed_pull_fetches_only_what_had_not_arrived_when_it_is_repeated(
    team: Team, tmp_path: Path
) -> None:
    late = team.objects()["3.safetensors"]
    # DVC draws the order: should the one held back be the first, then nothing arrives
    for attempt in range(20):
        node = team.clone(tmp_path / str(attempt))
        arrived = killed_before(team, node, late)
        if arrived:
            break
    assert arrived
    assert late not in arrived
    assert not (node.folder / "data/hidden_states").exists()
    node.run("dvc", "pull", "data/hidden_states")
    assert arrived.items() <= stamps(team, node).items()
    home = team.home.folder / "data/hidden_states"
    assert content(node.folder / "data/hidden_states") == content(home)


def test_the_page_about_rented_nodes_trains_there_and_brings_the_head_home(
    ran: Workspace, tmp_path: Path
) -> None:
    home, node = on_its_own(ran, tmp_path), on_its_own(ran, tmp_path)
    node.folder = tmp_path / "a node"
    shutil.copytree(ran.folder, home.folder, symlinks=True)
    ran.run("git", "clone", "--quiet", "--bare", ".", str(tmp_path / "server.git"))
    home.run("git", "remote", "add", "origin", "../server.git")
    page = (ROOT / "docs/rented-node.md").read_text()

    def typed(workspace: Workspace, command: str) -> list[str]:
        assert re.search(rf"^    {re.escape(command)}( +#.*)?$", page, re.MULTILINE), command
        return [
            stage for stage in workspace.stages_run("bash", "-c", command) if stage not in ALWAYS
        ]

    typed(home, "dvc push data/prepared data/vocab data/verifier_head data/hidden_states")
    typed(home, "dvc data status --not-in-remote --granular data")
    home.run("git", "clone", "--quiet", "../server.git", str(node.folder))
    typed(node, "dvc config --local cache.type reflink,hardlink")
    train = "dvc exp run --pull --allow-missing -s train -S train.lr=1.0e-3 -n node-a"
    assert typed(node, train) == ["train"]
    assert not (node.folder / "models/verifier").exists()
    typed(node, "dvc push train && dvc exp push --no-cache origin node-a")
    typed(home, "dvc exp pull origin node-a && dvc exp apply node-a")
    head = content(home.folder / "models/eagle3")
    assert head == content(node.folder / "models/eagle3")
    assert head != content(ran.folder / "models/eagle3")
    follow = ["bench@eagle3", "replay@eagle3", "predict", "schedule", "check", "report"]
    assert typed(home, "dvc repro bench@eagle3 report") == follow
    # nothing went anywhere but where .dvc/config says
    pushed = {path.parts[0] for path in map(Path, content(tmp_path / "specmill-remote"))}
    assert pushed == set(NAMES)


def killed_before(team: Team, node: Workspace, late: str) -> dict[str, tuple[int, int]]:
    """Kill a pull as soon as it asks for one object; the stamps of what had arrived."""
    with team.remote.held("bulk", late) as somebody_waits:
        pull = subprocess.Popen(
            ["dvc", "pull", "--jobs", "1", "data/hidden_states"],
            cwd=node.folder,
            env=node.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(lambda: somebody_waits() or pull.poll() is not None)
        finally:
            pull.kill()
        assert pull.wait() == -signal.SIGKILL
    return stamps(team, node)


def cached(node: Workspace, md5: str) -> Path:
    return node.folder / ".dvc/cache/files/md5" / md5[:2] / md5[2:]


def stamps(team: Team, node: Workspace) -> dict[str, tuple[int, int]]:
    """What another download would change of every object: inode, last write in ns."""
    there = {md5: cached(node, md5) for md5 in team.objects().values()}
    return {
        md5: (path.stat().st_ino, path.stat().st_mtime_ns)
        for md5, path in there.items()
        if path.exists()
    }


def wait_for(is_done: Callable[[], bool]) -> None:
    """Far longer than it takes here."""
    deadline = time.monotonic() + 120
    while not is_done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
