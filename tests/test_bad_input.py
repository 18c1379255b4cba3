"""What somebody may hand in by hand or by accident: each is refused by its name, or costs itself.

docs/reliability.md has the table of all bad inputs; those of older tests are not repeated here.
"""

import json
import re
import struct
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specmill import epilogue, index, predict, show
from specmill.conversations import from_row
from specmill.files import read_json, read_object
from specmill.manifest import Manifest
from specmill.params_data import Dataset
from specmill.params_file import load_params
from specmill.samples import SCHEMA, read_samples, write_samples
from specmill.shards import parse, read_shard
from specmill.sources import Reading, read_conversations
from specmill.store import HiddenStateStore
from specmill.templates import dataset_rows
from specmill.vocab import build_tables, coverage, load_tables
from tests import patients
from tests.fakes import sample
from tests.stored import BF16, add, sample_key
from tests.workspace import ROOT

GOOD = b'{"prompt": "good"}\n'
DEEP = b"[" * 100_000


def read(path: Path, content: bytes, *, strict: bool = False) -> Reading:
    path.write_bytes(content)
    return read_conversations(Dataset(source=f"file:{path}"), None, strict=strict)


def row(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def messages(*told: dict[str, Any]) -> bytes:
    return row(messages=list(told))


USER = {"role": "user", "content": "Hi"}
ROWS = {
    "NUL bytes": (b"\0\0\0", "no JSON"),
    "half a line": (b'{"prompt": "a', "no JSON"),
    "another encoding": (b'{"prompt": "caf\xe9"}', "no JSON"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), "no JSON"),
    "two rows in a line": (b'{"prompt": "a"} {"prompt": "b"}', "no JSON"),
    "rows between carriage returns": (b'{"prompt": "a"}\r{"prompt": "b"}', "no JSON"),
    "10 MB that are no JSON": (b"x" * 10_000_000, "no JSON"),
    "a hundred thousand brackets": (DEEP, "no JSON"),
    "a number of 5,000 digits": (b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}", "no JSON"),
    "tools nested too deeply": (
        b'{"prompt": "a", "tools": [{"a": ' + b"[" * 600 + b"]" * 600 + b"}]}",
        "nested too deeply",
    ),
    "a list": (b'["a"]', "must be an object"),
    "a number": (b"5", "must be an object"),
    "null": (b"null", "must be an object"),
    "no column with a conversation": (row(text="a"), "it has text"),
    "NaN for a prompt": (b'{"prompt": NaN}', "must be text"),
    "a number for a prompt": (row(prompt=5), "must be text"),
    "a number for an instruction with input": (row(instruction=5, input="x"), "must be text"),
    "a prompt of spaces": (row(prompt=" \n"), "must be text that is not empty"),
    "no message": (messages(), "at least one"),
    "a message in text": (row(messages=["a"]), "must be an object"),
    "an unknown role": (messages({"role": "narrator", "content": "a"}), "role 'narrator'"),
    "an empty turn": (messages({"role": "user", "content": " "}), "is empty"),
    "no user": (messages({"role": "assistant", "content": "a"}), "no user turn"),
    "an image": (
        messages({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
        "only text can be used",
    ),
    "a tool result called by an object": (
        messages(USER, {"role": "tool", "tool_call_id": {"a": 1}, "content": "r"}),
        "tool_call_id must be text",
    ),
    "a call without a function": (
        messages(USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}),
        "needs a function name",
    ),
    "arguments that are no JSON": (
        messages(USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}),
        "arguments of f is not JSON",
    ),
    "arguments with NaN": (
        messages(
            USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"x": NaN}'}]}
        ),
        "cannot hold nan",
    ),
    "tools in a word": (row(prompt="a", tools=[{"function": "f"}]), "a tool needs a function"),
    "a tool called by a number": (
        row(prompt="a", tools=[{"function": {"name": 5}}]),
        "a tool needs a function",
    ),
    "a tool with NaN": (b'{"prompt": "a", "tools": [{"name": "f", "x": NaN}]}', "cannot hold nan"),
    "half a character": (b'{"prompt": "\\ud800"}', "lone surrogate"),
    "half a character in a key": (b'{"prompt": "a", "\\ud800": 1}', "lone surrogate"),
    "a category of a number": (row(prompt="a", category=5), "category must be text"),
    "a category with a bar": (row(prompt="a", category="a|b"), "must be one line"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_row_costs_itself_alone_and_a_strict_run_names_it(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, (bad, reason) = tmp_path / "rows.jsonl", ROWS[name]
    content = GOOD + bad.replace(b"\n", b"") + b"\n" + row(prompt="after") + b"\n"
    reading = read(path, content)
    assert [one.said for one in reading.conversations] == [("good",), ("after",)]
    assert (reading.num_rows, reading.num_unusable) == (3, 1)
    assert f"{path}:2: " in caplog.text
    assert reason in caplog.text
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: ")) as caught:
        read(path, content, strict=True)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xef\xbb\xbf" + GOOD, ["good"]),
        (GOOD.replace(b"\n", b"\r\n") * 2, ["good"]),
        (b"\n \n" + GOOD, ["good"]),
        (row(prompt="x " * 5_000_000), ["x " * 5_000_000]),
        (b'{"prompt": "a\\u0000b"}', ["a\0b"]),
    ],
    ids=["a byte order mark", "CRLF", "blank lines", "a row of 10 MB", "NUL in a text"],
)
def test_what_is_unusual_and_right_is_read(tmp_path: Path, content: bytes, said: list[str]) -> None:
    reading = read(tmp_path / "rows.jsonl", content)
    assert [one.said[0] for one in reading.conversations] == said
    assert reading.num_unusable == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (DEEP, "is not JSON"),
        (b'[{"prompt": "a", "n": ' + b"1" * 5000 + b"}]", "is not JSON"),
        (b'[{"prompt": "a"}', "is not JSON"),
        (b'[{"prompt": "a"}] x', "is not JSON"),
        (b'[{"prompt": "a"}]\n[{"prompt": "b"}]', "is not JSON"),
        (json.dumps({"data": [{"prompt": "a"}]}).encode(), "it has data"),
        (b'{\n "prompt": "a"\n}', "write an object per line"),
        (b"prompt,answer\na,b\n", "write an object per line"),
        (b"PK\x03\x04" + bytes(100), "write an object per line"),
    ],
)
def test_a_file_that_is_none_of_the_formats_is_refused_by_name(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "rows.json"
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        read(path, content)
    assert reason in str(caught.value)


@pytest.mark.parametrize("value", [datetime(2026, 1, 1), b"x", float("nan"), (1, 2)])
def test_a_tool_that_only_arrow_can_hold_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        from_row({"prompt": "a", "tools": [{"name": "f", "since": value}]}, "c", "s")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 2.0 ** 100000 }}",
        "{{ messages[99].content.x }}",
        "{{ raise_exception('no system prompt') }}",
        "{{ messages.index(5) }}",
        "{% if %}",
        None,
    ],
)
def test_a_template_that_fails_in_any_way_is_a_refused_turn(template: str | None) -> None:
    conversation = from_row({"prompt": "Hi", "completion": "Hello"}, "c", "s")
    samples, refused, fault = dataset_rows(conversation, "train", patients.tokenizer(template), {})
    assert (samples, refused["num_template_refused"]) == ([], 1)
    assert "the chat template refuses the messages: " in str(fault)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0", DEEP, b"1" * 5000, b'"\xe9"', "{}".encode("utf-16"), b"{}}", b"\xef\xbb\xbf{}"],
)
def test_a_file_that_is_no_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'a.json'} is not valid JSON")):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("content", ["[]", "null", "5", '"a"'])
def test_a_file_without_an_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json must hold a JSON object, it holds a"):
        read_object(tmp_path / "config.json")


