"""What vLLM is told for a row whose K goes by the number of requests in flight."""

from typing import Any

from specmill.methods import speculative_configs
from specmill.params import Method
from specmill.schedule import drafting_ranges, most_drafted, scheduled_config


def scheduled_configs(
    name: str, chosen: Method, schedules: dict[str, Any], verifier: dict[str, Any]
) -> dict[int, dict[str, Any] | None]:
    """The speculative config of a row with its schedule, by the largest K that it drafts.

    Args:
        name: The row of `methods`.
        chosen: Its entry.
        schedules: Content of reports/schedule.json.
        verifier: identity.json.

    Raises:
        DoesNotFit: when it has no schedule, or one that never drafts.
        ValueError: as specmill.methods.speculative_configs.
    """
    ranges = drafting_ranges(schedules, name)
    k = most_drafted(ranges)
    config = speculative_configs(name, chosen, [k], verifier)[k]
    assert config is not None, f"{chosen.method} speculates"
    return {k: scheduled_config(config, ranges)}
