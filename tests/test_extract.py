import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specmill import extract
from specmill.extract import check_disk, extract_missing, state_bytes
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


def test_bytes_on_disk_are_tokens_by_layers_by_width_by_two_for_bfloat16() -> None:
    # SmolLM2: 4 layers x 576 x 2 = 4,608 bytes a token
    smol = StateSpec("fingerprint", (2, 15, 27, 30), hidden_size=576, dtype="bfloat16")
    assert state_bytes(smol, 1) == 4608
    assert state_bytes(smol, 1000) == 4_608_000


def free_space(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=num_bytes))


def test_a_disk_too_small_is_found_before_the_engine_starts(
    run: Callable[[list[Sample]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract, "_engine", None)
    free_space(monkeypatch, 15 * 2 * 3 * 2 - 1)  # 15 tokens x 2 layers x 3 wide x 2 bytes
    with pytest.raises(ValueError, match=r"15 tokens x 2 layers x 3 .*lower prepare\.limit"):
        run(SAMPLES)


def test_a_disk_that_just_holds_the_states_will_do(
    engine: FakeEngine, run: Callable[[list[Sample]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    free_space(monkeypatch, 15 * 2 * 3 * 2)
    assert run(SAMPLES) == 15


def test_a_disk_without_room_for_dvcs_copy_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free_space(monkeypatch, 15 * 2 * 3 * 2 * 2 - 1)
    check_disk(SPEC, 15, tmp_path)
    assert "cache.type reflink,hardlink" in caplog.text
    caplog.clear()
    check_disk(SPEC, 14, tmp_path)
    assert caplog.text == ""
