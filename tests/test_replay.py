from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from specmill.files import write_json
from specmill.methods import ngram
from specmill.params import Method
from specmill.replay import replay_row, rows_of, window_rows
from specmill.samples import Sample
from specmill.section import DoesNotFit, NoSettings
from specmill.view import StateView
from specmill.walk import Runs
from tests.fakes import sample

VERIFIER = {"max_model_len": 100, "fingerprint": "f", "name": "tiny"}
NO_VIEW = cast(StateView, SimpleNamespace(online=False))


def row(method: str, head: str = "models/verifier/identity.json") -> Method:
    section: Any = "bench" if method == "none" else "spec"
    return Method(method=method, section=section, head=head, settings={})


def replayed(
    chosen: Method, settings: Any, samples: list[Sample], view: StateView = NO_VIEW
) -> list[Runs]:
    return replay_row(chosen, settings, samples, VERIFIER, Path("nowhere"), view)


def repeating(category: str) -> Sample:
    """An answer that repeats its prompt."""
    return sample([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], category=category)


def test_prompt_lookup_is_replayed_with_the_window_of_its_row() -> None:
    samples = [repeating("coding")]
    (found,) = replayed(
        row("ngram"), ngram.Settings(prompt_lookup_min=1, prompt_lookup_max=2), samples
    )
    assert found.most_k == 8
    assert found.accepted[:, 7].tolist() == [5, 4, 3, 2, 1]
    (found,) = replayed(
        row("ngram"), ngram.Settings(prompt_lookup_min=3, prompt_lookup_max=3), samples
    )
    assert found.accepted[:, 7].tolist() == [0, 0, 3, 2, 1]


def test_rows_are_by_k_and_prompt_type_all_first() -> None:
    samples = [repeating("coding"), sample([1, 2, 3], [7, 8, 9, 10], category="maths")]
    runs = replayed(row("ngram"), ngram.Settings(prompt_lookup_min=1, prompt_lookup_max=2), samples)
    rows = rows_of(runs, samples, 64)
    assert [(one["k"], one["category"]) for one in rows[:4]] == [
        (1, "all"), (1, "coding"), (1, "maths"), (2, "all"),
    ]  # fmt: skip
    by_place = {(one["k"], one["category"]): one for one in rows}
    # coding, K=2: 1 known; 2 3 and 4; 5 6: 5 tokens in 2 steps; maths: 3 tokens in 3, no draft
    assert by_place[2, "coding"]["tokens_per_step"] == 2.5
    assert by_place[2, "maths"]["tokens_per_step"] == 1.0
    assert by_place[2, "maths"]["acceptance_length"] is None
    assert by_place[2, "all"]["tokens_per_step"] == 8 / 5
    assert by_place[2, "all"]["draft_coverage"] == 0.4


def test_only_as_many_tokens_as_the_bench_asks_for_are_gone_through() -> None:
    samples = [repeating("coding")]
    runs = replayed(row("ngram"), ngram.Settings(prompt_lookup_min=1, prompt_lookup_max=2), samples)
    assert rows_of(runs, samples, 3)[0]["num_tokens"] == 2


def test_every_window_up_to_five_tokens_is_tried() -> None:
    rows = window_rows([repeating("coding")], 64, 100)
    windows = {(one["prompt_lookup_min"], one["prompt_lookup_max"]) for one in rows}
    assert windows == {(least, most) for most in range(1, 6) for least in range(1, most + 1)}
    assert len(rows) == 15 * 8
    by_place = {(one["prompt_lookup_min"], one["prompt_lookup_max"], one["k"]): one for one in rows}
    assert by_place[1, 2, 2]["tokens_per_step"] == 2.5
    # a window of five is known only with the last draft left
    assert by_place[5, 5, 2]["draft_coverage"] == 0.2


@pytest.mark.parametrize("method", ["none", "peagle", "dflash", "draft_model"])
def test_a_method_that_cannot_be_replayed_says_why(method: str) -> None:
    with pytest.raises(DoesNotFit):
        replayed(row(method), NoSettings(), [repeating("coding")])


def test_a_refused_head_is_not_replayed(tmp_path: Path) -> None:
    write_json(tmp_path / "inspection.json", {"refused": "it is too wide"})
    with pytest.raises(DoesNotFit, match="it is too wide"):
        replayed(row("eagle3", str(tmp_path)), NoSettings(), [repeating("coding")])


def test_without_kept_states_no_head_is_replayed(tmp_path: Path) -> None:
    view = cast(StateView, SimpleNamespace(online=True))
    with pytest.raises(DoesNotFit, match=r"extract\.mode is online"):
        replayed(row("eagle3", str(tmp_path)), NoSettings(), [repeating("coding")], view)


def test_the_figures_have_four_digits() -> None:
    runs = Runs.of_chain(np.array([[True], [False], [False], [True], [False], [False]]))
    one = sample([1], list(range(7)))
    assert rows_of([runs], [one], 64)[0]["tokens_per_step"] == 1.5
    assert rows_of([runs], [one], 64)[0]["acceptance_rate_pos_0"] == 0.5