PARAMS = (ROOT / "params.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: !!int foo", "is not YAML: invalid literal"),
        ("a: 2026-13-45", "is not YAML: month must be in 1..12"),
        ("a: !!python/object:os.system x", "is not YAML: could not determine a constructor"),
        ("a: *b", "is not YAML: found undefined alias"),
        ("a:\n\tb: 1", "is not YAML"),
        ("a: \0", "is not YAML"),
        (f"a: {'9' * 5000}", "is not YAML"),
        ("a: " + "[" * 600, "is not YAML"),
        (PARAMS + "\nspec: {tokens: 1, sweep: []}", 'found duplicate key "spec"'),
        (PARAMS + "---\na: 1", "expected a single document"),
        ("- a", "params: Input should be a valid dictionary"),
        (PARAMS.replace("  ngram:\n", "  ../ngram:\n", 1), r"methods.../ngram"),
        (PARAMS.replace("  ngram:\n", "  n/gram:\n", 1), r"methods.n/gram"),
        (PARAMS.replace("kwargs: {}", "kwargs: {x: .nan}"), "chat_template_kwargs: they are sent"),
        (PARAMS.replace("kwargs: {}", "kwargs: {x: 2026-01-01}"), "chat_template_kwargs: they are"),
        (PARAMS.replace("kwargs: {}", "kwargs: &a {x: *a}"), "chat_template_kwargs"),
        (PARAMS.replace("strict: false", "strict: maybe"), "prepare.strict"),
    ],
)
def test_a_params_file_that_cannot_be_is_refused_with_its_file_and_key(
    tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "params.yaml"))) as caught:
        load_params(tmp_path / "params.yaml")
    assert reason in str(caught.value)


