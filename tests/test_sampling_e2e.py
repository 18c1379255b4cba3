"""Losslessness through the real engine, and an engine that is broken on purpose."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from specmill import paths
from specmill.methods import draft_on_twin, speculative_configs
from specmill.params import Method
from specmill.params_file import load_params
from specmill.sampling import K, check_lossless
from specmill.sampling_drafts import TwinDrafts
from specmill.sampling_twin import write_twin
from tests.workspace import ROOT

pytestmark = pytest.mark.e2e

CHANGES_THE_ENGINE = textwrap.dedent(
    '''
    """Python runs this file when it starts: it changes the engine's rejection sampler."""
    import importlib.abc, importlib.machinery, sys

    def expand(values, cumulated, num_tokens, replace_from=0, replace_to=0):
        counts = cumulated.diff(prepend=cumulated.new_zeros(1))
        values = values.where(values != replace_from, replace_to)
        return values.repeat_interleave(counts)

    def redraw(_max_len, _num, _cumulated, draft_ids, _draft_probs, probs, *_):
        return probs.multinomial(1).squeeze(1).to(draft_ids.dtype)

    class Change(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "vllm.v1.sample.rejection_sampler":
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            load = spec.loader.exec_module
            def exec_module(module):
                load(module)
                CHANGES
            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Change())
    '''
)
MENDED = "module.expand_batch_to_tokens = expand"
"""vllm#55005: under 0.32 a CPU engine divides logits by memory that nothing was written to."""
REDRAWS_REJECTED_DRAFTS = "module.sample_recovered_tokens = redraw"


def sampled(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *changes: str, **settings: int
) -> dict[str, Any]:
    """What is found of a method in an engine with these changes."""
    code = CHANGES_THE_ENGINE.replace("CHANGES", "; ".join(changes) or "pass")
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(paths, "VERIFIER", tmp_path / "none")
    twin, draft = tmp_path / "twin", tmp_path / "draft"
    identity = write_twin(twin)
    entry = Method(method=method, section="spec", head=str(draft), settings=settings)
    draft_on_twin("row", entry, TwinDrafts(twin, identity, K), draft)
    told = speculative_configs("row", entry, [K], identity)[K]
    runtime = load_params(ROOT / "params.yaml").runtime
    return check_lossless(twin, told, tmp_path / "log", runtime)


@pytest.mark.long
def test_n_gram_speculation_is_lossless_in_a_mended_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    result = sampled("ngram", tmp_path, monkeypatch, MENDED, **window)
    assert result["lossless"]
    assert 1.05 < result["acceptance_length"] < K + 1


@pytest.mark.long
def test_a_draft_model_is_lossless_in_a_mended_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = sampled("draft_model", tmp_path, monkeypatch, MENDED)
    assert result["lossless"]
    assert 1.05 < result["acceptance_length"] < K + 1


def test_an_engine_that_draws_rejected_drafts_again_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = sampled("draft_model", tmp_path, monkeypatch, MENDED, REDRAWS_REJECTED_DRAFTS)
    assert not result["lossless"]
    assert result["p_value"] < 1e-9
