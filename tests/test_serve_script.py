"""reports/serve.sh: run with a stand-in for the environment, it says what would be served."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specmill import compat
from specmill.methods import speculative_configs
from specmill.params import Method
from specmill.params_file import load_params
from specmill.params_parallel import Parallel
from specmill.serve_script import machine_of, serve_script, speculation
from tests.decided import HARDWARE, methods
from tests.workspace import ROOT

PARAMS = load_params(ROOT / "params.yaml")
VERIFIER = {
    "name": "tiny-verifier",
    "fingerprint": "0123456789abcdef",
    "max_model_len": 512,
    "dtype": "float32",
}
EAGLE3 = {"option": "eagle3, K=2", "method": "eagle3", "k": 2, "ranges": None}
GPU = HARDWARE | {
    "gpus": [{"name": "GPU X"}],
    "versions": {"vllm": "0.26.0", "torch": "2.11.0"},
}


def script(
    deploy: dict[str, Any] | None = None,
    *,
    greedy: dict[str, Any] | None = None,
    verdict: str = "Serve it.",
    hardware: dict[str, Any] = HARDWARE,
    eager: bool = False,
    parallel: Parallel | None = None,
) -> str:
    record = {"verdict": verdict, "deploy": deploy, "deploy_greedy": greedy or deploy}
    bench = PARAMS.bench.model_copy(update={"enforce_eager": eager})
    spread = parallel or Parallel()
    return serve_script(record, methods(), VERIFIER, hardware, bench, spread, PARAMS.runtime)


def run(folder: Path, text: str, *more: str, key: str = "") -> tuple[list[str], dict[str, str]]:
    """The command line and environment that a script in a repository of that name comes to."""
    repository = folder / "a repository"
    tools = repository / ".venv" / "bin"
    (repository / "reports").mkdir(parents=True)
    tools.mkdir(parents=True)
    (repository / "reports/serve.sh").write_text(text)
    python = tools / "python"
    python.write_text(
        f"""#!/bin/sh
case "$1 $2" in
  "-c "*environment_prefix*) printf '%s\\n' "{repository}/.venv" ;;
  "-c "*model_path*) printf '%s\\n' "models/ver ifier" ;;
  *) for word; do printf '%s\\0' "$word"; done > "{folder}/words"; env -0 > "{folder}/env"; pwd ;;
