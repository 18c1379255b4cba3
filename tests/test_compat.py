import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from specmill import compat

# Lines of vLLM 0.32 on a CPU, shortened in the middle.
CPU_LOG = """\
(APIServer pid=1) INFO 11-29 14:24:45 [model.py:733] Resolved architecture: LlamaForCausalLM
(APIServer pid=1) WARNING 11-29 14:24:45 [cpu.py:224] Triton is not installed.
(APIServer pid=1) WARNING 11-29 14:24:45 [vllm.py:725] Model Runner V2 requires Triton; using the \
V1 model runner instead.
(EngineCore pid=2) INFO 11-29 14:24:51 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with \
config: dtype=torch.bfloat16, max_seq_len=2048, enforce_eager=False, enable_prefix_caching=True, \
enable_chunked_prefill=True, compilation_config={'mode': <CompilationMode.DYNAMO_TRACE_ONCE: 2>, \
'cudagraph_mode': <CUDAGraphMode.NONE: 0>, 'use_inductor_graph_partition': False}
(EngineCore pid=2) INFO 11-29 14:24:51 [ompmultiprocessing.py:185] \tlocal_rank=0, core ids=[0, 1]
(VllmWorker-0 pid=3) WARNING 11-29 14:24:58 [cpu.py:224] Triton is not installed.
(VllmWorker-0 pid=3) INFO 11-29 14:25:01 [cpu.py:101] Using CPU_ATTN attention backend
"""


def test_facts_are_read_from_the_log_of_a_cpu_engine() -> None:
    assert compat.engine_facts(CPU_LOG) == {
        "attention_backend": "CPU_ATTN",
        "enforce_eager": "False",
        "prefix_caching": "True",
        "chunked_prefill": "True",
        "dtype": "bfloat16",
        "cudagraph_mode": "NONE",
        "compilation_mode": "DYNAMO_TRACE_ONCE",
        "moe_backend": None,
        "kv_cache_tokens": None,
        "bound_cores": [0, 1],
        "model_runner": "V1",
        "async_scheduling": None,
        "warnings": [
            "[cpu.py:224] Triton is not installed.",
            "[vllm.py:725] Model Runner V2 requires Triton; using the V1 model runner instead.",
        ],
    }


def test_facts_that_a_log_does_not_state_are_none_and_no_default() -> None:
    facts = compat.engine_facts("INFO nothing of interest\n")
    assert facts.pop("warnings") == []
    assert set(facts.values()) == {None}
    assert set(facts) == set(compat.engine_facts(CPU_LOG)) - {"warnings"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("INFO [vllm.py:9] Asynchronous scheduling is enabled.", True),
        ("INFO [vllm.py:9] Asynchronous scheduling is disabled.", False),
        ("WARNING 11-29 14:24:45 [x.py:1] Async scheduling with ngram will be disabled.", False),
        ("INFO [x.py:1] scheduling", None),
    ],
)
def test_asynchronous_scheduling_is_on_off_or_not_stated(line: str, expected: bool | None) -> None:
    assert compat.engine_facts(line)["async_scheduling"] is expected


def test_the_second_model_runner_is_told_from_the_first() -> None:
    assert compat.engine_facts("INFO Using V2 Model Runner")["model_runner"] == "V2"


def test_the_version_of_the_first_installed_distribution_is_taken() -> None:
    assert compat.package_version("no-such-package-x", "pytest") == version("pytest")
    with pytest.raises(ModuleNotFoundError, match="none of no-such-package-x, no-such-y is"):
        compat.package_version("no-such-package-x", "no-such-y")


def test_the_server_listens_on_loopback_only_and_keeps_the_flags_it_is_given() -> None:
    command = compat.server_command(Path("models/verifier"), 4711, ["--enforce-eager"])
    assert command[0] == sys.executable
    options = dict(zip(command[3:-1:2], command[4:-1:2], strict=True))
    assert options == {
        "--model": "models/verifier",
        "--served-model-name": "verifier",
        "--host": "127.0.0.1",
        "--port": "4711",
        "--generation-config": "vllm",
    }
    assert command[-1] == "--enforce-eager"


def test_a_cpu_engine_computes_on_all_cores_with_intels_openmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    openmp = tmp_path / "lib" / "libiomp5.so"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"libiomp5\.so is missing; .*make venv"):
        compat.engine_environment("cpu", 3)
    openmp.touch()
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    found = compat.engine_environment("cpu", 3)
    assert found["LD_PRELOAD"] == f"{openmp} libother.so"
    assert found["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "3"
    monkeypatch.setenv("LD_PRELOAD", found["LD_PRELOAD"])  # an engine inside an engine's stage
    assert compat.engine_environment("cpu", 3) == found


def test_a_gpu_engine_gets_its_share_of_memory_and_no_preloaded_library() -> None:
    assert "LD_PRELOAD" not in compat.engine_environment("cuda", 3)
    assert compat.engine_arguments("cuda", 0.85) == ["--gpu-memory-utilization", "0.85"]
    assert compat.engine_arguments("cpu", 0.85) == []


def test_losses_are_fused_on_a_gpu_except_where_they_do_not_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for torch_version in ("2.11.0+cu130", "2.13.0"):
        monkeypatch.setattr(compat, "package_version", lambda *_, v=torch_version: v)
        found[torch_version] = [compat.loss_implementation(kind) for kind in ("cuda", "cpu")]
    assert found == {"2.11.0+cu130": ["eager", "eager"], "2.13.0": ["fused", "eager"]}


def test_an_environment_in_a_path_with_blanks_is_reached_through_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "a path" / "with: both" / ".venv"
    (prefix / "bin").mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    reached = compat.environment_prefix()
    assert not set(str(reached)) & {" ", ":"}
    assert reached.resolve() == prefix
    assert compat.environment_prefix() == reached


def test_an_environment_in_a_plain_path_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/opt/specmill/.venv")
    assert compat.environment_prefix() == Path("/opt/specmill/.venv")


def test_a_temporary_folder_that_others_may_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", "/a path/.venv")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"specmill-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="TMPDIR"):
        compat.environment_prefix()


def test_the_reason_of_an_engine_that_refuses_its_configuration_is_pydantics() -> None:
    log = (
        "(APIServer pid=7) INFO 11-29 23:51:57 [api_server.py:1] starting\n"
        "Traceback (most recent call last):\n"
        '  File "x.py", line 121, in __init__\n'
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\n"
        "  Value error, Model architectures ['A'] are not supported for now. "
        "[type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]\n"
    )
    assert compat.engine_error(log) == "Model architectures ['A'] are not supported for now."


def test_the_reason_of_an_engine_that_fails_later_is_its_first_error() -> None:
    log = (
        "(EngineCore pid=9) WARNING 11-29 23:51:57 [a.py:2] errors like `OSError: [Errno 24]`\n"
        "(EngineCore pid=9) ERROR 11-29 23:53:01 [core.py:11] Traceback (most recent call last):\n"
        "(EngineCore pid=9) ERROR 11-29 23:53:01 [core.py:11] AssertionError: 4 is not 8\n"
        "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert compat.engine_error(log) == "AssertionError: 4 is not 8"
    bare = "torch.AcceleratorError: CUDA error\nRuntimeError: Engine core failed\n"
    assert compat.engine_error(bare) == "torch.AcceleratorError: CUDA error"
    assert compat.engine_error("nothing to see\n") == "it gave no reason"
    assert len(compat.engine_error("ValueError: " + "much " * 200)) <= 300
