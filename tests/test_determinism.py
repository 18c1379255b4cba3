"""Same inputs, same bytes: prepared samples, draft vocabulary, replayed drafts."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specmill.files import file_digest, write_json
from specmill.generate import generate
from specmill.prepare import dataset_samples, pick_conversations, plan_jobs, split_and_filter
from specmill.responses import ResponseCache
from specmill.samples import Sample, write_samples
from specmill.server import Server
from specmill.vocab import build_tables, count_trained_tokens, coverage, save_tables
from tests.fakes import FakeVllm, prepare_section
from tests.test_templates import CHATML, tokenizer
from tests.workspace import ROOT

VERIFIER = {"fingerprint": "f", "chat_template": "t", "dtype": "float32", "max_model_len": 4096}


def sources(folder: Path) -> dict[str, Any]:
    """60 answered conversations and 12 prompts to measure, of three categories."""
    rows = [
        {"messages": [{"role": "user", "content": f"What is {number}, {word}?"},
                      {"role": "assistant", "content": f"{word} {number} {word} is {number}."}]}
        for number, word in enumerate(["one", "naïve", "三", "four", "fünf", "six"] * 10)
    ]  # fmt: skip
    bench = [
        {"prompt": f"measure {number} measure {number}", "category": category}
        for number in range(4)
        for category in ("maths", "coding", "writing")
    ]
    for name, content in (("train", rows), ("bench", bench)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)))
    return {"dataset": f"file:{folder}/train.jsonl", "bench": f"file:{folder}/bench.jsonl"}


@contextlib.contextmanager
def two_servers() -> Iterator[list[Server]]:
    """Answers come from either, in whatever order they come."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeVllm().serve()) for _ in range(2)]


def prepare(given: dict[str, Any], folder: Path, responses: str) -> dict[str, list[Sample]]:
    """What the stages `prepare` and `vocab` do, with a stand-in for the verifier."""
    chosen = prepare_section(**given, responses=responses, temperature=0.0, limit=40)
    picked = pick_conversations(chosen)
    recorded: list[list[Sample]] = []
    metrics: dict[str, Any] = {"sources": picked.sources}
    if responses == "dataset":
        recorded, refused = dataset_samples(picked.training, tokenizer(CHATML), {})
        metrics |= refused
    answered, _ = asyncio.run(
        generate(
            plan_jobs(picked, chosen), VERIFIER, ResponseCache(folder / "responses.jsonl"),
            two_servers, {}, concurrency=8, timeout_s=30,
        )
    )  # fmt: skip
    (folder / "responses.jsonl").unlink()  # a cache, in the order in which answers came
    splits, counts = split_and_filter(recorded + answered, chosen.min_tokens, 4096)
    for split, samples in splits.items():
        write_samples(folder / f"{split}.parquet", samples)
    trained = count_trained_tokens(splits["train"])
    d2t, t2d = build_tables(trained, 32, 512)
    save_tables(folder, d2t, t2d)
    covered = {"coverage": round(coverage(trained, t2d), 4)}
    write_json(folder / "metrics.json", metrics | counts | covered)
    return splits


def digests(folder: Path) -> dict[str, str]:
    return {path.name: file_digest(path) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("responses", ["verifier", "dataset"])
def test_prepared_samples_and_vocabulary_are_the_same_bytes_a_second_time(
    tmp_path: Path, responses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sources(tmp_path)
    found = []
    for number in range(2):
        folder = tmp_path / f"run {number}"
        folder.mkdir()
        monkeypatch.setattr("time.time", lambda at=number: 1.8e9 + 1e6 * at)
        prepare(given, folder, responses)
        found.append(digests(folder))
    assert found[0] == found[1]
    assert list(found[0]) == [
        "bench.parquet", "d2t.npy", "heldout.parquet", "metrics.json", "t2d.npy", "train.parquet",
    ]  # fmt: skip


AGAIN = """
import sys
from pathlib import Path
from specmill.files import write_json
from specmill.params import Method
from specmill.methods import read_settings
from specmill.replay import replay_row, rows_of, window_rows
from specmill.runs import write_runs
from tests.test_determinism import VERIFIER, prepare, sources

given, folder = {"dataset": sys.argv[1], "bench": sys.argv[2]}, Path(sys.argv[3])
samples = prepare(given, folder, "verifier")["bench"]
chosen = Method(method="ngram", section="spec", head="none",
                settings={"prompt_lookup_min": 2, "prompt_lookup_max": 4})
runs = replay_row(chosen, read_settings("ngram", chosen), samples, VERIFIER, folder, None)
write_runs(folder / "ngram.parquet", samples, runs)
write_json(folder / "ngram.json", {"rows": rows_of(runs, samples, 64),
                                   "windows": window_rows(samples, 64, 4096)})
"""


@pytest.mark.slow
def test_another_process_with_other_hashes_writes_the_same_bytes(tmp_path: Path) -> None:
    given = sources(tmp_path)
    found = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        subprocess.run(
            [sys.executable, "-c", AGAIN, given["dataset"], given["bench"], str(folder)],
            cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, check=True,
        )  # fmt: skip
        found.append(digests(folder))
    assert found[0] == found[1]
    assert {"ngram.parquet", "ngram.json", "train.parquet", "d2t.npy"} <= found[0].keys()
