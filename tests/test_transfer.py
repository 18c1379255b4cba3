"""Hidden states as speculators' trainer gets them: from a view, or online from a server."""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from hs_connectors import HiddenStatesBackend

from specmill import paths
from specmill.loading import make_loader
from specmill.manifest import write_manifest
from specmill.samples import Sample
from specmill.shards import FP8, StateSpec
from specmill.states import quantise, stage
from specmill.transfer import StoreBackend, StoredSamples, StoreTransfer
from specmill.view import StateView
from tests.test_training import CHOSEN, HIDDEN_SIZE, SPEC, make_view, random_samples, stored
from tests.workspace import ROOT


@pytest.fixture
def data(tmp_path: Path) -> tuple[list[Sample], list[torch.Tensor], StateView]:
    samples, states = random_samples(4)
    return samples, states, make_view(tmp_path, samples, states)


def test_row_i_is_the_sample_with_its_ids_wherever_it_lies_in_the_view(
    data: tuple[list[Sample], list[torch.Tensor], StateView],
) -> None:
    samples, states, view = data
    transfer = StoreTransfer(view, [samples[2].sample_key, samples[0].sample_key], torch.bfloat16)
    for row, number in enumerate((2, 0)):
        found = transfer.get_cached(row)
        assert found is not None
        assert found["token_ids"].tolist() == samples[number].input_ids.tolist()
        assert found["token_ids"].dtype == torch.int64
        assert torch.equal(found["hidden_states"], states[number])


def test_fp8_states_come_back_in_the_dtype_of_training(tmp_path: Path) -> None:
    samples, states = random_samples(1)
    spec = StateSpec("f", SPEC.layer_ids, HIDDEN_SIZE, FP8)
    view = make_view(tmp_path, samples, states, spec)
    found = StoreTransfer(view, [samples[0].sample_key], torch.bfloat16).get_cached(0)
    assert found is not None
    kept, scales = quantise(states[0])
    by_hand = torch.stack(
        [kept[:, layer].float() * scales[:, layer, None] for layer in range(4)], dim=1
    )
    assert torch.equal(found["hidden_states"], by_hand.to(torch.bfloat16))
    # e4m3 has 3 bits of mantissa: no normal value is off by more than 1/16
    assert (by_hand - states[0].float()).norm() / states[0].float().norm() < 1 / 16


