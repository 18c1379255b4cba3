"""Valid bytes, changed at random: the JSON Lines reader and the store read them or refuse them.

A reader may raise the error that names the file, and nothing else; what it gives after that is what
was written. The seed of a failing try is in its message.
"""

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specmill.index import read_index
from specmill.params_data import Dataset
from specmill.sources import read_conversations
from specmill.store import HiddenStateStore
from specmill.verify import check_store, check_view
from specmill.view import StateView
from tests.stored import BF16, FP8, add, expected, sample_bytes, sample_key

FEW, MANY = 40, 20_000
"""Tries of a run and of `make test-long`."""

SAMPLES = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
ROWS = [
    {"prompt": "a", "completion": "A", "category": "maths"},
    {"turns": ["b", "c"]},
    {"conversations": [{"from": "human", "value": "d"}, {"from": "gpt", "value": "D"}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "e"}]},
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": [1.5, None]}}]},
            {"role": "tool", "content": "2", "tool_call_id": "call_0"},
        ],
        "tools": [{"name": "f", "parameters": {"type": "object"}}],
    },
]
PIECES = (b"\0", b"\n", b"\r", b'"', b"{", b"}", b"[" * 2000, b",", b"\\ud800", b"\xff", b"NaN",
          b"9" * 5000, b"null", b"-1", b"\xef\xbb\xbf", b"\x1f\x8b")  # fmt: skip


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Bytes with one to four changes: bits, pieces in, slices out, moved or doubled, ends cut."""
    for _ in range(draw.randint(1, 4)):
        start, end = sorted(draw.randint(0, len(content)) for _ in range(2))
        end = min(end, start + draw.choice((1, 8, 200)))
        change = draw.randrange(6)
        if change == 0 and start < len(content):
            bit = bytes([content[start] ^ 1 << draw.randrange(8)])
            content = content[:start] + bit + content[start + 1 :]
        elif change == 1:
            content = content[:start] + draw.choice(PIECES) + content[start:]
        elif change == 2:
            content = content[:start] + content[end:]
        elif change == 3:
            content = content[:end] + content[start:]
        elif change == 4:
            content = content[:start] if draw.random() < 0.5 else content[start:]
        else:
            content = content[:start] + draw.randbytes(end - start) + content[end:]
    return content


def try_rows(folder: Path, draw: random.Random) -> None:
    """Counts add up, and an error names the file."""
    path = folder / draw.choice(("rows.jsonl", "rows.json"))
    whole = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
    path.write_bytes(mutated(whole if path.suffix == ".jsonl" else json.dumps(ROWS).encode(), draw))
    try:
        reading = read_conversations(Dataset(source=f"file:{path}"), None)
    except ValueError as error:
        refusal = str(error)
    else:
        usable = len(reading.conversations) + reading.num_repeated
        assert usable + reading.num_unusable == reading.num_rows
        return
    assert str(path) in refusal


def try_store(folder: Path, draw: random.Random) -> None:
    """What a store says it has after a check is there, byte for byte."""
    store = HiddenStateStore(folder / "store")
    for spec in (BF16, FP8):
        add(store, spec, SAMPLES[:2])
        add(store, spec, SAMPLES[1:])
    path = draw.choice(sorted(store.folder.glob("[!.]*")))
    path.chmod(0o644)
    path.write_bytes(mutated(path.read_bytes(), draw))
    known = read_index(folder / "store" / "index.jsonl")
    assert known.items() <= store.shards.items()
    again = HiddenStateStore(store.folder)
    check_store(again)
    for spec in (BF16, FP8):
        again.drop_damaged(spec, map(sample_key, SAMPLES))
    assert again.contents().items() <= (expected(BF16, SAMPLES) | expected(FP8, SAMPLES)).items()
    for spec in (BF16, FP8):
        for ids in SAMPLES:
            if again.holds(spec, sample_key(ids)):
                (piece,) = again.pieces(spec, [sample_key(ids)])
                wanted = sample_bytes(spec, ids)
                assert piece.file.read_bytes()[piece.offset :][: len(wanted)] == wanted


def try_view(folder: Path, draw: random.Random) -> None:
    """A view whose manifest or shards were changed gives what was written, or says why not."""
    keys = [sample_key(ids) for ids in SAMPLES]
    store = HiddenStateStore(folder / "store")
    add(store, BF16, SAMPLES)
    view = folder / "view"
    store.write_view(view, BF16, keys, 1 << 20)
    path = draw.choice(sorted(view.iterdir()))
    content = mutated(path.read_bytes(), draw)
    path.unlink()  # the shard is linked to the store's
    path.write_bytes(content)
    try:
        held = StateView(view)
        held.require(keys)
        check_view(view)
        found = [held.load(key)[0].tolist() for key in keys]
    except ValueError as error:
        refusal = str(error)
    else:
        assert found == SAMPLES
        return
    assert str(view) in refusal


TARGETS: list[Callable[[Path, random.Random], None]] = [try_rows, try_store, try_view]


def fuzz(target: Callable[[Path, random.Random], None], folder: Path, seeds: range) -> None:
    """Try each seed in a folder of its own."""
    for seed in seeds:
        here = folder / str(seed)
        here.mkdir()
        try:
            target(here, random.Random(seed))
        except BaseException as error:
            error.add_note(f"seed {seed} of {target.__name__}, files in {here}")
            raise
        shutil.rmtree(here)


@pytest.mark.parametrize("target", TARGETS)
def test_bytes_changed_at_random_are_read_or_refused_by_name(
    target: Callable[[Path, random.Random], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)  # a warning a row is a lot
    fuzz(target, tmp_path, range(FEW))


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_bytes_changed_at_random_a_thousand_times_are_too(
    target: Callable[[Path, random.Random], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    fuzz(target, tmp_path, range(FEW, MANY))
