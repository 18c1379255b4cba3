"""A checkout with results: two methods, few enough cells to count by hand."""

import hashlib
import json
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.workspace import ROOT

EAGLE3_MD5 = "e" * 32 + ".dir"


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


Load = tuple[int | None, float | None, int]
"""Requests in flight, requests per second, tokens of context."""

LOADS: tuple[Load, ...] = ((1, None, 0), (None, 2.5, 512))


def row(k: int, load: Load, category: str) -> dict[str, Any]:
    concurrency, rate, context = load
    place = {
        "num_speculative_tokens": k,
        "concurrency": concurrency,
        "rate": rate,
        "context": context,
        "category": category,
    }
    acceptance = {"length": 1.75, "rate_pos_0": 0.5, "rate_pos_1": 0.25}
    return (
        place
        | {
            "output_tokens_per_s": 10.0 * (concurrency or 8) + k,
            "ttft_ms_p50": None,
            "speedup": 1.5 if k else 1.0,
            "verdict": "faster" if k else None,
            "one_execution": True,
        }
        | {f"acceptance_{name}": value if k else None for name, value in acceptance.items()}
    )


def write_results(folder: Path, num_categories: int = 2) -> None:
    """Write params.yaml, dvc.lock, reports/ and the head's small files.

    `none` has K 0, `eagle3` K 2 (headline) and 4; one request in flight, and 2.5 per second with
    context; prompt types all, type1, ...: with two of them that is (1 + 2) x 2 x 2 = 12 cells.
    """
    yaml = YAML(typ="safe")
    params = yaml.load((ROOT / "params.yaml").read_text())
    params["methods"] = {name: params["methods"][name] for name in ("none", "eagle3")}
    with (folder / "params.yaml").open("w") as out:
        yaml.dump(params, out)
    reports = folder / "reports"
    write(reports / "hardware.json", {
        "cpu_model": "Abacus", "num_usable_cores": 2, "gpus": [], "versions": {"vllm": "0.32.0"},
    })  # fmt: skip
    write(reports / "prepare.json", {"train": {"num_kept": 7}})
    write(reports / "train.json", {"best_epoch": 1, "num_epochs": 2})
    write(reports / "summary.json", {"eagle3": {"c1": {"speedup": 1.5}}})
    write(reports / "comparison.md", "# table\n")
    write(reports / "speedup.svg", "<svg/>")
    write(reports / "plots" / "train.json", [
        {"epoch": epoch, "position": position, "accuracy": accuracy, "loss": 4 - accuracy}
        for epoch, position, accuracy in [(0, 0, 0.25), (0, 1, 0.0), (1, 0, 0.5), (1, 1, 0.125)]
    ])  # fmt: skip
    names = ["all", *(f"type{i}" for i in range(1, num_categories))]
    for method, ks in {"none": [0], "eagle3": [2, 4]}.items():
        write(reports / "bench" / f"{method}.json", {
            "method": method,
            "head": {},
            "num_speculative_tokens": ks[0],
            "rows": [row(k, load, category) for k in ks for load in LOADS for category in names],
            "engine": {},
        })  # fmt: skip
    write(folder / "models/verifier/identity.json", {"name": "Tiny", "fingerprint": "f00"})
    write(folder / "models/eagle3/config.json", {})
    write(folder / "models/eagle3/provenance.json", {"method": "eagle3"})
    write(folder / "models/eagle3/model.safetensors", "weights stay in DVC")
    write(folder / "dvc.yaml", "stages: {}\n")
    write_lock(folder)


def write_lock(folder: Path, run: str = "first") -> None:
    """Write a dvc.lock that agrees with the files; another `run` has other raw records."""
    yaml = YAML(typ="safe")
    params = yaml.load((folder / "params.yaml").read_text())

    def out(path: str, md5: str | None = None) -> dict[str, str]:
        return {
            "path": path,
            "md5": md5 or hashlib.md5((folder / path).read_bytes()).hexdigest(),
        }

    def stage(outs: list[dict[str, str]], *sections: str) -> dict[str, Any]:
        return {
            "cmd": "python",
            "deps": [out("models/verifier/identity.json")],
            "params": {"params.yaml": {name: params[name] for name in sections}},
            "outs": outs,
        }

    stages = {
        "hardware": {"cmd": "python", "outs": [out("reports/hardware.json")]},
        "prepare": stage([out("reports/prepare.json")], "prepare"),
        "train": stage(
            [out("models/eagle3", EAGLE3_MD5), out("reports/plots/train.json")], "train"
        ),
        "bench@none": stage([out("reports/bench/none.json")], "bench"),
        "bench@eagle3": stage(
            [
                out("reports/bench/eagle3.json"),
                out("data/bench/eagle3", hashlib.md5(run.encode()).hexdigest() + ".dir"),
            ],
            "bench",
            "spec",
        ),
        "report": {"cmd": "python", "outs": [out("reports/comparison.md", "0" * 32)]},
    }
    with (folder / "dvc.lock").open("w") as handle:
        yaml.dump({"schema": "2.0", "stages": stages}, handle)
