"""What is secret: it is in no log, no message, no MLflow run and no file in Git."""

import contextlib
import logging
import sqlite3
from pathlib import Path

import pytest

from specmill import paths
from specmill.masked import MaskedFormatter, masked
from specmill.params_file import load_params
from specmill.revision import origin_tags
from specmill.stage import open_stage
from specmill.tracking import open_store, track, warn
from tests.workspace import ROOT

CANARY = "tw33t-of-a-canary"
NAMES = (
    "SPECMILL_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "AWS_ACCESS_KEY_ID", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "OPENAI_API_KEY",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, CANARY)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https:~me:pw@host:5000/api failed", "at https:~***@host:5000/api failed"),
        ("https:~token@host/x", "https:~***@host/x"),
        ("postgresql:~me:p@ss@db/mlflow", "postgresql:~***@db/mlflow"),
        ("HTTPS:~me:pw@HOST", "HTTPS:~***@HOST"),
        ("ssh:~git@host/repository", "ssh:~git@host/repository"),
        ("http:~host/a?mail=me@host", "http:~host/a?mail=me@host"),
        ("s3:~bucket/store", "s3:~bucket/store"),
        ("sqlite:~//home/me/mlflow.db", "sqlite:~//home/me/mlflow.db"),
        ("write to me@host: http:~host", "write to me@host: http:~host"),
    ],
)
def test_a_password_in_a_url_is_not_shown(text: str, shown: str) -> None:
    # whole URLs of hosts that are none stand in no file here
    text, shown = text.replace("~", "//"), shown.replace("~", "//")
    assert masked(text) == shown


@pytest.mark.parametrize("name", NAMES)
def test_the_value_of_a_secret_variable_is_not_shown(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in NAMES:
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, CANARY)
    assert masked(f"Bearer {CANARY}, twice {CANARY}") == f"Bearer ${name}, twice ${name}"


def test_words_that_are_no_secrets_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "parallel")
    monkeypatch.setenv("SOME_TOKEN", "")
    monkeypatch.setenv("IS_SECRET", "true")
    assert masked("parallel and true") == "parallel and true"


def test_a_log_line_is_masked_with_its_arguments_and_traceback() -> None:
    record = logging.LogRecord("mlflow", logging.WARNING, "f", 1, "at %s", ("ftp://a:b@c",), None)
    try:
        raise OSError(CANARY)
    except OSError as error:
        record.exc_info = (OSError, error, error.__traceback__)
    shown = MaskedFormatter("%(message)s").format(record)
    assert shown.startswith("at ftp://***@c\nTraceback")
    assert CANARY not in shown


def test_a_stage_that_fails_names_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Path
) -> None:
    (tmp_path / "mlflow.db").write_bytes(database.read_bytes())
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "CACHE", tmp_path / ".cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a bench may have the machine alone
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(SystemExit) as ended, open_stage("prepare", ["prepare"]):
        raise OSError(f"ftp://me:{CANARY}@host refused Bearer {CANARY}")
    assert "prepare: ftp://***@host refused Bearer $" in str(ended.value)
    # all that MLflow was told: parameters, tags, the run's name
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as opened:
        told = "\n".join(opened.iterdump())
    assert "prepare.seed" in told
    assert CANARY not in told


def test_a_tracking_server_that_is_away_is_named_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uri = "http:" + f"//me:{CANARY}@127.0.0.1:9"  # the discard port: nobody answers
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for name in NAMES:
        monkeypatch.delenv(name)  # what is in the URL alone
    with track(tmp_path, "prepare", {}, None):
        pass
    assert "the stage goes on without MLflow" in caplog.text
    assert CANARY not in caplog.text
    with pytest.raises(Exception, match="127") as away:
        open_store(tmp_path)
    caplog.clear()
    warn(away.value)
    assert CANARY not in caplog.text


@pytest.mark.parametrize(
    "uri", ["http:~me:pw@host:5000", "https:~token@host", "postgresql:~me:pw@host/mlflow"]
)
def test_no_password_is_taken_from_params_yaml(tmp_path: Path, uri: str) -> None:
    text = (
        (ROOT / "params.yaml")
        .read_text()
        .replace("tracking_uri: null", f"tracking_uri: {uri}".replace("~", "//"))
    )
    (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(ValueError, match="has a password; set MLFLOW_TRACKING_USERNAME and"):
        load_params(tmp_path / "params.yaml")


def test_where_a_result_is_from_is_told_without_the_environment() -> None:
    assert not [value for value in origin_tags().values() if CANARY in value]
