"""What the comparison says of sampling at temperature 1: the evidence, and what failed.

Pure functions of reports/sampling/NAME.json, by row.
"""

from typing import Any

Sampling = dict[str, dict[str, Any]]


def sampling_section(sampling: Sampling) -> list[str]:
    """Markdown: a table of what was tested, then a line per row that failed or was not tested.

    Args:
        sampling: Results by row.
    """
    if not sampling:
        return []
    lines = [
        "## Is sampling lossless?",
        "",
        "Of a small random model served with each method at temperature 1, every sampled token is "
        "held against the exact distribution given what came before it (chi-square; p is the "
        "smallest of all tests, corrected for their number). `none` is the control. A p below "
        "0.001 is called a difference: of right samplers one in a thousand.",
        "",
        "| method | same distribution | p | samples | acceptance length |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name, result in sampling.items():
        if result["lossless"] is None:
            lines.append(f"| {name} | not tested | - | - | - |")
            continue
        length = result["acceptance_length"]
        lines.append(
            f"| {name} | {'yes' if result['lossless'] else '**no**'} | {_p(result)} | "
            f"{result['num_samples']} | {'-' if length is None else f'{length:.2f}'} |"
        )
    reasons = [*_wrong(sampling), *_not_tested(sampling)]
    return [*lines, "", *reasons, *([""] if reasons else [])]


_LEAST = 1e-300
"""Smaller ones are lost to floating point, some as 0."""


def _p(result: dict[str, Any]) -> str:
    return f"< {_LEAST:.0e}" if result["p_value"] < _LEAST else f"{result['p_value']:.2g}"


def _wrong(sampling: Sampling) -> list[str]:
    wrong = [name for name, result in sampling.items() if result["lossless"] is False]
    return [f"- **Not lossless when sampled** (†, above): {', '.join(wrong)}."] if wrong else []


def _not_tested(sampling: Sampling) -> list[str]:
    return [
        f"- {name}: sampling was not tested: {result['not_checked']}"
        for name, result in sampling.items()
        if result["lossless"] is None
    ]
