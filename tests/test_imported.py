"""Files of tests/results:

vllm_detailed.json   of `vllm bench serve --save-result --save-detailed`, vLLM 0.32: three requests
                     to a server that answers two tokens a chunk; the tokenizer's path is shortened
guidellm.json        written by guidellm 0.8.1's classes from 20 made-up requests; metrics that are
                     not read here are left out
"""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specmill.imported import identify_imported, import_result, read_results
from specmill.measured import FIGURES, measured_or_none
from specmill.params_imported import Imported, check_names
from specmill.vllm_results import VllmResult

RESULTS = Path(__file__).parent / "results"
DETAILED = RESULTS / "vllm_detailed.json"
GUIDELLM = RESULTS / "guidellm.json"
NOT_DETAILED = (
    "input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors",
)  # fmt: skip
"""What vLLM leaves out without --save-detailed."""
SPECULATION = {
    "spec_decode_acceptance_rate": 50.0,  # per cent: 15 of 30 tokens
    "spec_decode_acceptance_length": 2.5,  # 1 + 15 / 10
    "spec_decode_num_drafts": 10,
    "spec_decode_draft_tokens": 30,
    "spec_decode_accepted_tokens": 15,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.6, 0.1],
}

Edit = Callable[[dict[str, Any]], object]


def edited(folder: Path, source: Path, edit: Edit, name: str = "edited.json") -> str:
    content = json.loads(source.read_text())
    edit(content)
    (folder / name).write_text(json.dumps(content))
    return str(folder / name)


def rows(source: str | Path, reference: str | Path | None = None, k: int = 0) -> list[Any]:
    chosen = Imported(
        source=str(source),
        reference=None if reference is None else str(reference),
        num_speculative_tokens=k,
    )
    found: list[Any] = import_result("x", chosen)["rows"]
    return found


def test_a_row_of_vllm_has_its_figures_under_our_names() -> None:
    (row,) = rows(DETAILED)
    content = json.loads(DETAILED.read_text())
    assert (row["concurrency"], row["rate"], row["category"]) == (2, None, "all")
    assert (row["num_requests"], row["num_failed"], row["output_tokens"]) == (3, 0, 36)
    assert row["output_tokens_per_s"] == round(36 / content["duration"], 4)
    # vLLM's itl is between chunks, of two tokens here; its tpot is per token
    assert row["chunk_ms_p50"] == round(content["median_itl_ms"], 4)
    assert row["itl_ms_p50"] == round(content["median_tpot_ms"], 4)
    assert row["chunk_ms_p50"] / row["itl_ms_p50"] == pytest.approx(2.16, abs=0.01)
    assert row["ttft_ms_p99"] == round(content["p99_ttft_ms"], 4)
    assert row["remarks"] is None


def test_percentiles_that_were_not_asked_for_come_from_a_detailed_file_or_are_null(
    tmp_path: Path,
) -> None:
    def plain(content: dict[str, Any]) -> None:
        for key in (*NOT_DETAILED, "latencies", "queue_times"):
            del content[key]

    (detailed,) = rows(DETAILED)
    (short,) = rows(edited(tmp_path, DETAILED, plain))
    # 26.535, 25.935, 26.688 ms: the 90th lies 0.8 of the way from the second to the third
    assert detailed["ttft_ms_p90"] == pytest.approx(26.5351 + 0.8 * (26.6884 - 26.5351), abs=1e-3)
    latencies = json.loads(DETAILED.read_text())["latencies"]
    assert detailed["e2e_ms_p50"] == round(1000 * sorted(latencies)[1], 4)
    missing = {name for name, value in short.items() if value is None}
    assert missing & set(detailed) >= {"ttft_ms_p90", "itl_ms_p90", "chunk_ms_p90", "e2e_ms_p50"}
    assert {name: short[name] for name in short.keys() - missing} == {
        name: detailed[name] for name in short.keys() - missing
    }


def test_percentiles_of_a_detailed_file_are_those_that_vllm_computed(tmp_path: Path) -> None:
    def forget(content: dict[str, Any]) -> None:
        for key in [key for key in content if re.match(r"(median|p99)_", key)]:
            del content[key]

    assert rows(edited(tmp_path, DETAILED, forget)) == rows(DETAILED)


