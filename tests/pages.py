"""Everything that a page can show, made by hand."""

from io import StringIO
from typing import Any

from specmill.fidelity import marked
from specmill.page_evidence import Evidence
from specmill.palette import Look, looks
from specmill.pictures import PICTURES
from specmill.surface import plot_rows
from tests.benches import BENCH, comparable

HARDWARE = {
    "cpu_model": "Some CPU",
    "num_usable_cores": 2,
    "memory_gib": 24,
    "machine": "0d3980d33d63",
    "gpus": [],
    "versions": {"vllm": "0.32.0", "torch": "2.13.0"},
}
VERIFIER = {"name": "tiny-verifier", "architecture": "MixtralForCausalLM", "num_layers": 30}

DECISION: dict[str, Any] = {
    "verdict": "Serve with eagle3, K=2, up to 4 requests in flight, and without it above.",
    "options": [
        {
            "name": "eagle3, K=2",
            "status": "adopt",
            "evidence": ["+25% (+20% to +30%) at 1 in flight.", "-25% (-30% to -20%) at 8."],
            "gate": None,
            "by": "measured",
            "against": [],
            "speeds": {"1 in flight": "**+25% (+20% to +30%)**"},
        },
        {
            "name": "ngram, K=3",
            "status": "ruled out",
            "evidence": ["-8% at 8 in flight."],
            "gate": "acceptance at position 0 exceeds 0.62 at 8 requests in flight",
            "by": "measured",
            "against": [
                "no difference shown at 1 in flight",
                "slower at 8 in flight",
                "not lossless when sampled †",
            ],
            "speeds": {"8 in flight": "*-8%*"},
        },
    ],
    "loads": ["1 in flight", "8 in flight"],
    "limits": ["At 8 in flight a change of less than 3% may be the machine's."],
    "footnotes": [],
    "changes": ["eagle3, K=2: pending before, adopt now."],
    "compared_with": "1c32290",
    "prediction_error": 0.034,
}

CURVES = {
    "points": [
        {
            "num_waves": 1 if batch == 8 else 3,
            "kind": kind,
            "k": k,
            "batch": batch,
            "step_ms": 10.0 * ratio,
            "step_ms_low": 9.5 * ratio,
            "step_ms_high": 11.0 * ratio,
            "ratio": ratio,
            "ratio_low": 0.95 * ratio,
            "ratio_high": 1.1 * ratio,
        }
        for kind, k, batch, ratio in (
            ("none", 0, 1, 1.0),
            ("none", 0, 8, 1.0),
            ("tokens", 1, 1, 1.05),
            ("tokens", 3, 1, 1.2),
            ("tokens", 1, 8, 1.3),
            ("tokens", 3, 8, 1.75),
            ("eagle3", 1, 1, 1.25),
            ("eagle3", 3, 1, 1.5),
            ("eagle3", 1, 8, 1.5),
            ("eagle3", 3, 8, 2.25),
        )
    ],
}

ROUTING = {
    "num_experts": 8,
    "top_k": 2,
    "windows": [
        {
            "batch": batch,
            "t": t,
            "experts_loaded": 0.875 * bound,
            "upper_bound": bound,
            "ratio": 0.875,
        }
        for batch, t, bound in ((1, 1, 2.0), (1, 2, 3.5), (1, 4, 5.47), (4, 1, 5.47), (4, 2, 7.2))
    ],
}


