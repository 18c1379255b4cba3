import hashlib
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from specmill import index
from specmill.shards import Row, Shard
from tests.stored import BF16, FP8
from tests.workspace import ROOT

ONE = Shard(BF16, (Row("a" * 64, 3, "b" * 64), Row("c" * 64, 1, "d" * 64)))
TWO = Shard(FP8, (Row("a" * 64, 3, "e" * 64),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An index of two shards."""
    for shard in (ONE, TWO):
        index.append(tmp_path / "index.jsonl", shard)
    return tmp_path / "index.jsonl"


def test_a_line_says_what_the_states_are_and_which_samples_the_shard_has(path: Path) -> None:
    lines = path.read_text().splitlines()
    said = json.loads(lines[0])
    # all before it
    assert said.pop("line") == hashlib.sha256(lines[0][:-77].encode()).hexdigest()
    assert said == {
        "shard": ONE.name,
        "header_bytes": len(ONE.header),
        "format": 2,
        "verifier": "fingerprint",
        "layer_ids": [2, 4],
        "hidden_size": 4,
        "dtype": "bfloat16",
        "samples": [["a" * 64, 3, "b" * 64], ["c" * 64, 1, "d" * 64]],
    }
    assert len(lines) == 2


def test_a_line_of_an_earlier_version_is_read_and_its_name_checked(path: Path) -> None:
    rows = [list(row) for row in ONE.rows]
    about = {"shard": ONE.name, "format": 2, "verifier": "fingerprint", "layer_ids": [2, 4],
             "hidden_size": 4, "dtype": "bfloat16", "samples": rows}  # fmt: skip
    path.write_text(json.dumps(about) + "\n")
    assert index.read_index(path) == {ONE.name: ONE}
    rows[0][1] = 4
    path.write_text(json.dumps(about) + "\n")
    assert index.read_index(path) == {}


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", f"{64 * 'a'}"])
def test_a_line_made_by_hand_names_no_file_elsewhere(path: Path, name: str) -> None:
    line = path.read_bytes().splitlines()[0].replace(ONE.name.encode(), name.encode())
    said = line.rpartition(b', "line"')[0]
    digest = hashlib.sha256(said).hexdigest().encode()
    path.write_bytes(said + b', "line": "' + digest + b'"}\n')
    assert index.read_index(path) == {}


def test_shards_are_read_oldest_first_and_a_repeated_one_is_the_youngest(path: Path) -> None:
    assert list(index.read_index(path).items()) == [(ONE.name, ONE), (TWO.name, TWO)]
    index.append(path, ONE)
    assert list(index.read_index(path)) == [TWO.name, ONE.name]


def test_an_index_that_is_missing_is_empty(tmp_path: Path) -> None:
    assert index.read_index(tmp_path / "index.jsonl") == {}


def test_a_changed_byte_costs_its_line_and_never_changes_a_shard(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)  # a warning a byte is a lot
    content = path.read_bytes()
    end = content.index(b"\n")
    for at in range(len(content)):
        for byte in (content[at] ^ 1 << at % 8, ord("\n")):
            path.write_bytes(content[:at] + bytes([byte]) + content[at + 1 :])
            found = index.read_index(path)
            assert found.items() <= {ONE.name: ONE, TWO.name: TWO}.items()
            if at != end:
                assert (TWO if at < end else ONE).name in found


def test_a_damaged_line_is_named(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(path.read_bytes().replace(b"c" * 64, b"f" * 64))
    assert list(index.read_index(path)) == [TWO.name]
    assert f"line 1 of {path} is damaged" in caplog.text


def test_a_line_that_was_cut_does_not_swallow_the_next(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])
    assert list(index.read_index(path)) == [ONE.name]
    index.append(path, TWO)
    assert list(index.read_index(path)) == [ONE.name, TWO.name]


def test_rewriting_takes_shards_in_and_out_and_mends_damaged_lines(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with path.open("ab") as handle:
        handle.write(b"not JSON\n")
    three = Shard(BF16, (Row("9" * 64, 2, "8" * 64),))
    index.rewrite(path, new=[three], gone=[ONE.name, "never there"])
    caplog.clear()
    assert list(index.read_index(path).items()) == [(TWO.name, TWO), (three.name, three)]
    assert caplog.text == ""


def test_the_index_is_read_without_torch_and_safetensors(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "sys.modules.update(dict.fromkeys(('torch', 'safetensors', 'numpy')))\n"
        "from specmill import index, shards\n"
        "for name, shard in index.read_index(Path(sys.argv[1])).items():\n"
        "    print(name, len(shard.rows), shard.spec.bytes_per_token)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{ONE.name} 2 20\n{TWO.name} 1 20\n"
