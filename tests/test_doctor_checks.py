"""Every kind of problem that the doctor knows, each on a machine or verifier that has it."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specmill import compat, doctor_services, machine_look
from specmill.doctor_disk import check_disk
from specmill.doctor_machine import check_dtype, check_gpus, check_system, check_versions
from specmill.doctor_services import (
    cache_is_linked,
    check_endpoints,
    check_git,
    check_hub,
    check_remotes,
    check_tracking,
)
from specmill.doctor_verifier import (
    check_card,
    check_engine,
    check_memory,
    check_template,
    read_card,
    size_of,
)
from specmill.finding import Finding
from tests.configs import KIMI_K25, LLAMA_8B
from tests.llamas import write_llama
from tests.patients import ENGINE, GIB, SMOLLM, card, h200, machine, params, tokenizer


def level(found: list[Finding], check: str) -> str:
    (one,) = [finding.level for finding in found if finding.check == check]
    return one


def test_tested_versions_are_well_and_others_a_warning_that_names_them() -> None:
    assert {one.level for one in check_versions(machine())} == {"ok"}
    assert {one.level for one in check_versions(h200())} == {"ok"}
    (found,) = check_versions(machine(versions={"vllm": "0.33.1"}))
    assert found.level == "warning"
    assert found.found == "vllm 0.33.1 (tested: 0.32)"


def test_a_python_that_is_too_old_is_a_problem() -> None:
    assert level(check_versions(machine(versions={"python": "3.10.2"})), "python") == "problem"


def test_a_cpu_build_of_torch_beside_a_gpu_is_a_problem() -> None:
    gpus = h200().hardware["gpus"]
    assert level(check_versions(machine(gpus=gpus)), "cuda") == "problem"


def test_a_driver_older_than_torchs_cuda_is_a_problem() -> None:
    assert level(check_versions(h200(driver_cuda="12.8")), "cuda") == "problem"
    assert level(check_versions(h200(driver_cuda="13.1")), "cuda") == "ok"


def test_a_driver_that_was_not_tested_is_a_warning() -> None:
    gpu = h200().hardware["gpus"][0] | {"driver": "570.1"}
    assert level(check_versions(h200(gpus=[gpu])), "driver") == "warning"


def test_a_gpu_that_others_fill_is_a_problem() -> None:
    assert level(check_gpus(h200(gpu_bytes=((140 * GIB, 100 * GIB),)), params()),
                 "gpu memory") == "problem"  # fmt: skip
    assert {one.level for one in check_gpus(h200(), params())} == {"ok"}


@pytest.mark.parametrize(
    ("links", "kind"), [("GPU0  X   NV18", "NVLink"), ("GPU0  X   PHB", "PCIe only")]
)
def test_links_are_told_apart(links: str, kind: str) -> None:
    found = check_gpus(h200(gpus=h200().hardware["gpus"] * 2, links=links), params())
    assert any(kind in one.found for one in found if one.check == "links")


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ("parallel", {"tensor_parallel_size": 3}),
        ("parallel", {"data_parallel_size": 3}),
        ("runtime", {"train_processes": 3}),
    ],
)
def test_more_gpus_than_there_are_is_a_problem(section: str, keys: dict[str, int]) -> None:
    two = h200(gpus=h200().hardware["gpus"] * 2)
    (found,) = [one for one in check_gpus(two, params(**{section: keys})) if one.level != "ok"]
    assert found.level == "problem"
    assert f"{next(iter(keys))}" in found.found
    assert "asks for 3 GPUs, there are 2" in found.found
    assert {one.level for one in check_gpus(two, params(**{section: dict.fromkeys(keys, 2)}))} == {
        "ok"
    }


def test_a_shape_of_the_head_that_does_not_fit_is_a_problem() -> None:
    chosen = params(train={"draft": "kimi-k2-eagle3"}, vocab={"draft_vocab_size": 32000})
    assert level(check_card(card(), chosen), "draft model") == "problem"
    assert level(check_card(card(), params()), "draft model") == "ok"


def test_a_type_that_the_cpu_emulates_is_a_warning_unless_it_is_left_to_us() -> None:
    slow = machine(native_dtype="float32")
    assert level(check_dtype(slow, params(verifier={"dtype": "bfloat16"})), "dtype") == "warning"
    assert level(check_dtype(slow, params()), "dtype") == "ok"


@pytest.mark.parametrize(
    ("change", "check", "expected"),
    [
        ({"shm_bytes": 64 * 2**20}, "/dev/shm", "problem"),
        ({"open_files": 1024}, "open files", "warning"),
        ({"compiler": None}, "compiler", "problem"),
    ],
)
def test_what_an_engine_needs_of_the_system_is_missed(
    change: dict[str, Any], check: str, expected: str
) -> None:
    assert level(check_system(machine()), check) == "ok"
    assert level(check_system(machine(**change)), check) == expected


def test_a_missing_or_broken_openmp_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> dict[str, str]:
        raise FileNotFoundError("libiomp5.so is missing")

    (tmp_path / "libiomp5.so").write_bytes(b"no library")
    broken = {"LD_PRELOAD": str(tmp_path / "libiomp5.so")}
    for environment in (missing, lambda *_: broken):
        monkeypatch.setattr(compat, "engine_environment", environment)
        assert level(check_system(machine()), "openmp") == "problem"


def test_a_machine_without_a_loopback_port_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError("none left")

    monkeypatch.setattr("socket.socket", refuse)
    assert level(check_system(h200()), "ports") == "problem"


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\ncase \"$*\" in\n"
        "*memory.free*) printf '1000, 400\\n1000, 900\\n';;\n"
        "*driver_version*) printf 'NVIDIA X, 1000 MiB, 580.1\\nNVIDIA X, 1000 MiB, 580.1\\n';;\n"
        "topo*) echo 'GPU0 X NV18';;\n"
        "*) echo '| Driver Version: 580.1   CUDA Version: 13.0 |';;\nesac\n"
    )  # fmt: skip
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = machine_look.look()
    assert found.gpu_bytes == ((1000 * 2**20, 400 * 2**20), (1000 * 2**20, 900 * 2**20))
    assert (found.driver_cuda, found.links) == ("13.0", "GPU0 X NV18\n")


def test_a_disk_that_is_too_small_is_a_problem_and_what_lies_there_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    needs = {tmp_path / "a" / "b": 3000, tmp_path / "c": 500}
    (found,) = check_disk(needs)
    assert found.level == "problem"
    assert "(b 3e-06, c 5e-07)" in found.found
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "states").write_bytes(bytes(2900))
    assert [one.level for one in check_disk(needs)] == ["ok"]


def test_a_folder_outside_git_is_a_problem(tmp_path: Path) -> None:
    assert level(check_git(tmp_path), "git") == "problem"


def test_a_remote_that_cannot_be_reached_is_a_warning(tmp_path: Path) -> None:
    from dvc.repo import Repo

    with Repo.init(str(tmp_path), no_scm=True) as repo, repo.config.edit() as config:
        config["remote"] = {
            "here": {"url": str(tmp_path / "store")},
            "lost": {"url": "http://127.0.0.1:9/x"},
        }
    found = check_remotes(tmp_path)
    assert {one.check: one.level for one in found} == {
        "dvc remote here": "ok",
        "dvc remote lost": "warning",
    }


def test_a_folder_without_dvc_is_a_problem(tmp_path: Path) -> None:
    assert level(check_remotes(tmp_path), "dvc") == "problem"
    assert not cache_is_linked(tmp_path)


def test_a_cache_of_links_is_known(tmp_path: Path) -> None:
    from dvc.repo import Repo

    with Repo.init(str(tmp_path), no_scm=True) as repo:
        assert not cache_is_linked(tmp_path)
        with repo.config.edit() as config:
            config["cache"] = {"type": "reflink,hardlink"}
    assert cache_is_linked(tmp_path)


def test_a_tracking_server_that_does_not_answer_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    away = params(runtime={"tracking_uri": "http://127.0.0.1:9"})
    assert level(check_tracking(tmp_path, away), "mlflow") == "warning"
    assert level(check_tracking(tmp_path, params()), "mlflow") == "ok"


def test_an_endpoint_that_does_not_answer_is_a_problem() -> None:
    away = params(runtime={"extract_endpoints": ["http://127.0.0.1:9"]})
    assert level(check_endpoints(away), "endpoint") == "problem"
    assert check_endpoints(params()) == []


def test_a_hub_that_does_not_answer_is_a_problem_where_something_is_read_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    wanted = params(verifier={"source": "hub:a/b"})
    assert level(check_hub(wanted), "hub") == "problem"
    assert check_hub(params()) == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert level(check_hub(wanted), "hub") == "ok"


def test_a_folder_is_read_and_one_without_a_config_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    found = read_card(params(verifier={"source": f"folder:{tmp_path / 'model'}"}).verifier)
    assert (found.architecture, found.text["num_hidden_layers"]) == ("LlamaForCausalLM", 3)
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        read_card(params(verifier={"source": f"folder:{tmp_path}"}).verifier)


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"verifier": {"max_model_len": 9000}}, "context"),
        ({"extract": {"aux_layer_ids": [2, 15, 30]}}, "aux layers"),
        ({"vocab": {"draft_vocab_size": 50_000}}, "vocabulary"),
    ],
)
def test_parameters_that_the_verifier_does_not_bear_are_problems(
    changes: dict[str, Any], check: str
) -> None:
    assert {one.level for one in check_card(card(), params())} == {"ok"}
    assert level(check_card(card(), params(**changes)), check) == "problem"


LOSES = "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "responses", "expected"),
    [
        (None, "verifier", "problem"),
        ("{{ raise_exception('no') }}", "verifier", "problem"),
        (LOSES, "verifier", "warning"),
        (LOSES, "dataset", "problem"),
    ],
)
def test_a_template_that_fails_or_rewrites_what_came_before_is_found(
    template: str | None, responses: str, expected: str
) -> None:
    chosen = params(prepare={"responses": responses})
    assert check_template(tokenizer(template), chosen).level == expected


@pytest.mark.parametrize(
    ("said", "check", "expected"),
    [
        ({"serves": False}, "architecture", "problem"),
        ({"hands_states_out": False}, "architecture", "problem"),
        ({"drift": ["x is not there"]}, "interfaces", "problem"),
    ],
)
def test_what_vllm_says_of_the_verifier_is_judged(
    said: dict[str, Any], check: str, expected: str
) -> None:
    assert {one.level for one in check_engine(card(), params(), ENGINE)} == {"ok"}
    assert level(check_engine(card(), params(), ENGINE | said), check) == expected


def test_a_quantisation_that_vllm_does_not_know_is_a_problem() -> None:
    odd = card(SMOLLM | {"quantization_config": {"quant_method": "bitsworth"}})
    assert level(check_engine(odd, params(), ENGINE), "quantisation") == "problem"


def test_bytes_are_those_of_published_models() -> None:
    smollm = size_of(card(), params(), "bfloat16")
    # 134,515,008 parameters, of which 61 norms of 576 are left out; tied
    assert smollm.weight_bytes == 2 * (134_515_008 - 61 * 576)
    assert smollm.kv_bytes_per_token == 30 * 2 * 3 * 64 * 2
    assert smollm.state_bytes_per_token == 4 * 576 * 2 + 4
    llama = size_of(card(LLAMA_8B), params(), "bfloat16")
    assert llama.weight_bytes == 2 * (8_030_261_248 - 65 * 4096)
    # 1 T parameters in INT4 and bf16: field reports say about 595 GB on the disk
    kimi = size_of(card(KIMI_K25), params(verifier={"max_model_len": 4096}), "bfloat16")
    assert kimi.weight_bytes == pytest.approx(595e9, rel=0.03)
    assert kimi.kv_bytes_per_token == 61 * 576 * 2


def test_a_verifier_that_does_not_fit_its_device_is_a_problem() -> None:
    llama = size_of(card(LLAMA_8B), params(), "bfloat16")
    assert {one.level for one in check_memory(llama, h200(), params())} == {"ok"}
    small = h200(gpu_bytes=((24 * GIB, 24 * GIB),))
    assert level(check_memory(llama, small, params()), "memory") == "problem"
    alone = params(bench={"reference": "bracket"})
    assert level(check_memory(llama, small, alone), "memory") == "ok"


def test_requests_whose_cache_does_not_fit_at_once_are_a_warning() -> None:
    size = size_of(card(), params(), "bfloat16")
    many = params(bench={"concurrency": [1, 500]})
    assert level(check_memory(size, machine(), many), "kv cache") == "warning"


def test_engines_that_do_not_fit_a_cpus_memory_are_a_problem() -> None:
    size = size_of(card(), params(), "bfloat16")
    found = check_memory(size, machine(available_bytes=3 * GIB), params())
    assert [one.level for one in found if one.check == "memory"] == ["ok", "problem"]


def test_a_socket_of_this_machine_is_healthy_only_when_it_answers_200() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/health"
        assert doctor_services._unhealthy(url, 0.2) == "timed out"