def _predicted() -> dict[str, Any]:
    cells = (
        ("ngram", 1, 1, "all", 1.1),
        ("ngram", 3, 1, "all", 1.2),
        ("ngram", 3, 8, "all", 0.9),
        ("ngram", 3, 8, "maths", 0.8),
        ("eagle3", 1, 1, "all", 1.25),
        ("eagle3", 3, 8, "all", 0.75),
    )
    rows: list[dict[str, Any]] = [
        {
            "method": method,
            "k": k,
            "concurrency": concurrency,
            "category": category,
            "speedup": speedup,
            "speedup_low": 0.95 * speedup,
            "speedup_high": 1.05 * speedup,
            "tokens_per_step": 1.5,
            "step_ratio": 1.5 / speedup,
            "break_even_tokens_per_step": None if k == 1 else 1.5 / speedup,
        }
        for method, k, concurrency, category, speedup in cells
    ]
    return {
        "rows": rows,
        "kinds": [
            ["none", "none"],
            ["ngram", "tokens"],
            ["suffix", "tokens"],
            ["eagle3", "eagle3"],
        ],
        "best": [row for row in rows if row["speedup"] > 1.1],
        "better_head": [row | {"tokens_per_step": 2.5, "speedup": 1.5} for row in rows[-1:]],
        "without": {"suffix": "it was not replayed"},
    }


def _check() -> dict[str, Any]:
    speed = [
        {
            "method": row["method"],
            "k": row["k"],
            "concurrency": row["concurrency"],
            "category": row["category"],
            "predicted": row["speedup"],
            "predicted_low": row["speedup_low"],
            "predicted_high": row["speedup_high"],
            "measured": row["speedup"] / 1.02,
            "measured_low": None if row["category"] == "maths" else 0.9 * row["speedup"],
            "measured_high": None if row["category"] == "maths" else 1.1 * row["speedup"],
            "error": 0.02,
            "is_new": row["concurrency"] == 8,
        }
        for row in _predicted()["rows"]
    ]
    acceptance = [
        {
            "method": "eagle3",
            "k": 3,
            "num_sequences": 42,
            "num_tokens": 2545,
            "num_left_out": 0,
            "served_steps": 1742,
            "replayed_steps": 1722,
            "served": 1.461,
            "replayed": 1.478,
            "error": 0.0116,
        }
    ]
    return {
        "median_absolute_error": 0.034,
        "median_absolute_error_new": 0.041,
        "num_cells": 5,
        "num_cells_new": 2,
        "speed": speed,
        "acceptance": acceptance,
    }


def train_rows(*, replayed: bool) -> list[dict[str, Any]]:
    """reports/plots/train.json of two epochs and two positions."""
    rows = [
        {"epoch": epoch, "position": position, "accuracy": accuracy, "loss": 4 - accuracy}
        for epoch, position, accuracy in ((0, 0, 0.25), (0, 1, 0.125), (1, 0, 0.5), (1, 1, 0.25))
    ]
    lengths = (1.2, 1.3, 1.4, 1.6)
    if not replayed:
        return rows
    return [row | {"replayed_length": one} for row, one in zip(rows, lengths, strict=True)]


def everything(results: dict[str, Any] | None = None) -> Evidence:
    """Evidence of every kind; of other results where some are given."""
    results = results or comparable()
    predicted = _predicted()
    drawn = plot_rows(marked(results))
    plots = drawn | {
        "train": train_rows(replayed=True),
        "predicted": [
            {
                "method": row["method"],
                "num_speculative_tokens": row["k"],
                "load": f"{row['concurrency']} in flight",
                "speedup": row["speedup"],
                "verdict": "faster",
            }
            for row in predicted["rows"]
            if row["category"] == "all"
        ],
    }
    further = {
        "decision": DECISION,
        "train": {"num_samples": 456, "num_epochs": 2, "best_epoch": 1},
        "predicted": predicted,
        "check": _check(),
        "curves": CURVES,
        "routing": ROUTING,
    }
    script = "#!/bin/sh\n# eagle3, K=2\npython -m vllm.entrypoints.openai.api_server --model m\n"
    pictures = {name: _svg(name, rows, looks(results)) for name, rows in drawn.items()}
    return Evidence(results, HARDWARE, VERIFIER, plots, pictures, further, script, BENCH)


def _svg(name: str, rows: list[dict[str, Any]], styles: dict[str, Look]) -> str:
    target = StringIO()
    PICTURES[name](rows, target, styles)
    return target.getvalue()
