import fcntl
import gc
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from specmill.files import (
    digest,
    file_digest,
    is_whole,
    locked,
    read_json,
    read_kept,
    seal,
    tree_digest,
    uncollected,
    write_atomically,
    write_json,
)


def test_writing_makes_the_folder_and_leaves_nothing_else_behind(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.bin"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["x.bin"]


def test_a_reader_has_the_old_file_whole_until_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.bin"
    write_atomically(path, b"old")

    def full_disk(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, b"newer")
    assert path.read_bytes() == b"old"


def test_what_a_killed_writer_began_goes_with_the_next_write_and_a_living_ones_stays(
    tmp_path: Path,
) -> None:
    (tmp_path / ".x.bin.1.tmp").write_bytes(b"hal")
    (tmp_path / ".other.bin.1.tmp").write_bytes(b"another file's")
    with (tmp_path / ".x.bin.2.tmp").open("wb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        write_atomically(tmp_path / "x.bin", b"half")
    assert sorted(os.listdir(tmp_path)) == [".other.bin.1.tmp", ".x.bin.2.tmp", "x.bin"]


def test_equal_values_give_equal_bytes_of_sorted_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a", {"b": [1, 2.5], "a": "ü"})
    write_json(tmp_path / "b", {"a": "ü", "b": [1, 2.5]})
    expected = '{\n  "a": "ü",\n  "b": [\n    1,\n    2.5\n  ]\n}\n'
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() == expected
    assert read_json(tmp_path / "a") == {"a": "ü", "b": [1, 2.5]}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_written_as_json(tmp_path: Path, value: float) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"loss": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": value})
    assert read_json(path) == {"loss": 1.0}


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{cut")
    with pytest.raises(ValueError, match=f"{path} is not valid JSON"):
        read_json(path)


def test_the_digest_is_of_canonical_json() -> None:
    expected = hashlib.sha256(b'{"a":[2,null],"b":"\xc3\xbc"}').hexdigest()
    assert digest({"b": "ü", "a": [2, None]}) == expected
    assert digest({"b": "ü", "a": [None, 2]}) != expected


def test_the_digest_of_a_file_is_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert file_digest(tmp_path / "x") == hashlib.sha256(b"abc").hexdigest()
    assert tree_digest(tmp_path / "x") == hashlib.sha256(b"abc").hexdigest()


def make_tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_equal_trees_have_equal_digests_wherever_and_whenever_they_were_made(
    tmp_path: Path,
) -> None:
    first = make_tree(tmp_path / "one", {"a": "1", "sub/b": "2"})
    second = make_tree(tmp_path / "two", {"sub/b": "2", "a": "1"})
    os.utime(second / "a", (1, 1))
    assert tree_digest(first) == tree_digest(second)


@pytest.mark.parametrize(
    "files",
    [
        {"a": "1", "sub/b": "3"},
        {"a": "1", "sub/c": "2"},
        {"a": "1", "b": "2"},
        {"a": "1", "sub/b": "2", "sub/d": ""},
        {"a": "2", "sub/b": "1"},
    ],
)
def test_a_tree_with_another_name_or_byte_has_another_digest(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    first = make_tree(tmp_path / "one", {"a": "1", "sub/b": "2"})
    assert tree_digest(first) != tree_digest(make_tree(tmp_path / "two", files))


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lock"
    order: list[str] = []

    def second() -> None:
        with locked(path):
            order.append("second")

    with locked(path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.3)
        assert order == []
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_shared_locks_go_together_and_wait_for_the_one_that_is_alone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    order: list[str] = []

    def alone() -> None:
        with locked(path):
            order.append("alone")

    with locked(path, shared=True), locked(path, shared=True):
        thread = threading.Thread(target=alone)
        thread.start()
        thread.join(0.3)
        order.append("shared")
    thread.join(10)
    assert order == ["shared", "alone"]


def test_garbage_is_collected_again_after_a_large_load_even_one_that_fails() -> None:
    was_on = []
    with pytest.raises(ZeroDivisionError), uncollected():
        was_on.append(gc.isenabled() or 1 / 0)
    assert was_on == []
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()


def test_what_was_kept_and_cut_is_as_if_it_was_not_there(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    assert read_kept(path) is None
    write_json(path, [{"a": 1}])
    assert read_kept(path) == [{"a": 1}]
    os.truncate(path, 5)
    assert read_kept(path) is None
    assert not path.exists()


def test_a_folder_is_whole_until_any_of_its_files_is_cut_changed_or_gone(tmp_path: Path) -> None:
    folder = tmp_path / "0"
    (folder / "deep").mkdir(parents=True)
    files = [folder / "one", folder / "deep" / "two"]
    for file in files:
        file.write_bytes(b"content")
    assert not is_whole(folder)  # not sealed
    seal(folder)
    assert is_whole(folder)
    for file in files:
        os.truncate(file, 6)
        assert not is_whole(folder)
        file.write_bytes(b"Content")
        assert not is_whole(folder)
        file.unlink()
        assert not is_whole(folder)
        file.write_bytes(b"content")
        assert is_whole(folder)
    os.truncate(folder / "seal.json", 20)
    assert not is_whole(folder)
    assert not is_whole(tmp_path / "nowhere")
