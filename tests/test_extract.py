import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specmill import extract
from specmill.extract import extract_missing
from specmill.samples import Sample
from specmill.store import HiddenStateStore, StateSpec, StateView
from tests.fakes import sample

SPEC = StateSpec("fingerprint", (2, 4), hidden_size=3, dtype="bfloat16")
SAMPLES = [sample([number], [number + 1, number + 2]) for number in range(0, 50, 10)]


def states_of(ids: list[int]) -> torch.Tensor:
    """[num_tokens, 2 layers, 3]: a number that only this token at this depth has."""
    grid = [[[10.0 * layer + token] * 3 for layer in (1, 2)] for token in ids]
    return torch.tensor(grid, dtype=torch.bfloat16)


class FakeEngine:
    """Stands for vLLM: gives each sample's own ids and states, unless told otherwise."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.wrong: Sample | None = None

    @contextlib.contextmanager
    def __call__(self, model: Path, layer_ids: list[int], scratch: Path, *_: Any) -> Iterator[Any]:
        assert layer_ids == [2, 4]
        assert scratch.is_dir()

        def run(samples: list[Sample]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            self.batches.append(len(samples))
            for one in samples:
                ids = one.input_ids.tolist()
                echoed = ids[::-1] if one is self.wrong else ids
                yield torch.tensor(echoed), states_of(ids)

        yield run


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(extract, "_engine", fake)
    return fake


@pytest.fixture
def run(tmp_path: Path) -> Callable[[list[Sample]], int]:
    """Extract into the store of this test, two samples at a time."""

    def extract_them(samples: list[Sample]) -> int:
        return extract_missing(
            samples,
            SPEC,
            HiddenStateStore(tmp_path / "store"),
            Path("model"),
            max_model_len=64,
            shard_bytes=10**6,
            batch=2,
            staging=tmp_path / "staging",
            cpu_kv_cache_gib=1,
            gpu_memory_utilization=0.5,
        )

    return extract_them


def test_every_sample_gets_the_states_of_its_own_tokens(
    engine: FakeEngine, run: Callable[[list[Sample]], int], tmp_path: Path
) -> None:
    assert run(SAMPLES) == 15
    rows = [(one.sample_key, 3) for one in SAMPLES]
    HiddenStateStore(tmp_path / "store").write_view(tmp_path / "view", SPEC, rows)
    view = StateView(tmp_path / "view")
    for one in SAMPLES:
        ids, states = view.load(one.sample_key)
        assert ids.tolist() == one.input_ids.tolist()
        assert torch.equal(states, states_of(one.input_ids.tolist()))
    assert engine.batches == [2, 2, 1]


def test_only_what_the_store_lacks_is_extracted(
    engine: FakeEngine, run: Callable[[list[Sample]], int]
) -> None:
    assert run(SAMPLES[1:3]) == 6
    engine.batches.clear()
    assert run(SAMPLES) == 9
    assert engine.batches == [2, 1]


def test_the_engine_is_not_started_when_nothing_is_missing(
    engine: FakeEngine, run: Callable[[list[Sample]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(SAMPLES)
    monkeypatch.setattr(extract, "_engine", None)
    assert run(SAMPLES) == 0


def test_wrong_states_are_refused_by_sample_and_earlier_ones_are_kept(
    engine: FakeEngine, run: Callable[[list[Sample]], int], tmp_path: Path
) -> None:
    engine.wrong = SAMPLES[3]
    with pytest.raises(ValueError, match=f"sample {SAMPLES[3].sample_key[:12]}: the engine echoed"):
        run(SAMPLES)
    store = HiddenStateStore(tmp_path / "store")
    kept = [SPEC.store_key(one.sample_key) in store for one in SAMPLES]
    assert kept == [True, True, True, False, False]
    engine.wrong = None
    assert run(SAMPLES) == 6


def test_nothing_is_left_in_the_staging_folder(
    engine: FakeEngine, run: Callable[[list[Sample]], int], tmp_path: Path
) -> None:
    engine.wrong = SAMPLES[0]
    with pytest.raises(ValueError, match="the engine echoed"):
        run(SAMPLES)
    assert list((tmp_path / "staging").iterdir()) == []