def test_failed_requests_are_counted_and_are_in_no_percentile(tmp_path: Path) -> None:
    def fail(content: dict[str, Any]) -> None:
        content["num_prompts"] = 5
        content["failed"] = 2
        for key, nothing in {"errors": "refused", "ttfts": 0.0, "itls": [], "output_lens": 0,
                             "latencies": 0.0}.items():  # fmt: skip
            content[key] = [nothing, *content[key], nothing]

    (row,) = rows(edited(tmp_path, DETAILED, fail))
    (sound,) = rows(DETAILED)
    assert (row.pop("num_failed"), row.pop("remarks")) == (2, "failed requests: 2 of 5")
    assert row == {name: sound[name] for name in row}


def test_acceptance_of_vllm_is_unconditional_and_ours_has_both(tmp_path: Path) -> None:
    (row,) = rows(edited(tmp_path, DETAILED, lambda c: c.update(SPECULATION)), k=3)
    assert row["acceptance_length"] == 2.5
    assert row["acceptance_rate"] == 0.5
    assert [row[f"acceptance_rate_pos_{i}"] for i in range(3)] == [0.8, 0.6, 0.1]
    assert [row[f"acceptance_given_pos_{i}"] for i in range(3)] == [0.8, 0.75, round(1 / 6, 4)]
    # 33 tokens after the first ones, 15 of them drafted: 18 steps, 10 of them with a draft
    assert (row["draft_coverage"], row["tokens_per_step"]) == (round(10 / 18, 4), round(33 / 18, 4))


def test_acceptance_beside_failed_requests_says_nothing_of_steps(tmp_path: Path) -> None:
    path = edited(tmp_path, DETAILED, lambda c: c.update(SPECULATION, num_prompts=4))
    (row,) = rows(path, k=3)
    assert (row["acceptance_length"], row["tokens_per_step"]) == (2.5, None)


def test_k_must_be_the_files(tmp_path: Path) -> None:
    path = edited(tmp_path, DETAILED, lambda c: c.update(SPECULATION))
    with pytest.raises(ValueError, match=r"imported.x.num_speculative_tokens is 5.*3 positions"):
        rows(path, k=5)


