"""The real pipeline on the real verifier: one run at smoke settings, shared by every test here."""

import json
import math
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmill.files import read_json
from specmill.layers import default_aux_layer_ids
from specmill.records import read_requests
from specmill.samples import Sample, read_samples
from specmill.view import StateView
from specmill.vocab import load_tables
from tests.workspace import CANARY, Workspace

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "models/verifier")


@pytest.fixture(scope="module")
def training(folder: Path) -> list[Sample]:
    return read_samples(folder / "data/prepared/train.parquet")


def bench_result(folder: Path, method: str) -> dict[str, Any]:
    return dict(read_json(folder / f"reports/bench/{method}.json"))


def bench_row(folder: Path, method: str, concurrency: int) -> dict[str, Any]:
    """The row over all categories at one concurrency."""
    (row,) = (
        row
        for row in bench_result(folder, method)["rows"]
        if (row["concurrency"], row["category"]) == (concurrency, "all")
    )
    return dict(row)


def raw_requests(folder: Path, method: str) -> list[dict[str, Any]]:
    return read_requests(folder / f"data/bench/{method}/requests.parquet")


def test_the_loss_mask_decodes_to_exactly_the_assistants_text(
    training: list[Sample], tokenizer: Any
) -> None:
    assert len(training) >= 40
    for sample in training:
        answer = tokenizer.decode(sample.answer_token_ids, skip_special_tokens=True)
        assert answer == sample.text


def test_prompt_ids_are_those_of_the_chat_template(training: list[Sample], tokenizer: Any) -> None:
    for sample in training:
        prompt = tokenizer.decode(sample.prompt_token_ids)
        assert prompt.endswith("<|im_start|>assistant\n")
        assert prompt.count("<|im_start|>user") == sample.turn + 1