esac
"""
    )
    python.chmod(0o755)
    (tools / "vllm").write_text(python.read_text())
    (tools / "vllm").chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "CDPATH": str(folder), "VLLM_API_KEY": key}
    done = subprocess.run(
        ["sh", str(repository / "reports/serve.sh"), *more],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == str(repository)
    words = (folder / "words").read_text().split("\0")[:-1]
    pairs = (folder / "env").read_text().split("\0")[:-1]
    return words, dict(pair.split("=", 1) for pair in pairs)


def test_without_an_adopted_option_no_speculation_is_served(tmp_path: Path) -> None:
    words, _ = run(tmp_path, script())
    assert words == [
        "-m", "vllm.entrypoints.openai.api_server", "--model", "models/ver ifier",
        "--served-model-name", "verifier", "--host", "127.0.0.1", "--port", "8000",
        "--generation-config", "vllm", "--max-model-len", "512", "--dtype", "float32",
    ]  # fmt: skip


def test_the_adopted_option_is_served_with_its_head_by_a_relative_path(tmp_path: Path) -> None:
    words, _ = run(tmp_path, script(EAGLE3, eager=True), "--port", "9000")
    at = words.index("--speculative-config")
    assert json.loads(words[at + 1]) == {
        "method": "eagle3", "num_speculative_tokens": 2, "model": "models/eagle3",
    }  # fmt: skip
    assert "--enforce-eager" in words
    assert words[-2:] == ["--port", "9000"]  # after ours, so that it wins


@pytest.mark.parametrize("host", [["--host", "0.0.0.0"], ["--port", "1", "--host=0.0.0.0"]])
def test_other_machines_are_not_let_in_without_a_key(tmp_path: Path, host: list[str]) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        run(tmp_path, script(), *host)
    assert "VLLM_API_KEY: set a key before other machines can ask" in refused.value.stderr
    assert not (tmp_path / "words").exists()


def test_with_a_key_a_host_is_taken(tmp_path: Path) -> None:
    words, environment = run(tmp_path, script(), "--host", "0.0.0.0", key="chosen")
    assert words[-2:] == ["--host", "0.0.0.0"]
    assert environment["VLLM_API_KEY"] == "chosen"


def test_a_script_of_uncompiled_engines_says_that_they_were_for_a_test() -> None:
    text = " ".join(script(EAGLE3, eager=True).split("\n# "))
    assert "TEST CONFIGURATION, not for deployment: these engines were uncompiled" in text
    assert "TEST" not in script(EAGLE3)


def test_a_schedule_is_served_as_vllm_reads_it(tmp_path: Path) -> None:
    words, _ = run(tmp_path, script(EAGLE3 | {"ranges": [[1, 4, 2], [5, 8, 0]]}))
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 4, 2], [5, 8, 0]]


def test_the_engine_has_the_environment_it_was_measured_with(tmp_path: Path) -> None:
    _, environment = run(tmp_path, script())
    expected = compat.engine_environment("cpu", PARAMS.runtime.cpu_kv_cache_gib)
    libraries = f"{tmp_path}/a repository/.venv/lib/libiomp5.so"
    expected |= {"LD_PRELOAD": libraries}
    assert expected.items() <= environment.items()


def test_on_a_gpu_it_is_vllm_serve_with_its_share_of_memory(tmp_path: Path) -> None:
    text = script(hardware=GPU)
    words, environment = run(tmp_path, text)
    assert words[:2] == ["serve", "models/ver ifier"]
    assert "--model" not in words
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.85"
    assert "LD_PRELOAD" not in environment
    said = " ".join(text.replace("\n# ", " ").split())
    assert "measured on GPU X; vllm 0.26.0, torch 2.11.0." in said


def test_a_cpu_build_of_torch_sees_no_gpu_that_is_there() -> None:
    assert machine_of(HARDWARE) == "cpu"
    assert machine_of(GPU) == "cuda"
    assert machine_of(GPU | {"versions": {"torch": "2.13.0+cpu"}}) == "cpu"


def test_what_is_for_greedy_requests_only_is_a_comment_that_can_be_run(tmp_path: Path) -> None:
    text = script(greedy=EAGLE3)
    (line,) = (line for line in text.splitlines() if "--speculative-config" in line)
    assert line == (
        '#   sh reports/serve.sh --speculative-config \'{"method": "eagle3", '
        '"num_speculative_tokens": 2, "model": "models/eagle3"}\''
    )
    words, _ = run(tmp_path, text)
    assert "--speculative-config" not in words


def test_a_verdict_with_line_breaks_and_quotes_stays_a_comment(tmp_path: Path) -> None:
    verdict = "Serve $(touch hacked)\nrm -rf x; `touch hacked` 'a' \"b\" " + "long " * 40
    text = script(verdict=verdict)
    comments = text.split("set -eu")[0].splitlines()
    assert all(line.startswith("#") and len(line) <= 100 for line in comments)
    run(tmp_path, text)
    assert not list(tmp_path.rglob("hacked"))


def test_a_setting_with_a_quote_arrives_as_it_is(tmp_path: Path) -> None:
    odd = {"ngram": Method(method="ngram", section="spec", head="it's $HOME", settings={"a": "'"})}
    record = {"verdict": "v", "deploy": EAGLE3 | {"method": "ngram"}, "deploy_greedy": None}
    text = serve_script(record, odd, VERIFIER, HARDWARE, PARAMS.bench, Parallel(), PARAMS.runtime)
    words, _ = run(tmp_path, text)
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert (config["model"], config["a"]) == ("it's $HOME", "'")


def test_nothing_of_this_machine_and_no_date_is_in_the_script() -> None:
    text = script(EAGLE3)
    assert str(ROOT) not in text
    assert str(compat.environment_prefix()) not in text
    assert text == script(EAGLE3)
    assert text.startswith("#!/bin/sh\n# Made by the report stage")


SERVED = {
    "ngram": Method(
        method="ngram", section="spec", head="models/verifier/identity.json",
        settings={"prompt_lookup_min": 2, "prompt_lookup_max": 4},
    ),
    "suffix": Method(
        method="suffix", section="spec", head="models/verifier/identity.json",
        settings={"suffix_decoding_max_tree_depth": 8, "suffix_decoding_max_spec_factor": None},
    ),
    "eagle3": Method(method="eagle3", section="spec", head="models/eagle3", settings={}),
    "peagle": Method(method="peagle", section="spec", head="models/siblings/peagle", settings={}),
    "dflash": Method(method="dflash", section="spec", head="models/siblings/dflash", settings={}),
    "medusa": Method(method="medusa", section="spec", head="models/medusa/m", settings={}),
    "draft_model": Method(
        method="draft_model", section="spec", head="models/draft/first", settings={}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SERVED))
def test_vllm_is_told_what_it_was_told_when_it_was_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "suffix":
        pytest.importorskip("arctic_inference")
    monkeypatch.chdir(tmp_path)
    chosen = SERVED[name]
    Path(chosen.head).mkdir(parents=True)
    (Path(chosen.head) / "config.json").write_text('{"vocab_size": 10, "num_heads": 3}')
    # what these check is read from heads that nobody has trained here
    for check in (
        "eagle3.check_trained", "peagle.check_trained", "dflash.check_trained",
        "medusa.check_fit", "medusa.check_weights", "draft_model.check_tokens",
    ):  # fmt: skip
        monkeypatch.setattr(f"specmill.methods.{check}", lambda *_: None)
    told = speculative_configs(name, chosen, [2], {"name": "tiny", "vocab_size": 10})[2]
    assert told is not None
    if "model" in told:
        told |= {"model": str(Path(told["model"]).relative_to(tmp_path))}
    assert speculation(SERVED, {"method": name, "k": 2, "ranges": None}) == told


def test_an_engine_over_several_gpus_is_served_as_it_was_measured(tmp_path: Path) -> None:
    spread = Parallel(tensor_parallel_size=2, enable_expert_parallel=True)
    words, _ = run(tmp_path, script(EAGLE3, hardware=GPU, parallel=spread))
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert "--enable-expert-parallel" in words
    assert "--data-parallel-size" not in words