def test_a_speedup_is_the_ratio_of_two_throughputs_without_an_interval(tmp_path: Path) -> None:
    fast = edited(tmp_path, DETAILED, lambda c: c.update(output_throughput=90.0), "fast.json")
    slow = edited(tmp_path, DETAILED, lambda c: c.update(output_throughput=60.0), "slow.json")
    (row,) = rows(fast, slow, k=3)
    assert (row["reference_tokens_per_s"], row["speedup"], row["num_pairs"]) == (60.0, 1.5, 0)
    assert row["speedup_low"] is row["speedup_high"] is row["verdict"] is None
    source = import_result(
        "x", Imported(source=fast, reference=slow, num_speculative_tokens=3)
    )["source"]  # fmt: skip
    assert (source["file"], source["reference"]["file"]) == ("fast.json", "slow.json")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_id": "another"}, "source is of model 'verifier', reference of 'another'"),
        ({"max_concurrency": 8}, "no load in common: 2 in flight against 8 in flight"),
        (SPECULATION, r"the server speculated while other\.json was measured"),
    ],
)
def test_a_reference_of_something_else_is_refused(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    other = edited(tmp_path, DETAILED, lambda c: c.update(change), "other.json")
    with pytest.raises(ValueError, match=complaint):
        rows(DETAILED, other)


def test_a_reference_with_faults_or_other_prompts_is_shown_as_such(tmp_path: Path) -> None:
    def other(content: dict[str, Any]) -> None:
        content.update(num_prompts=4, total_input_tokens=120)

    (row,) = rows(DETAILED, edited(tmp_path, DETAILED, other))
    assert row["remarks"] == (
        "reference: failed requests: 1 of 4; "
        "other prompts than the reference's: 32 tokens on average against 40"
    )


@pytest.mark.parametrize(
    ("change", "concurrency", "rate", "remarks"),
    [
        ({"request_rate": 2.5, "max_concurrency": None}, None, 2.5, None),
        ({"request_rate": 2.5}, None, 2.5, "at most 2 requests in flight"),
        ({"max_concurrency": None}, 3, None, "all requests were sent at once"),
    ],
)
def test_the_load_of_vllm(
    tmp_path: Path, change: dict[str, Any], concurrency: int, rate: float, remarks: str
) -> None:
    (row,) = rows(edited(tmp_path, DETAILED, lambda c: c.update(change)))
    assert (row["concurrency"], row["rate"], row["remarks"]) == (concurrency, rate, remarks)


def test_appended_results_are_a_row_each_and_one_load_twice_is_refused(tmp_path: Path) -> None:
    content = json.loads(DETAILED.read_text())
    both = tmp_path / "both.json"
    both.write_text(json.dumps(content | {"max_concurrency": 8}) + "\n" + json.dumps(content))
    assert [row["concurrency"] for row in rows(both)] == [2, 8]
    both.write_text(json.dumps(content) + "\n" + json.dumps(content))
    with pytest.raises(ValueError, match=r"both\.json: several runs at one load \(2 in flight\)"):
        rows(both)
    both.write_text(json.dumps(content) + "\n" + json.dumps(content | {"model_id": "b"}))
    with pytest.raises(ValueError, match=r"both\.json: it has results of several models: b, ver"):
        rows(both)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"date": "2026', "is not JSON, or was cut short"),
        (DETAILED.read_bytes()[:900], "is not JSON, or was cut short"),
        (b"", "is not JSON, or was cut short"),
        (b"\xff\xfe", "is not JSON, or was cut short"),
        (b"[1]", "holds no JSON object"),
        (b"{}", "its first keys are none"),
        (b'{"throughput": 3, "name": "x"}', "its first keys are throughput, name"),
        (b'{"completed": 3, "duration": 1.0, "total_input_tokens": 9}', "model_id: Field required"),
    ],
)
def test_a_file_of_neither_tool_is_refused_by_name(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"some\.json.*" + complaint):
        rows(path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"completed": 0, "total_output_tokens": 0, "output_throughput": 0.0}, "no request was an"),
        ({"total_output_tokens": 0, "output_throughput": 0.0}, "no request was answered with a"),
        ({"ramp_up_strategy": "linear"}, "ramped"),
        ({"output_throughput": None}, "output_throughput: Input should be a valid number"),
        (SPECULATION | {"spec_decode_accepted_tokens": 14}, "contradict each other"),
    ],
)
def test_what_cannot_be_a_row_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    path = edited(tmp_path, DETAILED, lambda c: c.update(change))
    with pytest.raises(ValueError, match=r"edited\.json: .*" + complaint):
        rows(path, k=3)


def test_a_missing_file_is_named_with_its_parameter(tmp_path: Path) -> None:
    chosen = Imported(source=str(DETAILED), reference="gone.json", num_speculative_tokens=0)
    for read in (import_result, lambda _, row: identify_imported("imported.x", row)):
        with pytest.raises(ValueError, match=r"imported\.x\.reference: gone\.json is not there"):
            read("x", chosen)


def test_a_row_depends_on_the_content_of_both_files(tmp_path: Path) -> None:
    path = edited(tmp_path, DETAILED, lambda c: None)
    lone = Imported(source=path, reference=None, num_speculative_tokens=0)
    pair = Imported(source=str(DETAILED), reference=path, num_speculative_tokens=0)
    before = identify_imported("x", lone), identify_imported("x", pair)
    assert before[0].keys() == {"source"}
    edited(tmp_path, DETAILED, lambda c: c.update(num_prompts=4))
    after = identify_imported("x", lone), identify_imported("x", pair)
    assert before[0]["source"] != after[0]["source"]
    assert before[1]["source"] == after[1]["source"]
    assert before[1]["reference"] != after[1]["reference"]


