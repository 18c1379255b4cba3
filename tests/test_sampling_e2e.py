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

REDRAWS_REJECTED_DRAFTS = textwrap.dedent(
    '''
    """Python runs this file when it starts: a rejected draft is drawn again like any token."""
    import importlib.abc, importlib.machinery, sys

    class Break(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "vllm.v1.sample.rejection_sampler":
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            load = spec.loader.exec_module
            def exec_module(module):
                load(module)
                def redraw(_max_len, _num, _cumulated, draft_ids, _draft_probs, probs, *_):
                    return probs.multinomial(1).squeeze(1).to(draft_ids.dtype)
                module.sample_recovered_tokens = redraw
            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Break())
    '''
)


def sampled(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: int
) -> dict[str, Any]:
    monkeypatch.setattr(paths, "VERIFIER", tmp_path / "none")
    twin, draft = tmp_path / "twin", tmp_path / "draft"
    identity = write_twin(twin)
    entry = Method(method=method, section="spec", head=str(draft), settings=settings)
    draft_on_twin("row", entry, TwinDrafts(twin, identity, K), draft)
    told = speculative_configs("row", entry, [K], identity)[K]
    runtime = load_params(ROOT / "params.yaml").runtime
    return check_lossless(twin, told, tmp_path / "log", runtime)


def test_n_gram_speculation_is_lossless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = sampled("ngram", tmp_path, monkeypatch, prompt_lookup_min=2, prompt_lookup_max=4)
    assert result["lossless"]
    assert 1.05 < result["acceptance_length"] < K + 1


def test_a_draft_model_is_lossless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = sampled("draft_model", tmp_path, monkeypatch)
    assert result["lossless"]
    assert 1.05 < result["acceptance_length"] < K + 1


def test_an_engine_that_draws_rejected_drafts_again_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(REDRAWS_REJECTED_DRAFTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = sampled("draft_model", tmp_path, monkeypatch)
    assert not result["lossless"]
    assert result["p_value"] < 1e-9