def test_the_arrow_file_of_an_interrupted_training_is_written_again_when_it_was_cut(
    data: tuple[list[Sample], list[torch.Tensor], StateView], tmp_path: Path
) -> None:
    samples, _, view = data

    def rows() -> list[list[int]]:
        dataset = StoredSamples(samples, view, tmp_path / "scratch", 64, torch.bfloat16, [], 60)
        return [dataset[i]["input_ids"].tolist() for i in range(len(samples))]

    first = rows()
    (arrow,) = (tmp_path / "scratch").glob("*/*.arrow")
    written = arrow.stat().st_mtime_ns
    assert rows() == first
    assert arrow.stat().st_mtime_ns == written
    os.truncate(arrow, arrow.stat().st_size // 2)
    assert rows() == first


def test_a_sample_that_was_changed_on_the_disk_ends_training(
    data: tuple[list[Sample], list[torch.Tensor], StateView],
) -> None:
    samples, _, view = data
    dataset = stored(samples, view)
    (shard,) = view.folder.glob("*.safetensors")
    shard.chmod(0o644)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # within the last sample
    shard.write_bytes(content)
    assert len(dataset[0]["input_ids"]) == 12
    with pytest.raises(ValueError, match=f"sample {samples[3].sample_key[:12]} .* are damaged"):
        dataset[3]


def test_a_view_without_one_of_its_shards_is_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    samples, states = random_samples(2)
    view = make_view(tmp_path, samples, states)
    (shard,) = view.folder.glob("*.safetensors")
    shard.unlink()
    with pytest.raises(ValueError, match=rf"states of 2 of 2 samples are missing: .*{shard.name}"):
        stored(samples, view)


def test_samples_are_written_once_for_the_same_ids_and_masks(
    data: tuple[list[Sample], list[torch.Tensor], StateView], tmp_path: Path
) -> None:
    samples, _, view = data

    def written(which: list[Sample]) -> dict[Path, int]:
        StoredSamples(which, view, tmp_path / "arrow", 64, torch.bfloat16, [], 60)
        return {file: file.stat().st_mtime_ns for file in (tmp_path / "arrow").rglob("*.arrow")}

    first = written(samples)
    assert len(first) == 1
    assert written(samples) == first
    other_mask = samples[0].loss_mask.copy()
    other_mask[:] = 1
    assert len(written([replace(samples[0], loss_mask=other_mask), *samples[1:]])) == 2
    assert len(written(samples[::-1])) == 3


def test_samples_whose_writing_was_interrupted_are_written_again(
    data: tuple[list[Sample], list[torch.Tensor], StateView], tmp_path: Path
) -> None:
    samples, _, view = data
    StoredSamples(samples, view, tmp_path / "whole", 64, torch.bfloat16, [], 60)
    (place,) = (tmp_path / "whole").iterdir()
    begun = tmp_path / "cut" / f"{place.name}.tmp"
    begun.mkdir(parents=True)
    (begun / "state.json").write_text("{")
    again = StoredSamples(samples, view, tmp_path / "cut", 64, torch.bfloat16, [], 60)
    assert len(again) == 4
    assert [path.name for path in (tmp_path / "cut").iterdir()] == [place.name]


def test_only_the_samples_asked_for_need_to_be_there(tmp_path: Path) -> None:
    samples, states = random_samples(3)
    view = make_view(tmp_path, samples[:2], states[:2])
    assert len(stored(samples[:2], view)) == 2
    with pytest.raises(ValueError, match="1 of 3 samples"):
        stored(samples, view)


@pytest.mark.slow
def test_processes_that_read_ahead_give_the_batches_of_reading_in_between(
    data: tuple[list[Sample], list[torch.Tensor], StateView],
) -> None:
    samples, _, view = data
    dataset = stored(samples, view)
    chosen = CHOSEN.model_copy(update={"tokens_per_step": 24})
    one, two = (
        list(make_loader(dataset, chosen, 24, HIDDEN_SIZE, 3, workers)) for workers in (0, 1)
    )
    assert len(one) == len(two) == 2
    for batch, other in zip(one, two, strict=True):
        assert batch.keys() == other.keys()
        for name, value in batch.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name


def test_speculators_finds_the_rows_of_its_own_dataset_by_their_ids(
    data: tuple[list[Sample], list[torch.Tensor], StateView], tmp_path: Path
) -> None:
    samples, states, view = data
    rows = {"input_ids": [samples[3].input_ids, samples[1].input_ids]}
    Dataset.from_dict(rows).with_format("torch").save_to_disk(tmp_path / "prepared")
    arguments = argparse.Namespace(hidden_states_path=str(view.folder))
    transfer = StoreBackend.from_train_args(arguments, str(tmp_path / "prepared"))
    for row, number in enumerate((3, 1)):
        found = transfer.get_cached(row)
        assert found is not None
        assert torch.equal(found["hidden_states"], states[number])
    unknown = {"input_ids": [[1, 2, 3]]}
    Dataset.from_dict(unknown).save_to_disk(tmp_path / "other")
    with pytest.raises(ValueError, match="no hidden states of 1 of 1 samples"):
        StoreBackend.from_train_args(arguments, str(tmp_path / "other"))


@pytest.mark.slow
def test_speculators_command_line_offers_the_store_as_a_backend() -> None:
    assert HiddenStatesBackend.registry["specmill"] is StoreBackend
    done = subprocess.run(
        [sys.executable, "-m", "specmill.transfer", "train", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", "NO_COLOR": "1"},
    )
    backends = done.stdout[done.stdout.index("--hidden-states-backend") :][:400]
    assert "specmill" in backends


class Verifier(ThreadingHTTPServer):
    """Stands for a verifier that stages states: those it was given, by token ids."""

    def __init__(self, staging: Path, spec: StateSpec, states: dict[tuple[int, ...], Any]):
        super().__init__(("127.0.0.1", 0), Handler)
        staging.mkdir()
        self.staging, self.spec, self.states = staging, spec, states
        self.keys: list[str | None] = []
        self.failures = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Verifier

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.append(self.headers["Authorization"])
        if self.server.failures:
            self.server.failures -= 1
            self.send_error(500)
            return
        path = self.server.staging / f"{len(self.server.keys)}.safetensors"
        ids = torch.tensor(body["prompt"])
        stage(path, self.server.spec, ids, self.server.states[tuple(body["prompt"])])
        choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
        answer = {
            "id": "1", "object": "text_completion", "created": 0, "model": "verifier",
            "choices": [choice | {"prompt_token_ids": body["prompt"]}],
            "kv_transfer_params": {"hidden_states_path": str(path)},
        }  # fmt: skip
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def online(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[Sample], Verifier, StateView]]:
    samples, states = random_samples(2)
    by_ids = {tuple(s.input_ids.tolist()): x for s, x in zip(samples, states, strict=True)}
    write_manifest(tmp_path / "view", SPEC, [], online=True)
    server = Verifier(tmp_path / "staging", SPEC, by_ids)
    monkeypatch.setattr(paths, "STAGING", server.staging)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield samples, server, StateView(tmp_path / "view")
    server.shutdown()
    server.server_close()


def test_online_training_gets_what_the_store_would_have_given(
    online: tuple[list[Sample], Verifier, StateView], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    samples, server, view = online
    (tmp_path / "kept").mkdir()
    kept = make_view(tmp_path / "kept", samples, list(server.states.values()))
    monkeypatch.setenv("SPECMILL_API_KEY", "secret")
    asked, read = stored(samples, view, endpoints=[server.url]), stored(samples, kept)
    for number in range(2):
        for name, value in read[number].items():
            assert torch.equal(asked[number][name], value), name
    assert set(server.keys) == {"Bearer secret"}
    assert list(server.staging.iterdir()) == []


def test_online_training_does_not_go_on_without_a_sample(
    online: tuple[list[Sample], Verifier, StateView],
) -> None:
    samples, server, view = online
    dataset = stored(samples, view, endpoints=[server.url])
    dataset.max_retries = 0
    server.failures = 1
    assert len(dataset[0]["input_ids"]) == 12  # asked again
    server.failures = 100
    with pytest.raises(RuntimeError, match=f"states of sample {samples[1].sample_key[:12]}: "):
        dataset[1]


def test_online_training_refuses_another_verifier(
    online: tuple[list[Sample], Verifier, StateView],
) -> None:
    samples, server, view = online
    server.spec = StateSpec("another", SPEC.layer_ids, HIDDEN_SIZE, "bfloat16")
    with pytest.raises(RuntimeError, match="another"):
        stored(samples, view, endpoints=[server.url])[0]
    assert list(server.staging.iterdir()) == []


@pytest.mark.parametrize("endpoints", [[], ["http://127.0.0.1:1", "http://127.0.0.1:2"]])
def test_online_training_takes_exactly_one_server(
    online: tuple[list[Sample], Verifier, StateView], endpoints: list[str]
) -> None:
    samples, _, view = online
    with pytest.raises(ValueError, match=r"takes one server in runtime\.extract_endpoints"):
        StoredSamples(samples, view, view.folder, 64, torch.bfloat16, endpoints, 60)


def test_a_server_cannot_have_another_file_read_or_deleted(
    online: tuple[list[Sample], Verifier, StateView], tmp_path: Path
) -> None:
    samples, server, view = online
    mine = tmp_path / "mine.safetensors"
    ids = torch.tensor(samples[0].input_ids)
    stage(mine, SPEC, ids, server.states[tuple(samples[0].input_ids.tolist())])
    (server.staging / "link.safetensors").symlink_to(mine)
    (server.staging / "of_ours.txt").write_text("kept")
    transfer = StoreTransfer(view, [samples[0].sample_key], torch.bfloat16)
    for named in (
        str(mine),
        f"{server.staging}/../mine.safetensors",
        f"{server.staging}/link.safetensors",
        f"{server.staging}/of_ours.txt",
        f"{server.staging}/..",
    ):
        with pytest.raises(ValueError, match=r"no shard in .*staging; start it with --staging"):
            transfer.get_generated({"hidden_states_path": named})
        with pytest.raises(ValueError, match="no shard in"):
            transfer.delete(named)
    assert mine.is_file()
    assert (server.staging / "of_ours.txt").read_text() == "kept"


def test_no_proxy_sees_the_samples_and_the_key_of_online_training(
    online: tuple[list[Sample], Verifier, StateView], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, server, view = online
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # the discard port: nobody answers
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    dataset = stored(samples, view, endpoints=[server.url])
    dataset.max_retries = 0
    assert len(dataset[0]["input_ids"]) == 12