def test_where_a_result_of_vllm_is_from(tmp_path: Path) -> None:
    def tell(content: dict[str, Any]) -> None:
        content.update(model_id="/data/models/Some-8B", label="nightly", hardware="one GPU")

    facts, _ = read_results(Path(edited(tmp_path, DETAILED, tell)))
    assert facts["tool"] == "vllm bench serve"
    assert facts["measured_at"] == "2026-11-30T03:19:37"
    assert facts["model"] == "Some-8B"
    assert facts["labels"] == {"label": "nightly", "hardware": "one GPU"}
    assert facts["tool_version"] is facts["endpoint"] is facts["dataset"] is None


def test_a_report_of_guidellm_is_a_row_per_load() -> None:
    made = rows(GUIDELLM, k=2)
    assert [(row["concurrency"], row["rate"]) for row in made] == [
        (1, None), (2, None), (4, None), (None, 2.0),
    ]  # fmt: skip
    # one by one: 0.08 s to the first of 9 tokens, then one every 0.04 s
    assert made[0]["output_tokens_per_s"] == pytest.approx(9 / 0.4)
    assert made[0]["ttft_ms_p50"] == pytest.approx(80, abs=0.001)
    assert made[0]["itl_ms_p90"] == pytest.approx(40, abs=0.001)
    assert made[0]["e2e_ms_p99"] == pytest.approx(400, abs=0.001)
    assert made[0]["chunk_ms_p50"] is None
    assert made[2]["remarks"] == "all requests were sent at once, 4 in flight"


def test_guidellm_counts_failed_and_cut_off_requests_apart() -> None:
    row = rows(GUIDELLM, k=2)[1]
    assert (row["num_requests"], row["num_failed"], row["output_tokens"]) == (6, 1, 54)
    assert row["remarks"] == "failed requests: 1 of 7; requests cut off at the end: 1"
    # 54 tokens, 5 of the request that was cut off and 1 of the one that failed in 1.44 s
    assert row["output_tokens_per_s"] == pytest.approx(60 / 1.44, rel=1e-4)


def test_guidellm_has_acceptance_when_vllm_told_it_with_every_answer(tmp_path: Path) -> None:
    row = rows(GUIDELLM, k=2)[0]
    # four answers, each of 4 steps of which 2 accepted nothing, 1 one token, 1 two; 2 drafted each
    assert (row["num_drafts"], row["num_draft_tokens"]) == (16, 32)
    assert row["acceptance_length"] == 1 + 12 / 16
    assert [row[f"acceptance_rate_pos_{i}"] for i in range(2)] == [8 / 16, 4 / 16]
    assert [row[f"acceptance_given_pos_{i}"] for i in range(2)] == [0.5, 0.5]

    def forget_one(content: dict[str, Any]) -> None:
        content["benchmarks"][0]["requests"]["successful"][0]["response_metrics"] = None

    assert rows(edited(tmp_path, GUIDELLM, forget_one), k=2)[0]["acceptance_length"] is None


def plain_report(content: dict[str, Any]) -> None:
    """The same without speculation, at half the throughput, and at another rate."""
    for run in content["benchmarks"]:
        run["metrics"]["output_tokens_per_second"]["total"]["mean"] /= 2
        for request in run["requests"]["successful"]:
            request["response_metrics"] = None
    content["benchmarks"][3]["config"]["strategy"]["rate"] = 1.5


def test_runs_of_guidellm_meet_their_reference_at_the_same_load(tmp_path: Path) -> None:
    made = rows(GUIDELLM, edited(tmp_path, GUIDELLM, plain_report), k=2)
    assert [row["speedup"] for row in made[:3]] == pytest.approx([2, 2, 2], abs=1e-4)
    assert made[3]["speedup"] is made[3]["reference_tokens_per_s"] is None
    assert made[3]["remarks"] == "the reference has no run at this load"
    assert "reference: failed requests: 1 of 7" in made[1]["remarks"]


