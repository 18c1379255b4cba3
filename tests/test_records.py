import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specmill.records import SCHEMA, read_requests, write_requests

ROW: dict[str, Any] = {
    "method": "ngram",
    "role": "method",
    "k": 3,
    "phase": 0,
    "round": 1,
    "concurrency": 8,
    "rate": None,
    "context": 0,
    "category": "coding",
    "number": 0,
    "index": 0,
    "sample_key": "ab12",
    "num_prompt_tokens": 17,
    "output_ids": [5, 6, 7],
    "finish_reason": "length",
    "sent_s": 0.25,
    "chunk_s": [0.5, 0.75],
    "chunk_tokens": [1, 2],
    "execution": "00ff",
    "fresh_prompts": True,
}
OPEN_LOOP = ROW | {"role": "reference", "k": None, "concurrency": None, "rate": 2.5, "index": 1}


def test_requests_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "requests.parquet"
    write_requests(path, [ROW, OPEN_LOOP])
    assert read_requests(path) == [ROW, OPEN_LOOP]
    assert pq.read_schema(path).equals(SCHEMA)


def test_equal_requests_give_equal_bytes(tmp_path: Path) -> None:
    write_requests(tmp_path / "a", [ROW, OPEN_LOOP])
    write_requests(tmp_path / "b", (dict(reversed(row.items())) for row in (ROW, OPEN_LOOP)))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_method_that_was_not_served_has_a_file_without_rows(tmp_path: Path) -> None:
    write_requests(tmp_path / "none", [])
    assert read_requests(tmp_path / "none") == []
    assert pq.read_schema(tmp_path / "none").equals(SCHEMA)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"k": "three"}, "row 1: k is 'three', not int32"),
        ({"k": 2**31}, "row 1: k is 2147483648, not int32"),
        ({"num_prompt_tokens": 1.5}, "row 1: num_prompt_tokens is 1.5, not int32"),
        ({"chunk_s": [0.5, "late"]}, "row 1: chunk_s is .*not list<"),
        ({"output_ids": 7}, "row 1: output_ids is 7, not list<"),
        ({"fresh_prompts": "yes"}, "row 1: fresh_prompts is 'yes', not bool"),
        ({"sample_key": 5}, "row 1: sample_key is 5, not string"),
        ({"category": None}, "row 1: category is None, not string"),
        ({"index": True}, "row 1: index is True, not int32"),
        ({"wall_s": 1.0}, r"row 1: missing or unknown columns \['wall_s'\]"),
    ],
)
def test_a_row_of_another_kind_is_refused_by_row_and_column(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=r"requests\.parquet, " + complaint):
        write_requests(tmp_path / "requests.parquet", [ROW, ROW | change])
    assert not list(tmp_path.iterdir())


def test_a_row_without_a_column_is_refused(tmp_path: Path) -> None:
    short = {name: value for name, value in ROW.items() if name != "rate"}
    with pytest.raises(ValueError, match=r"row 0: missing or unknown columns \['rate'\]"):
        write_requests(tmp_path / "requests.parquet", [short])


def test_a_file_of_another_schema_is_refused_with_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    write_requests(path, [ROW])
    table = pq.ParquetFile(path).read()
    older = table.drop_columns(["phase"]).set_column(2, "k", pa.array([3], pa.int64()))
    pq.write_table(older, path)
    with pytest.raises(ValueError, match=r"k is int64, expected int32; phase is missing, expected"):
        read_requests(path)
    pq.write_table(table.append_column("wall_s", pa.array([1.0])), path)
    with pytest.raises(ValueError, match="wall_s is double, expected no such column"):
        read_requests(path)


def test_a_file_that_is_no_parquet_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"requests\.parquet is no Parquet file"):
        read_requests(path)
    with pytest.raises(FileNotFoundError):
        read_requests(tmp_path / "gone.parquet")


def test_the_docstring_describes_every_column_with_its_type() -> None:
    import specmill.records

    words = {"double": "float64", "list<element: int32>": "list of int32",
             "list<element: double>": "list of float64"}  # fmt: skip
    for field in SCHEMA:
        kind = str(field.type).replace("item: ", "element: ")
        line = f"| `{field.name}` | {words.get(kind, kind)} |"
        assert line in (specmill.records.__doc__ or ""), line


def test_the_examples_of_the_documentation_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[1] / "docs/other-benchmarks.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    write_requests(Path("data/bench/ngram/requests.parquet"), [ROW, OPEN_LOOP])
    exec(first, {})
    # 0.5 s - 0.25 s after it was sent, in both roles; pandas keeps the open loop's group too
    assert capsys.readouterr().out.count(" 250.0") >= 2
    Path("reports/bench").mkdir(parents=True)
    bench = {"method": "ngram", "rows": [{"concurrency": 1, "speedup": 1.5}, {"concurrency": 8}]}
    Path("reports/bench/ngram.json").write_text(json.dumps(bench))
    exec(second, {})
    assert Path("rows.csv").read_text().splitlines() == [
        "method,concurrency,speedup", "ngram,1,1.5", "ngram,8,",
    ]  # fmt: skip
