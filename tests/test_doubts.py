"""What speaks against a figure is said once, however many rows it speaks against."""

from typing import Any

from specmill.doubts import _draining


def result(*rows: tuple[int, float]) -> dict[str, Any]:
    return {
        "rows": [
            {"category": "all", "concurrency": load, "rate": None, "context": 0,
             "mean_in_flight": mean, "speedup": 1.0}
            for load, mean in rows
        ]
    }  # fmt: skip


def test_loads_that_were_not_full_are_one_sentence_with_the_mean_of_each() -> None:
    """85% of 8 are 6.8 and of 32 27.2: below them a load is not what it is called."""
    found = {"none": result((8, 6.7), (32, 27.3)), "eagle3": result((32, 24.3))}
    assert _draining(found) == [
        "Fewer were in flight than asked for, on average: none at 8 in flight 6.7, eagle3 at 32 in "
        "flight 24.3. Answers end at different times; more bench.requests keep a load full for "
        "longer."
    ]


def test_full_loads_are_no_doubt() -> None:
    assert _draining({"none": result((1, 1.0), (8, 6.9))}) == []