ABOUT: dict[str, Any] = {
    "format": 2,
    "verifier": "f",
    "layer_ids": [2, 4],
    "hidden_size": 4,
    "dtype": "bfloat16",
    "samples": [["a" * 64, 3, "b" * 64]],
}
FORGED: list[dict[str, Any]] = [
    {"layer_ids": [[1]]},
    {"layer_ids": [-1, 2]},
    {"verifier": {"a": 1}},
    {"hidden_size": "4"},
    {"hidden_size": 4.0},
    {"hidden_size": True},
    {"samples": [["a" * 64, -1, "b" * 64]]},
    {"samples": [["a" * 64, 0, "b" * 64]]},
    {"samples": [["a" * 64, "3", "b" * 64]]},
    {"samples": [["a" * 64, True, "b" * 64]]},
    {"samples": [[["a"], 3, "b" * 64]]},
    {"samples": [["a" * 64, 3]]},
    {"samples": None},
    {"dtype": "int8"},
    {"format": 99},
    {"further": 1},
]


@pytest.mark.parametrize("change", FORGED, ids=str)
def test_a_shard_that_says_nonsense_is_none_even_under_a_name_that_follows_from_it(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        parse(ABOUT | change)
    line = json.dumps({"shard": "x.safetensors", **ABOUT, **change}).encode()
    (tmp_path / "index.jsonl").write_bytes(line + b"\n")
    assert index.read_index(tmp_path / "index.jsonl") == {}
    header = json.dumps({"__metadata__": {"specmill": json.dumps(ABOUT | change)}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match=re.escape(f"{path} is damaged or no shard")):
        read_shard(path)
    assert HiddenStateStore(tmp_path).unreadable == [path.name]


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 7, struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", len(DEEP)) + DEEP],
    ids=["empty", "cut", "a header of 8 exabytes", "a header nested without an end"],
)
def test_a_shard_with_an_impossible_header_is_named_and_not_used(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    (tmp_path / "folder.safetensors").mkdir()
    store = HiddenStateStore(tmp_path)
    assert (store.shards, store.unreadable) == ({}, ["x.safetensors"])
    assert f"{tmp_path / 'x.safetensors'} is damaged" in caplog.text


@pytest.mark.parametrize(
    "line", [DEEP, b"\0", b"[]", b"5", b"\xff", b'{"shard": ' + b"1" * 5000 + b"}"]
)
def test_a_line_of_the_index_edited_by_hand_is_named_and_its_shard_read_instead(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = HiddenStateStore(tmp_path / "store")
    name = add(store, BF16, [[1, 2, 3]])
    contents = store.contents()
    (tmp_path / "store" / "index.jsonl").write_bytes(line + b"\n")
    again = HiddenStateStore(tmp_path / "store")
    assert (list(again.shards), again.contents()) == ([name], contents)
    assert "line 1 of" in caplog.text


KEYS = [sample_key([1, 2, 3]), sample_key([4, 5])]
PLACES: list[tuple[int, Any]] = [
    (0, 5), (0, ["x"]), (1, -3), (1, "3"), (1, 1), (1, 10**9), (1, True), (2, "x"), (2, None),
    (3, -1), (3, 7), (3, "0"), (3, 0.0), (4, 0), (4, -8), (4, "8"), (4, 10**12),
]  # fmt: skip


@pytest.fixture
def view(tmp_path: Path) -> Path:
    """A view of two samples."""
    store = HiddenStateStore(tmp_path / "store")
    add(store, BF16, [[1, 2, 3], [4, 5]])
    store.write_view(tmp_path / "view", BF16, KEYS, 1 << 20)
    return tmp_path / "view"


@pytest.mark.parametrize(("place", "value"), PLACES, ids=str)
def test_a_manifest_that_says_otherwise_than_the_shards_is_refused(
    view: Path, place: int, value: Any
) -> None:
    manifest = json.loads((view / "manifest.json").read_text())
    Manifest(view).require(KEYS)
    manifest["samples"][0][place] = value
    (view / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=re.escape(str(view))) as caught:
        Manifest(view).require(KEYS)
    assert "dvc" in str(caught.value)


@pytest.mark.parametrize("name", ["../../x.safetensors", "/etc/passwd", "", "a/b", ".."])
def test_a_manifest_cannot_lead_out_of_its_view(view: Path, name: str) -> None:
    manifest = json.loads((view / "manifest.json").read_text())
    (view / "manifest.json").write_text(json.dumps(manifest | {"shards": [name]}))
    with pytest.raises(ValueError, match=r"manifest\.json is damaged .* no file of the view"):
        Manifest(view)


def with_column(table: pa.Table, name: str, value: Any) -> pa.Table:
    kind = SCHEMA.field(name).type
    return table.set_column(SCHEMA.get_field_index(name), name, pa.array([value], kind))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("loss_mask", [0, 0, 2, 2], "row 0: token ids do not match"),
        ("loss_mask", [0, 1, 0, 1], "row 0: token ids do not match"),
        ("loss_mask", None, "lacks loss_mask of some rows"),
        ("input_ids", [1, None, 3, 4], "lacks input_ids of some rows"),
        ("input_ids", None, "lacks input_ids of some rows"),
        ("text", None, "lacks text of some rows"),
    ],
)
def test_samples_with_holes_are_refused_by_file_and_row(
    tmp_path: Path, name: str, value: Any, reason: str
) -> None:
    path = tmp_path / "train.parquet"
    write_samples(path, [sample([1, 2], [3, 4])])
    table = pq.read_table(path)
    pq.write_table(with_column(table, name, value), path)
    with pytest.raises(ValueError, match=re.escape(f"{path}")) as caught:
        read_samples(path)
    assert reason in str(caught.value)
    pq.write_table(table.drop([name]), path)
    with pytest.raises(ValueError, match=f"lacks {name} of some rows; run `dvc repro"):
        read_samples(path)


@pytest.mark.parametrize("size", [0, 4, 500])
def test_a_file_of_samples_that_was_cut_is_named(tmp_path: Path, size: int) -> None:
    path = tmp_path / "train.parquet"
    write_samples(path, [sample([1, 2], [3, 4])])
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=re.escape(f"{path} is damaged (")):
        read_samples(path)