def test_where_a_report_of_guidellm_is_from(tmp_path: Path) -> None:
    def secret(content: dict[str, Any]) -> None:
        for run in content["benchmarks"]:
            run["config"]["backend"]["target"] = "http" + "://user:word@127.0.0.1:8000"
            run["config"]["backend"]["api_key"] = "word"

    result = import_result(
        "x",
        Imported(
            source=edited(tmp_path, GUIDELLM, secret), reference=None, num_speculative_tokens=2
        ),
    )
    facts = result["source"]
    assert (facts["tool"], facts["tool_version"], facts["model"]) == (
        "guidellm", "0.8.1", "org/model",
    )  # fmt: skip
    assert facts["measured_at"] == "2026-11-30T03:00:00+00:00"
    assert facts["dataset"] == "synthetic_text prompt_tokens=32 output_tokens=9"
    assert facts["labels"] == {"gpu": "two cores"}
    assert facts["endpoint"].endswith("//127.0.0.1:8000")
    assert "word" not in json.dumps(result)


def test_a_report_of_version_1_is_read_too(tmp_path: Path) -> None:
    def older(content: dict[str, Any]) -> None:
        content["metadata"].update(version=1, guidellm_version="0.6.1")
        del content["config"]
        content["args"] = {"data": ["prompts.jsonl"]}

    facts, runs = read_results(Path(edited(tmp_path, GUIDELLM, older)))
    assert (facts["tool_version"], facts["dataset"], len(runs)) == ("0.6.1", "prompts.jsonl", 4)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda c: c["metadata"].update(version=3), r"metadata\.version: Input should be 1 or 2"),
        (lambda c: c.update(benchmarks=[]), "the report has no benchmark"),
        (lambda c: c["benchmarks"][1]["metrics"].pop("request_latency"),
         r"benchmarks\.1\.metrics\.request_latency: Field required"),
        (lambda c: c["benchmarks"][0]["config"]["strategy"].update(type_="trace"),
         "a run of strategy 'trace' is no row"),
        (lambda c: c["benchmarks"][0]["config"]["strategy"].update(type_="concurrent", streams=2),
         "several runs at one load"),
    ],
)  # fmt: skip
def test_a_report_of_guidellm_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, edit: Edit, complaint: str
) -> None:
    with pytest.raises(ValueError, match=r"edited\.json: .*" + complaint):
        rows(edited(tmp_path, GUIDELLM, edit), k=2)


def test_a_run_without_answers_among_others_is_a_row_without_figures(tmp_path: Path) -> None:
    def silent(content: dict[str, Any]) -> None:
        run = content["benchmarks"][0]
        run["metrics"]["request_totals"] = {"successful": 0, "errored": 4, "incomplete": 0}
        run["requests"]["successful"] = []
        for metric in run["metrics"].values():
            if isinstance(metric, dict) and "total" in metric:
                for status in ("successful", "total"):
                    metric[status] = {"mean": 0.0, "max": 0.0, "total_sum": 0.0,
                                      "percentiles": {"p50": 0.0}}  # fmt: skip

    row = rows(edited(tmp_path, GUIDELLM, silent), k=2)[0]
    measured = {name for name in FIGURES if row[name] is not None}
    assert measured == {"num_requests", "num_failed", "output_tokens"}
    assert row["remarks"] == "failed requests: 4 of 4"


def test_all_rows_have_the_same_keys_whichever_tool_wrote_them() -> None:
    made = [*rows(DETAILED, k=2), *rows(GUIDELLM, k=2)]
    assert len({tuple(row) for row in made}) == 1
    assert set(FIGURES) < set(made[0])


def test_no_latency_of_0_or_nothing_is_taken_for_a_measurement() -> None:
    nothing = [0, 0.0, None, "3", float("nan"), float("inf")]
    assert [measured_or_none(value) for value in nothing] == [None] * 6
    assert measured_or_none(2) == 2.0


def test_vllm_still_writes_the_keys_that_are_read() -> None:
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    source = (Path(vllm.origin).parent / "benchmarks/serve.py").read_text()
    for key in VllmResult.model_fields:
        assert f'"{key}"' in source, key


def test_a_name_that_methods_has_is_refused() -> None:
    row = Imported(source="a", reference=None, num_speculative_tokens=0)
    check_names({"elsewhere": row}, {"none": row})
    with pytest.raises(ValueError, match="methods and imported both have ngram"):
        check_names({"ngram": row, "elsewhere": row}, {"none": row, "ngram": row})
