"""Code that comes with a model: it runs only where params.yaml says so."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specmill import compat
from specmill.extract_engines import extraction_settings
from specmill.params import Verifier
from specmill.params_file import read_yaml
from specmill.remote_code import load_own_tokenizer
from specmill.report import trust_note
from specmill.verifier import identify, load_tokenizer
from tests.staging_fakes import SPEC
from tests.test_templates import CHATML, tokenizer
from tests.test_verifier import make_model
from tests.workspace import ROOT

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({ran!r}).write_text("")
class Own(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose tokenizer is code, which leaves a file where it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    folder = make_model(tmp_path / "model")
    tokenizer(CHATML).save_pretrained(folder)
    (folder / "tokenization_own.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    change(folder, [None, "tokenization_own.Own"])
    return folder


def change(folder: Path, code: Any) -> None:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"tokenizer_class": "Own"}
    file.write_text(json.dumps(config | {"auto_map": {"AutoTokenizer": code}}))


def test_code_does_not_run_and_the_way_out_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is code in its folder; .*verifier\.trust_remote_code"):
        load_own_tokenizer(model, trusted=False)
    assert not (tmp_path / "ran").exists()


def test_code_that_is_trusted_runs(model: Path, tmp_path: Path) -> None:
    assert type(load_own_tokenizer(model, trusted=True)).__name__ == "Own"
    assert (tmp_path / "ran").exists()


def test_code_of_another_repository_is_never_fetched(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(model, [None, "someone/else--tokenization.Own"])
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(ValueError, match="wants code of someone/else, another repository"):
        load_own_tokenizer(model, trusted=True)


def test_the_fingerprint_covers_code_that_runs_and_no_other(model: Path) -> None:
    trusted = {"name": "tiny", "trust_remote_code": True}
    before = identify(model, trusted, 64, "float32")
    assert before["trust_remote_code"] is True
    code = model / "tokenization_own.py"
    code.write_text(code.read_text() + "# changed\n")
    assert identify(model, trusted, 64, "float32")["fingerprint"] != before["fingerprint"]
    (model / "tokenizer_config.json").unlink()
    tokenizer(CHATML).save_pretrained(model)
    plain = identify(model, {"name": "tiny"}, 64, "float32")
    code.unlink()
    # an identity of before this key existed
    assert identify(model, {"name": "tiny"}, 64, "float32") == plain
    assert "trust_remote_code" not in plain


def test_the_tokenizer_of_a_verifier_is_loaded_as_its_identity_says(model: Path) -> None:
    with pytest.raises(ValueError, match="is code in its folder"):
        load_tokenizer(model)
    (model / "identity.json").write_text('{"trust_remote_code": true}')
    assert type(load_tokenizer(model)).__name__ == "Own"


def test_engines_are_told_only_where_it_is_true() -> None:
    plain = {"max_model_len": 64, "dtype": "float32", "name": "v"}
    trusted = plain | {"trust_remote_code": True}
    assert "--trust-remote-code" not in compat.verifier_arguments(plain)
    assert compat.verifier_arguments(trusted)[-1] == "--trust-remote-code"
    assert "trust_remote_code" not in extraction_settings(SPEC, Path("s"), plain)
    assert extraction_settings(SPEC, Path("s"), trusted)["trust_remote_code"] is True
    assert trust_note(plain) == []
    (said,) = trust_note(trusted)
    assert said == "v runs code of its own repository (`verifier.trust_remote_code`)."


@pytest.mark.parametrize("file", ["params.yaml", *sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "profiles").glob("*.yaml"))])  # fmt: skip
def test_nothing_is_trusted_unless_somebody_says_so(file: str) -> None:
    assert read_yaml(ROOT / file)["verifier"]["trust_remote_code"] is False
    assert Verifier.model_fields["trust_remote_code"].default is False