@pytest.mark.parametrize("counts", [Counter({99: 5}), Counter({-1: 5, 2: 1})])
def test_token_ids_of_another_tokenizer_are_told(counts: Counter[int]) -> None:
    with pytest.raises(ValueError, match="vocabulary 10 tokens: it is of another tokenizer"):
        build_tables(counts, 2, 10)
    with pytest.raises(ValueError, match="it is of another tokenizer"):
        coverage(counts, np.ones(10, dtype=bool))
    with pytest.raises(ValueError, match="no token of data/prepared trains"):
        coverage(Counter(), np.ones(10, dtype=bool))


def test_a_table_that_claims_a_terabyte_is_damaged(tmp_path: Path) -> None:
    about = "{'descr': '|b1', 'fortran_order': False, 'shape': (999999999999,), }"
    header = b"\x93NUMPY\x01\x00\x76\x00" + about.encode().ljust(117) + b"\n"
    np.save(tmp_path / "d2t.npy", np.zeros(3, dtype=np.int64))
    (tmp_path / "t2d.npy").write_bytes(header)
    with pytest.raises(ValueError, match=r"is damaged .* run `dvc repro -f vocab`"):
        load_tables(tmp_path)


def test_an_epilogue_without_a_comparison_says_what_writes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["epilogue"])
    with pytest.raises(SystemExit, match="is not there; `dvc repro` writes it"):
        epilogue.main()


