"""Name and instruction sets of a processor: as Linux lists them on x86 and ARM, and on a system without a list."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from eagle_runtime.machine.host import processor_features, processor_name

X86 = """processor\t: 0
model name\t: A processor @ 2.10GHz
flags\t\t: fpu avx avx2

processor\t: 1
model name\t: A processor @ 2.10GHz
flags\t\t: fpu avx avx2

"""
ARM = """processor\t: 0
Features\t: fp asimd asimddp
CPU implementer\t: 0x41
CPU part\t: 0xd0b
"""


@pytest.mark.parametrize(
    ("text", "name", "features"),
    [(X86, "A processor @ 2.10GHz", {"fpu", "avx", "avx2"}), (ARM, "0xd0b", {"fp", "asimd", "asimddp"})],
)
def test_what_linux_tells(text: str, name: str, features: set[str], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
    assert processor_name(tmp_path / "cpuinfo") == name
    assert {*features, platform.machine()} <= set(processor_features(tmp_path / "cpuinfo"))
    (tmp_path / "newer").write_text(text.replace(": fp", ": fp bf16"), encoding="utf-8")
    assert processor_features(tmp_path / "newer") != processor_features(tmp_path / "cpuinfo")


def test_without_a_list_it_is_asked(tmp_path: Path) -> None:
    """As an emulator's, which lies beneath the system's list."""
    assert processor_name(tmp_path / "absent") in (platform.processor(), platform.machine())
    features = processor_features(tmp_path / "absent")
    assert list(features) == sorted(set(features)) and platform.machine() in features
    assert len(features) > 3, "NumPy has moved its private module"


def test_this_machine() -> None:
    assert processor_name() and len(processor_features()) > 3
