"""How many examples the property tests draw: few and always the same, or many with a new start."""

from typing import Any

from hypothesis import HealthCheck, settings

_SHARED: dict[str, Any] = {
    "deadline": None,  # other work on the machine must not fail a test
    "database": None,  # nothing is written beside the tests
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}

FEW = settings(max_examples=40, derandomize=True, **_SHARED)
"""For every run: the same examples each time."""
MANY = settings(max_examples=5000, **_SHARED)
"""For `make test-long`: other examples each time; a failure prints what reproduces it."""
