"""What the comparison says of sampling at temperature 1: the evidence, and what failed.

Pure functions of reports/sampling/NAME.json, by row.
"""

from typing import Any

Sampling = dict[str, dict[str, Any]]


def sampling_section(sampling: Sampling, known_fault: str | None) -> list[str]:
    """Markdown: a table of what was tested, then a line per row that failed or was not tested.

    Args:
        sampling: Results by row.
        known_fault: What is known to be wrong with this engine's sampling, a clause; or None.
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
            f"| {name} | {'yes' if result['lossless'] else '**no**'} | {result['p_value']:.2g} | "
            f"{result['num_samples']} | {'-' if length is None else f'{length:.2f}'} |"
        )
    reasons = [
        f"- {line}"
        for name, result in sampling.items()
        if (line := _reason(name, result, known_fault))
    ]
    return [*lines, "", *reasons, *([""] if reasons else [])]


def _reason(name: str, result: dict[str, Any], known_fault: str | None) -> str | None:
    if result["lossless"] is None:
        return f"{name}: sampling was not tested: {result['not_checked']}"
    if result["lossless"]:
        return None
    return (
        f"**{name} is not lossless when sampled**: at temperature {result['temperature']:g} its "
        f"samples have another distribution than the verifier's (p = {result['p_value']:.1g} over "
        f"{result['num_tests']} tests of {result['num_samples']} samples); greedy answers are "
        f"another matter. {'Known: ' + known_fault if known_fault else 'No cause is known.'}"
    )