def test_a_sample_that_is_not_there_names_the_file_or_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"train\.parquet is not there; run `dvc repro prepare`"):
        show.main(["show", "0"])
    write_samples(Path("data/prepared/train.parquet"), [sample([1, 2], [3, 4])])
    with pytest.raises(SystemExit, match="has samples 0 to 0, there is no 1"):
        show.main(["show", "1"])
    with pytest.raises(SystemExit, match="models/verifier holds no model; `dvc repro verifier`"):
        show.main(["show", "0"])


CONFIG = patients.SMOLLM
CURVES: dict[str, Any] = {
    "prompt_tokens": 20.0,
    "points": [
        {"kind": kind, "k": k, "batch": 1, "step_ms": 10.0, "ttft_ms": 10.0,
         "ratio": 1.2, "ratio_low": 1.1, "ratio_high": 1.3}
        for kind, k in (("none", 0), ("eagle3", 1))
    ],
}  # fmt: skip


def points(**change: Any) -> dict[str, Any]:
    return CURVES | {"points": [point | change for point in CURVES["points"]]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([], "must hold a JSON object"),
        ({}, "has no `points`"),
        (CURVES | {"points": [5]}, "has no `points`"),
        (CURVES | {"points": None}, "has no `points`"),
        (CURVES | {"points": []}, "step times of no kind of drafting"),
        (CURVES | {"points": CURVES["points"][:1]}, "step times of no kind of drafting"),
        (points(ratio=None), "points[1] has no number as ratio"),
        (points(ratio="1.2"), "points[1] has no number as ratio"),
        (points(step_ms=0.0), "points[0] has no number as step_ms"),
        (points(step_ms=float("nan")), "points[0] has no number as step_ms"),
        (CURVES | {"prompt_tokens": None}, "has no number as prompt_tokens"),
    ],
)
def test_step_times_edited_by_hand_are_refused_by_file_and_place(
    tmp_path: Path, content: Any, reason: str
) -> None:
    path = tmp_path / "curves.json"
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit) as caught:
        predict.main(["--acceptance", "0.5", "--curves", str(path)])
    assert str(caught.value).startswith(str(path))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: no model"),
        ({"num_key_value_heads": "3"}, "num_key_value_heads is '3'"),
        ({"head_dim": "64"}, "head_dim is '64'"),
        ({"sliding_window": "x"}, "sliding_window is 'x'"),
        ({"layer_types": 5}, "layer_types is 5; a list"),
        ({"layer_types": [["x"]]}, "layer_types has ['x']: not known"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"quantization_config": 5}, "quantization_config is 5"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000"),
    ],
)
def test_a_config_of_no_model_is_refused_by_its_key(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | change))
    with pytest.raises(SystemExit, match=re.escape(f"config.json: {reason}")):
        predict.main(["--acceptance", "0.5", "--bandwidth", "1e12", "--from-model", str(path)])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--bandwidth", "nan"], "--bandwidth is nan"),
        (["--bandwidth", "inf"], "--bandwidth is inf"),
        (["--bandwidth", "1e12", "--peak", "nan"], "--peak is nan"),
        (["--bandwidth", "1e12", "--overhead-ms", "nan"], "--overhead-ms is nan"),
        (["--bandwidth", "1e12", "--draft-ms", "inf"], "--draft-ms is inf"),
        (["--bandwidth", "1e12", "--routing", "routing.json"], "no routing.json of the stage"),
    ],
)
def test_a_number_that_is_none_is_refused_by_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))
    Path("routing.json").write_text(json.dumps({"windows": [5]}))
    with pytest.raises(SystemExit, match=re.escape(reason)):
        predict.main(["--acceptance", "0.5", "--from-model", "config.json", *arguments])


def test_an_acceptance_of_nan_is_no_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        predict.main(["--acceptance", "nan", "--curves", "curves.json"])
    assert "are not unconditional" in capsys.readouterr().err
