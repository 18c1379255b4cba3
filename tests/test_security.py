"""An attacker's side: calls that run what they read, names and paths that lead elsewhere, doors."""

import ast
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specmill import compat, paths, serve_states, server
from specmill.cut import copy_companions, weight_files
from specmill.files import locked, write_json
from specmill.head_tensors import read_tensors
from specmill.manifest import Manifest, write_manifest
from specmill.params_data import Dataset
from specmill.params_file import load_params
from specmill.sources import check_readable
from specmill.sync import _fetch_identity
from specmill.vocab import load_tables
from tests.staging_fakes import SPEC
from tests.workspace import ROOT

FOLDERS = ("specmill", "stages", "benchmarks", "requirements")
UNPICKLE = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")


ASKED = {"trust_remote_code"}


def has(call: ast.Call, keyword: str, value: object) -> bool:
    """Whether a call passes a constant by that name."""
    return any(
        word.arg == keyword and isinstance(word.value, ast.Constant) and word.value.value == value
        for word in call.keywords
    )


def dangers(source: str) -> Iterator[str]:
    """Calls that run a shell or what they read, and reading that may do so."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        first, _, last = name.rpartition(".")
        passed = {word.arg for word in node.keywords}
        if (
            name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen")
            or name in ("tempfile.mktemp", "yaml.load", "yaml.unsafe_load", "yaml.full_load")
            or (first in UNPICKLE and last in ("load", "loads", "open", "Unpickler"))
            or last in ("read_pickle", "getoutput", "getstatusoutput", "create_subprocess_shell")
            or (name == "torch.load" and not has(node, "weights_only", True))
            or (name in ("np.load", "numpy.load") and not has(node, "allow_pickle", False))
            or (last == "YAML" and not (has(node, "typ", "safe") or has(node, "typ", "rt")))
            or (last == "extractall" and not has(node, "filter", "data"))
            or ("shell" in passed and not has(node, "shell", False))
            or has(node, "trust_remote_code", True)
            # transformers asks at the terminal when it is not said
            or (first.startswith("Auto") and last == "from_pretrained" and not passed & ASKED)
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_runs_a_shell_or_what_it_reads(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [f"{file.name}, {one}" for file in files for one in dangers(file.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "call",
    [
        "eval(text)", "exec(code)", "os.system('ls')", "subprocess.run('ls', shell=True)",
        "subprocess.Popen(words, shell=asked)", "subprocess.getoutput('ls')",
        "asyncio.create_subprocess_shell('ls')", "torch.load(path)",
        "torch.load(path, weights_only=False)", "np.load(path)", "np.load(p, allow_pickle=True)",
        "pickle.loads(content)", "pickle.Unpickler(stream)", "joblib.load(path)", "yaml.load(text)",
        "YAML(typ='unsafe')", "YAML()", "archive.extractall(folder)", "tempfile.mktemp()",
        "AutoTokenizer.from_pretrained(model, trust_remote_code=True)",
        "AutoConfig.from_pretrained(model)",
    ],
)  # fmt: skip
def test_each_dangerous_call_would_be_found(call: str) -> None:
    assert len(list(dangers(f"found = {call}"))) == 1


class Bomb:
    """Pickled, it makes a folder where it is loaded."""

    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.place),)


def test_a_checkpoint_that_is_a_pickle_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    exploded = tmp_path / "exploded"
    torch.save({"fc.weight": Bomb(exploded)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read"):
        read_tensors(tmp_path)
    assert not exploded.exists()


def test_a_vocabulary_that_is_a_pickle_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    exploded = tmp_path / "exploded"
    for name in ("d2t", "t2d"):
        content = np.array([Bomb(exploded)], dtype=object)
        np.save(tmp_path / f"{name}.npy", content, allow_pickle=True)
    with pytest.raises(ValueError, match="is damaged"):
        load_tables(tmp_path)
    assert not exploded.exists()


def test_a_dataset_with_a_loading_script_runs_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "prompts.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'exploded')!r})\n")
    with pytest.raises(ValueError, match="prompts"):
        check_readable(Dataset(source=f"folder:{folder}"), None)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", ".."])
def test_a_manifest_names_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    write_manifest(tmp_path, SPEC, [])
    place = tmp_path / "manifest.json"
    place.write_text(place.read_text().replace('"shards":[]', f'"shards":["{name}"]'))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged .* no file of the view"):
        Manifest(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/tmp/secret.safetensors"])
def test_an_index_of_weights_names_files_beside_it_only(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    index = {"weight_map": {"a": name}}
    write_json(tmp_path / "model" / "model.safetensors.index.json", index)
    with pytest.raises(ValueError, match="which is no file beside it"):
        weight_files(tmp_path / "model")


def test_a_link_in_a_checkpoint_does_not_bring_another_file_along(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    for folder in ("model", "copy"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "LICENSE.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"LICENSE\.txt is a link out of .*model"):
        copy_companions(tmp_path / "model", tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []


def test_the_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    model, blob = tmp_path / "models--a--b/snapshots/1f", tmp_path / "models--a--b/blobs/77"
    for folder in (model, blob.parent, tmp_path / "copy"):
        folder.mkdir(parents=True)
    blob.write_text("{}")
    (model / "config.json").symlink_to("../../blobs/77")
    copy_companions(model, tmp_path / "copy")
    assert (tmp_path / "copy/config.json").read_text() == "{}"
    assert not (tmp_path / "copy/config.json").is_symlink()


@pytest.mark.parametrize("inside", ["../../../../../../etc/passwd", "/etc/passwd"])
def test_a_file_of_a_package_lies_in_the_package(inside: str) -> None:
    with pytest.raises(ValueError, match="numpy has no such file"):
        check_readable(Dataset(source=f"package:numpy/{inside}"), None)


def test_a_lock_file_of_another_repository_cannot_name_a_file_outside_the_cache(
    tmp_path: Path,
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "dvc.lock").write_text(
        f"stages: {{bench: {{deps: [{{path: {paths.IDENTITY}, md5: '..{secret}'}}]}}}}\n"
    )
    _fetch_identity(tmp_path, folder)
    assert not (folder / paths.IDENTITY).exists()


@pytest.mark.parametrize("section", ["methods", "heads", "medusa", "draft_models", "imported"])
@pytest.mark.parametrize("name", ["x; touch hacked", "../../x", "$(id)", "a b", "-rf", ".hidden"])
def test_a_name_is_no_command_and_no_path(tmp_path: Path, section: str, name: str) -> None:
    text = (ROOT / "params.yaml").read_text()
    file = tmp_path / "params.yaml"
    head, _, rest = text.partition(f"\n{section}:")
    rest = rest.partition("\n")[2] if rest.lstrip().startswith("{}") else rest
    file.write_text(f"{head}\n{section}:\n  {name!r}: {{}}\n{rest.lstrip(chr(10))}")
    with pytest.raises(ValueError, match="String should match pattern"):
        load_params(file)


def test_a_server_of_ours_listens_on_loopback_with_a_random_key_that_is_in_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def start(command: list[str], environment: dict[str, str], log: Path) -> Any:
        started.append((command, environment))
        raise OSError("not really")

    monkeypatch.setattr(server, "_start", start)
    monkeypatch.setenv("VLLM_API_KEY", "of another server")
    for _ in range(2):
        with (
            pytest.raises(OSError, match="not really"),
            server.serve(tmp_path, [], tmp_path / "log", cpu_kv_cache_gib=1,
                         gpu_memory_utilization=0.5, startup_timeout_s=1, label="x"),
        ):  # fmt: skip
            pass
    keys = [environment["VLLM_API_KEY"] for _, environment in started]
    assert len(set(keys) | {"of another server"}) == 3
    for (command, _), key in zip(started, keys, strict=True):
        assert len(key) >= 32  # 24 random bytes
        assert command[command.index("--host") + 1] == "127.0.0.1"
        assert command.count("--host") == 1
        assert key not in " ".join(command)


def test_no_server_that_stages_states_is_started_without_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPECMILL_API_KEY", raising=False)
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(ValueError, match="SPECMILL_API_KEY is not set; choose a key"):
            serve_states._command(host, 8001, Path("staging"))


def test_a_lock_in_a_shared_folder_is_not_reached_through_a_link(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (tmp_path / "specmill.lock").symlink_to(mine)
    with pytest.raises(OSError, match=r"specmill\.lock"), locked(tmp_path / "specmill.lock"):
        pass
    assert not mine.exists()


def test_the_folder_of_links_in_the_temporary_folder_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", "/a folder/.venv")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    link = compat.environment_prefix()
    assert stat.S_IMODE(link.parent.stat().st_mode) == 0o700
    link.parent.chmod(0o777)  # where another user could put a link of his
    with pytest.raises(ValueError, match="not a folder of this user alone"):
        compat.environment_prefix()
