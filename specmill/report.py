"""Tables and plots from the JSON that the benches wrote; pure functions of it."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specmill.samples import ALL

Results = dict[str, dict[str, Any]]
"""reports/bench/NAME.json by method."""


def headline(result: dict[str, Any]) -> dict[str, Any]:
    """Figures of the first K measured, spec.tokens (k0 for `none`), by concurrency."""
    return dict(result["figures"][result["headline"]])


def _by_number(names: Iterable[str]) -> list[str]:
    """`k1, k3, k16` and `c1, c8, c16` in this order: JSON sorts them as text."""
    return sorted(set(names), key=lambda name: int(name[1:]))


def summary_metrics(results: Results) -> dict[str, Any]:
    """The few numbers worth comparing between experiments, by method and concurrency."""
    rows: dict[str, Any] = {}
    shown = (
        "output_tokens_per_s",
        "speedup",
        "acceptance_length",
        "tokens_per_engine_step",
        "ttft_ms",
        "itl_ms",
        "identical_outputs",
    )
    for method, result in results.items():
        figures = headline(result)
        rows[method] = {"num_speculative_tokens": int(result["headline"][1:])}
        for concurrency in _by_number(figures):
            row = figures[concurrency][ALL]
            rows[method][concurrency] = {name: row[name] for name in shown if name in row}
    return rows


def comparison(results: Results, hardware: dict[str, Any], verifier: dict[str, Any]) -> str:
    """The comparison table as Markdown: one block per concurrency, one row per prompt type."""
    machine = ", ".join(gpu["name"] for gpu in hardware["gpus"]) or (
        f"{hardware['cpu_model']}, {hardware['num_usable_cores']} cores"
    )
    lines = [
        "# Does speculation pay?",
        "",
        f"{verifier['name']} on {machine}, vLLM {hardware['versions']['vllm']}; greedy. Output "
        "tokens per second of all requests together. The baseline of each row is the same server "
        "without speculation, measured in the same stage on the same prompts.",
        "",
    ]
    speculating = {name: result for name, result in results.items() if _has_reference(result)}
    for concurrency in _concurrencies(results):
        requests = concurrency[1:]
        lines += [f"## {requests} request{'s' if requests != '1' else ''} in flight", ""]
        lines += [
            "| prompt type | method | K | baseline tok/s | tok/s | change | acceptance length |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for name, result in speculating.items():
            for k in _by_number(result["figures"]):
                for category, row in result["figures"][k][concurrency].items():
                    lines.append(_table_row(category, name, k, row))
        lines += ["", *_baseline_lines(results, concurrency), ""]
    lines += _notes(results)
    return "\n".join(lines).rstrip() + "\n"


def _table_row(category: str, method: str, k: str, row: dict[str, Any]) -> str:
    length = f"{row['acceptance_length']:.2f}" if "acceptance_length" in row else "-"
    label = f"**{category}**" if category == ALL else category
    return (
        f"| {label} | {method} | {k[1:]} | {row['reference_tokens_per_s']:.1f} "
        f"| {row['output_tokens_per_s']:.1f} | {_percent(row['speedup'] - 1)} | {length} |"
    )


def _percent(change: float) -> str:
    """A signed whole percentage; what rounds to nothing is +0%."""
    return f"{round(100 * change):+d}%"


def _baseline_lines(results: Results, concurrency: str) -> list[str]:
    """How far each method's reference lies from the `none` measured in its own stage."""
    if "none" not in results:
        return []
    none = results["none"]["figures"]["k0"][concurrency][ALL]["output_tokens_per_s"]
    drifts = [
        f"{name} {_percent(row['reference_tokens_per_s'] / none - 1)}"
        for name, result in results.items()
        if _has_reference(result)
        for row in [headline(result)[concurrency][ALL]]
    ]
    return [
        f"`none` in its own stage: {none:.1f} tok/s. Drift of each method's baseline from it: "
        f"{', '.join(drifts) or 'no other method'}."
    ]


def _notes(results: Results) -> list[str]:
    """What a reader must know about the rows: eager engines, reused prompts, method quirks."""
    notes = []
    eager = sorted(
        name
        for name, result in results.items()
        if any(row["enforce_eager"] == "True" for row in result["engine"].values())
    )
    if eager:
        notes.append(f"Served **uncompiled (eager)**, for tests only: {', '.join(eager)}.")
    if any(not row["fresh_prompts"] for result in results.values() for row in _rows(result)):
        notes.append("Some prompts were sent twice to one server: prefixes may have been cached.")
    apart = sorted(
        name
        for name, result in results.items()
        if any(not row["one_execution"] for row in _rows(result))
    )
    if apart:
        notes.append(
            f"{', '.join(apart)}: the stage was interrupted and went on later, so some cells and "
            "their baseline lie apart in time; `dvc repro -f bench@NAME` measures them together."
        )
    for name, result in results.items():
        facts = [f for key, f in result["engine"].items() if key.startswith("method")]
        off = [f for f in facts if f["async_scheduling"] is False]
        if off:
            notes.append(f"{name}: vLLM turned asynchronous scheduling off, part of its cost.")
        runners = {row["model_runner"] for row in result["engine"].values()}
        if len(runners) > 1:
            notes.append(
                f"{name}: the method and its baseline ran on different model runners "
                f"({', '.join(sorted(map(str, runners)))}), part of the change."
            )
    if "ngram" in results:
        notes.append(
            "n-gram's acceptance length counts only steps that found a match; it is not "
            "comparable with a draft model's."
        )
    return [f"- {note}" for note in notes]


def _rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every row of a method's figures, over all K, concurrencies and categories."""
    for by_concurrency in result["figures"].values():
        for categories in by_concurrency.values():
            yield from categories.values()


def _has_reference(result: dict[str, Any]) -> bool:
    return "speedup" in next(iter(headline(result).values()))[ALL]


def _concurrencies(results: Results) -> list[str]:
    return _by_number(
        concurrency for result in results.values() for concurrency in headline(result)
    )


def acceptance_curves(results: Results) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """Acceptance rate by draft position (from 0) at the headline K and the first concurrency.

    Returns:
        Rows by method, without methods that drafted nothing, and the concurrency, e.g. `c1`.
    """
    concurrency = _concurrencies(results)[0]
    prefix = "acceptance_rate_pos_"
    curves: dict[str, list[dict[str, Any]]] = {}
    for method, result in results.items():
        row = headline(result)[concurrency][ALL]
        rates = {
            int(name.removeprefix(prefix)): rate
            for name, rate in row.items()
            if name.startswith(prefix)
        }
        if rates:
            curves[method] = [
                {"position": position, "acceptance_rate": rates[position]}
                for position in sorted(rates)
            ]
    return curves, concurrency


def plot_acceptance(curves: dict[str, list[dict[str, Any]]], concurrency: str, path: Path) -> None:
    """Draw acceptance by position as SVG; the same numbers give the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "specmill"
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for name, rows in curves.items():
        axes.plot(
            [row["position"] for row in rows],
            [row["acceptance_rate"] for row in rows],
            marker="o",
            label=name,
        )
    axes.set(
        xlabel="draft position (from 0)",
        ylabel="accepted share of drafts",
        title=f"Acceptance by position, {concurrency[1:]} in flight",
        ylim=(0, 1),
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