def test_hidden_states_are_those_of_transformers(folder: Path, training: list[Sample]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    view = StateView(folder / "data/hidden_states")
    model = AutoModelForCausalLM.from_pretrained(
        folder / "models/verifier", dtype=getattr(torch, view.spec.dtype)
    )
    last: list[torch.Tensor] = []
    # transformers' last entry is taken after the final norm, so the last layer is hooked instead
    model.model.layers[-1].register_forward_hook(
        lambda _module, _inputs, output: last.append(
            output[0] if isinstance(output, tuple) else output
        )
    )
    layers = list(view.spec.layer_ids)
    assert layers == [*default_aux_layer_ids(30), 30]
    for sample in training[:3]:
        ids, states, _ = view.load(sample.sample_key)  # [num_tokens, num_layers, hidden_size]
        assert ids.tolist() == sample.input_ids.tolist()
        last.clear()
        with torch.no_grad():
            output = model(ids.long()[None], output_hidden_states=True)
        expected = [output.hidden_states[layer][0] for layer in layers[:-1]]
        expected.append(last[0].reshape(states.shape[0], -1))
        for index, reference in enumerate(expected):
            cosine = torch.nn.functional.cosine_similarity(
                states[:, index].float(), reference.float(), dim=-1
            )
            assert cosine.mean() > 0.999, f"layer id {layers[index]}: {cosine.mean()}"


def test_the_head_carries_the_vocabulary_that_was_chosen(folder: Path) -> None:
    from safetensors import safe_open

    d2t, t2d = load_tables(folder / "data/vocab")
    assert d2t.shape == (2048,)
    assert t2d.sum() == 2048
    assert np.array_equal(np.nonzero(t2d)[0], np.arange(2048) + d2t)
    with safe_open(folder / "models/eagle3/model.safetensors", framework="np") as weights:
        assert np.array_equal(weights.get_tensor("d2t"), d2t)
        assert np.array_equal(weights.get_tensor("t2d").astype(bool), t2d)


def test_the_head_is_portable(folder: Path) -> None:
    config = (folder / "models/eagle3/config.json").read_text()
    assert str(folder) not in config
    assert json.loads(config)["speculators_config"]["verifier"]["name_or_path"].startswith(
        "SmolLM2-135M-Instruct"
    )
    provenance = read_json(folder / "models/eagle3/provenance.json")
    assert provenance["verifier"] == read_json(folder / "models/verifier/identity.json")
    assert len(provenance["code.commit"]) == 40


def test_training_lowered_the_held_out_loss(folder: Path) -> None:
    rows = read_json(folder / "reports/plots/train.json")
    by_epoch = {row["epoch"]: row["loss"] for row in rows if row["position"] == 0}
    assert by_epoch[7] < by_epoch[0]
    # a head that sees nothing useful stays near the loss of guessing among 2048 tokens
    assert by_epoch[7] < math.log(2048)


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_acceptance_length_is_one_plus_the_sum_of_the_rates(folder: Path, method: str) -> None:
    rows = bench_result(folder, method)["rows"]
    assert {(row["num_speculative_tokens"], row["concurrency"]) for row in rows} == {(3, 1), (3, 4)}
    checked = 0
    for row in rows:
        if row["num_drafts"] == 0:
            assert row.get("acceptance_length") is None
            continue
        rates = [row[f"acceptance_rate_pos_{i}"] for i in range(3)]
        given = [row[f"acceptance_given_pos_{i}"] or 0.0 for i in range(3)]
        assert rates == pytest.approx(np.cumprod(given).tolist(), abs=1e-3)
        assert row["acceptance_length"] == pytest.approx(1 + sum(rates), abs=1e-3)
        assert rates == sorted(rates, reverse=True)
        checked += 1
    assert checked > 0


def test_the_trained_head_has_drafts_accepted_by_the_real_verifier(folder: Path) -> None:
    row = bench_row(folder, "eagle3", 1)
    assert row["num_drafts"] > 50
    assert row["acceptance_length"] > 1.0


def test_every_method_is_measured_beside_its_own_reference(folder: Path) -> None:
    for method, k in (("none", 0), ("ngram", 3), ("eagle3", 3)):
        result = bench_result(folder, method)
        assert list(result["engine"]) == [f"method_k{k}_0", "reference_k0_0"]
        requests = raw_requests(folder, method)
        for concurrency, num_pairs in ((1, 7), (4, 7)):
            row = bench_row(folder, method, concurrency)
            assert row["num_pairs"] == num_pairs
            assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
            assert row["verdict"] in ("faster", "slower", "no difference shown")
        # with one request in flight a pair is one request on either server
        seconds: dict[str, dict[str, float]] = {"reference": {}, "method": {}}
        for request in requests:
            if request["concurrency"] == 1:
                time_s = request["chunk_s"][-1] / len(request["output_ids"])
                seconds[request["role"]][request["sample_key"]] = time_s
        ratios = [seconds["reference"][key] / value for key, value in seconds["method"].items()]
        expected = float(np.exp(np.median(np.log(ratios))))
        assert bench_row(folder, method, 1)["speedup"] == pytest.approx(expected, rel=1e-3)


def test_an_engine_that_is_not_measured_is_paused_and_its_neighbour_is_not_slowed(
    folder: Path,
) -> None:
    # two equal servers side by side: an engine that spins beside the other halves its speed, and
    # the first one of each pair would be the one that is slowed
    row = bench_row(folder, "none", 4)
    assert 0.5 < row["speedup"] < 2.0
    assert row["identical_outputs"] > 0.9


def test_every_engine_was_bound_to_the_same_cores_and_says_that_it_is_eager(folder: Path) -> None:
    rows = [
        facts
        for method in ("none", "ngram", "eagle3")
        for facts in bench_result(folder, method)["engine"].values()
    ]
    assert len(rows) == 6
    assert {row["enforce_eager"] for row in rows} == {"True"}
    assert len({tuple(row["bound_cores"]) for row in rows}) == 1
    assert "uncompiled" in (folder / "reports/comparison.md").read_text()


def test_what_was_replayed_is_what_was_served(folder: Path) -> None:
    found = {row["method"]: row for row in read_json(folder / "reports/check.json")["acceptance"]}
    # the proposer and the sequences are the same; a last step may accept beyond the end
    assert found["ngram"]["num_left_out"] == 0
    assert abs(found["ngram"]["error"]) <= 0.03
    # an engine's states are those of another batch; few tokens, so that one draft weighs
    assert found["eagle3"]["num_tokens"] > 50
    assert abs(found["eagle3"]["error"]) <= 0.1


def test_step_time_is_measured_at_every_k_and_batch_with_nothing_accepted(folder: Path) -> None:
    curves = read_json(folder / "reports/curves.json")
    places = {(point["kind"], point["k"], point["batch"]) for point in curves["points"]}
    # rows that look drafts up find none at times
    assert places == {(kind, 0, batch) for kind in ("none", "tokens") for batch in (1, 4)} | {
        (kind, k, batch) for kind in ("tokens", "eagle3") for k in (1, 3) for batch in (1, 4)
    }
    for point in curves["points"]:
        assert point["step_ms"] > 0
        assert point["tokens_per_step"] < 1.5, point


def test_every_speculating_method_is_predicted_where_it_is_measured(folder: Path) -> None:
    check = read_json(folder / "reports/check.json")
    overall = {(row["method"], row["k"], row["concurrency"]) for row in check["speed"]
               if row["category"] == "all"}  # fmt: skip
    assert overall == {(method, 3, load) for method in ("ngram", "eagle3") for load in (1, 4)}
    assert check["num_cells"] == 4


def test_greedy_output_mostly_equals_the_reference(folder: Path) -> None:
    # bf16 greedy decoding is not bit-exact across batch shapes, so this is a floor; at one request
    # a CPU engine multiplies by one row without speculation and by several with it
    row = bench_row(folder, "eagle3", 4)
    assert row["identical_outputs"] >= 0.5


def test_raw_records_hold_every_request_with_its_times_and_ids(folder: Path) -> None:
    requests = raw_requests(folder, "eagle3")
    assert len(requests) == 2 * 7 * (1 + 4)
    for request in requests:
        assert sum(request["chunk_tokens"]) == len(request["output_ids"])
        assert request["chunk_s"] == sorted(request["chunk_s"])
        assert request["sent_s"] <= request["chunk_s"][0]


def test_the_comparison_names_every_category_and_method(folder: Path) -> None:
    table = (folder / "reports/comparison.md").read_text()
    for category in ("coding", "maths", "structured", "explanation", "writing", "reasoning"):
        for method in ("ngram", "eagle3"):
            assert re.search(rf"\| {category} \| {method}[^|]* \| 3 \|", table)
    for said in ("95% interval", "lossless?", "same distribution", "Engines", "Drift of the"):
        assert said in table
    for picture in ("acceptance", "acceptance_by_category", "speedup", "speedup_by_load",
                    "speedup_by_k"):  # fmt: skip
        assert (folder / f"reports/{picture}.svg").read_text().startswith("<?xml")


def test_sampling_is_tested_through_the_real_engine_and_its_fault_stands_in_the_table(
    folder: Path,
) -> None:
    # vllm#55005: a CPU engine of 0.32 samples wrongly with any speculation, and rightly without
    found = {
        name: read_json(folder / f"reports/sampling/{name}.json")
        for name in ("none", "ngram", "eagle3")
    }
    assert {name: result["lossless"] for name, result in found.items()} == {
        "none": True, "ngram": False, "eagle3": False,
    }  # fmt: skip
    assert found["none"]["p_value"] > 1e-3 > found["ngram"]["p_value"]
    table = (folder / "reports/comparison.md").read_text()
    assert "| ngram † |" in table
    assert "vllm#55005" in table


def test_no_secret_of_the_environment_is_in_anything_that_was_written(folder: Path) -> None:
    # binary files too: MLflow's database, DVC's caches, logs of every engine
    found = subprocess.run(["grep", "-rlF", CANARY, folder], capture_output=True, text=True)
    assert (found.stdout, found.returncode) == ("", 1)


def test_mlflow_has_one_finished_run_per_stage_with_parameters_and_commit(folder: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("specmill-executions")
    assert experiment is not None
    assert experiment.artifact_location == (folder / "mlartifacts").as_uri()
    runs = {
        run.data.tags["dvc.stage"]: run for run in client.search_runs([experiment.experiment_id])
    }
    assert set(runs) == {
        "verifier", "prepare", "extract", "vocab", "train",
        "bench@none", "bench@ngram", "bench@eagle3", "report",
        "sampling@none", "sampling@ngram", "sampling@eagle3",
        "replay@none", "replay@ngram", "replay@eagle3", "curves", "predict", "schedule", "check",
        "routing",
    }  # fmt: skip
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert len(runs["train"].data.tags["git.commit"]) == 40
    assert float(runs["train"].data.params["train.lr"]) == 0.002
    assert len(client.get_metric_history(runs["train"].info.run_id, "loss_epoch")) >= 2
    for method in ("ngram", "eagle3"):
        metrics = runs[f"bench@{method}"].data.metrics
        assert metrics["c1.all.speedup"] == bench_row(folder, method, 1)["speedup"]
    shared = [set(runs[f"bench@{name}"].data.metrics) for name in ("none", "ngram", "eagle3")]
    assert {"c1.all.output_tokens_per_s", "c4.coding.ttft_ms_p50"} <= set.intersection(*shared)


def test_no_server_is_left_behind(folder: Path) -> None:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(folder) not in listed.stdout
    assert f"--model {Path('models/verifier')}" not in listed.stdout


def test_mlflow_compares_every_row_of_the_result_under_one_parent(folder: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("specmill")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert parent.info.status == "FINISHED"
    assert parent.data.params["prepare.limit"] == "40"
    summary = read_json(folder / "reports/summary.json")
    assert parent.data.metrics["eagle3.c1.speedup"] == summary["eagle3"]["c1"]["speedup"]
    children = {
        tuple(run.data.params[name] for name in ("method", "concurrency", "category")): run
        for run in runs
        if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    }
    assert len(children) == len(runs) - 1 == 3 * 2 * (1 + 7)
    child = children["ngram", "4", "coding"]
    rows = read_json(folder / "reports/bench/ngram.json")["rows"]
    (row,) = [r for r in rows if (r["concurrency"], r["category"]) == (4, "coding")]
    assert child.data.metrics["output_tokens_per_s"] == row["output_tokens_per_s"]


def test_a_prepared_sample_can_be_looked_at(pipeline: Workspace) -> None:
    shown = pipeline.run("python", "-m", "specmill.samples", "show", "0").stdout
    answer = shown.partition("\n\n")[2].partition(">>>")[2].partition("<<<")[0]
    (first, *_) = read_samples(pipeline.folder / "data/prepared/train.parquet")
    assert answer.removesuffix("<|im_end|>") == first.text


def test_a_second_repro_runs_only_what_runs_always(pipeline: Workspace) -> None:
    assert pipeline.stages_run("dvc", "repro") == ["hardware", "sources"]


@pytest.mark.long
def test_more_prompts_generate_and_extract_only_themselves(pipeline: Workspace) -> None:
    folder = pipeline.folder
    params = folder / "params.yaml"
    params.write_text(params.read_text().replace("limit: 40", "limit: 42"))
    before = read_json(folder / "reports/extract.json")["num_tokens"]
    shards = set((folder / ".cache/hidden_states").glob("*.safetensors"))
    answers = (folder / ".cache/responses/responses.jsonl").read_text().splitlines()
    assert pipeline.stages_run("dvc", "repro", "extract") == [
        "sources", "prepare", "extract",
    ]  # fmt: skip
    more = (folder / ".cache/responses/responses.jsonl").read_text().splitlines()[len(answers) :]
    assert len(more) == 2  # two conversations of one turn; one is answered too briefly to train
    added = set((folder / ".cache/hidden_states").glob("*.safetensors")) - shards
    assert len(added) == 1
    after = read_json(folder / "reports/extract.json")
    # 4 layers of 576 values a token, and 4 bytes for its id: the new shard holds no old sample
    size = {"bfloat16": 2, "float32": 4}[
        read_json(folder / "models/verifier/identity.json")["dtype"]
    ]
    new = (after["num_tokens"] - before) * (4 * 576 * size + 4)
    assert added.pop().stat().st_size == pytest.approx(new, abs=4096)
    pipeline.reset()


@pytest.mark.long
def test_a_killed_bench_leaves_no_server_and_keeps_its_finished_cells(pipeline: Workspace) -> None:
    folder = pipeline.folder
    cells = folder / ".cache/bench_cells"
    assert not list(cells.glob("*/*.json"))
    stage = subprocess.Popen(
        ["python", "-m", "stages.bench", "none"],
        cwd=folder,
        env=pipeline.environment,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    while len(list(cells.glob("*/*.json"))) < 4:  # three pairs and the engines' facts
        assert stage.poll() is None, "the bench ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(stage.pid, signal.SIGTERM)
    assert stage.wait(60) != 0
    kept = [path.read_text() for path in cells.glob("*/*.json") if path.stem != "servers"]
    assert len(kept) >= 3
    test_no_server_is_left_behind(folder)
    pipeline.run("python", "-m", "stages.bench", "none")
    assert not list(cells.glob("*/*.json"))
    measured = raw_requests(folder, "none")
    place = ("role", "number")
    for content in kept:
        for cell in json.loads(content):
            again = [r for r in measured if all(r[name] == cell[name] for name in place)]
            for name in ("output_ids", "chunk_s"):
                assert [r[name] for r in again] == [r[name] for r in cell["requests"]]
    assert not bench_row(folder, "none", 1)["one_execution"]
    pipeline.reset()


def test_an_invalid_parameter_is_refused_before_any_output_is_removed(pipeline: Workspace) -> None:
    folder = pipeline.folder
    done = pipeline.run("dvc", "exp", "run", "-S", "spec.tokens=two", check=False)
    assert done.returncode != 0
    assert "spec.tokens: Input should be a valid integer" in done.stdout + done.stderr
    assert (folder / "reports/bench/ngram.json").is_file()
    assert (folder / "data/bench/ngram/requests.parquet").is_file()
    pipeline.reset()
