import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from specmill import hardware
from specmill.hardware import describe_machine


def fake_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_description_holds_lasting_facts_and_nothing_else() -> None:
    found = describe_machine()
    assert set(found) == {
        "cpu_features",
        "cpu_model",
        "num_usable_cores",
        "memory_gib",
        "gpus",
        "versions",
        "machine",
    }
    assert set(found["versions"]) == {"vllm", "torch", "transformers", "speculators", "python"}


def test_the_description_is_the_same_in_another_process_at_another_time() -> None:
    program = (
        "import json; from specmill.hardware import describe_machine; "
        "print(json.dumps(describe_machine()))"
    )
    other = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert json.loads(other.stdout) == describe_machine() == describe_machine()


def test_cores_are_those_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert describe_machine()["num_usable_cores"] == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert describe_machine()["num_usable_cores"] == len(allowed)


def test_memory_is_all_of_the_machines_in_gib() -> None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            kib = int(line.split()[1])
    assert describe_machine()["memory_gib"] == round(kib / 1024 / 1024)


def test_versions_are_those_installed() -> None:
    versions = describe_machine()["versions"]
    assert versions["torch"] == version("torch")
    assert versions["python"] == sys.version.split()[0]


def test_gpus_are_listed_with_memory_and_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvidia_smi(
        tmp_path,
        monkeypatch,
        "printf 'NVIDIA X, 143771 MiB, 580.1\\nNVIDIA Y, 81920 MiB, 580.1\\n'",
    )
    assert describe_machine()["gpus"] == [
        {"name": "NVIDIA X", "memory": "143771 MiB", "driver": "580.1"},
        {"name": "NVIDIA Y", "memory": "81920 MiB", "driver": "580.1"},
    ]


@pytest.mark.parametrize("script", ["exit 9", "true"])
def test_a_driver_without_a_device_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    fake_nvidia_smi(tmp_path, monkeypatch, script)
    assert describe_machine()["gpus"] == []


def test_the_machine_id_is_a_digest_and_not_the_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc and /etc are those of a made-up machine."""

    def describe(machine_id: str) -> dict[str, Any]:
        made_up = {
            "/etc/machine-id": f"{machine_id}\n",
            "/proc/cpuinfo": "vendor\t: X\nmodel name\t: Some: CPU\n",
        }
        for place, text in made_up.items():
            (tmp_path / place[1:]).parent.mkdir(exist_ok=True)
            (tmp_path / place[1:]).write_text(text)
        monkeypatch.setattr(hardware, "Path", lambda place: tmp_path / place[1:])
        return hardware.describe_machine()

    found, other = describe("0123abcd"), describe("0123abce")
    assert found["cpu_model"] == "Some: CPU"
    assert len(found["machine"]) == len(other["machine"]) == 12
    assert found["machine"] != other["machine"]
    assert describe("0123abcd") == found
    assert "0123abcd" not in json.dumps(found)
