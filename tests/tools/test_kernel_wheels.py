"""Wheels of the native operators: what stands in one is compared with the name that it has."""

from __future__ import annotations

import importlib.util
import struct
import zipfile
from pathlib import Path

import pytest

from eagle_tools import kernel_wheels
from eagle_tools.wheel_contents import ELF, MACH, Contents, WheelError, check_wheel, contents_of

LINUX, ARM, WINDOWS, _, MAC, _ = kernel_wheels.SYSTEMS
OF_LINUX = (b"libc.so.6", b"GLIBC_2.2.5", b"GLIBC_2.17", b"eagle_kernels.so")


def elf(machine: int, *texts: bytes) -> bytes:
    return ELF.ljust(18, b"\0") + struct.pack("<H", machine) + b"\0".join((b"", *texts, b""))


def pe(machine: int, *texts: bytes) -> bytes:
    return b"MZ".ljust(60, b"\0") + struct.pack("<I", 64) + b"PE\0\0" + struct.pack("<H", machine) + b"\0".join(texts)


def mach(machine: int, *texts: bytes) -> bytes:
    return MACH + struct.pack("<I", machine) + b"\0".join(texts)


def wheel(folder: Path, system: kernel_wheels.System, library: bytes, tag: str = "", more: str = "") -> Path:
    """Writes a wheel that is named for a system. tag: that it says itself; more: name of another file."""
    path = folder / f"eagle_edge_kernels-0.1.0-py3-none-{system.tag}.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"eagle_edge_kernels/eagle_kernels{system.suffix}", library)
        described = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag or f'py3-none-{system.tag}'}\n"
        file.writestr("eagle_edge_kernels-0.1.0.dist-info/WHEEL", described)
        if more:
            file.writestr(more, b"")
    return path


def check(path: Path, system: kernel_wheels.System) -> Contents:
    return check_wheel(path, system.tag, system.processor, system.suffix)


def test_wheels_that_are_as_their_names(tmp_path: Path) -> None:
    of_linux = elf(62, *OF_LINUX)
    assert check(wheel(tmp_path, LINUX, of_linux), LINUX) == Contents(
        "ELF", "x86_64", frozenset({"libc.so.6"}), (2, 17)
    )
    assert check(wheel(tmp_path, ARM, elf(183)), ARM).processor == "aarch64"
    names = (b"KERNEL32.dll", b"api-ms-win-crt-heap-l1-1-0.dll", b"eagle_kernels.dll")
    assert len(check(wheel(tmp_path, WINDOWS, pe(0x8664, *names)), WINDOWS).needed) == 2
    assert check(wheel(tmp_path, MAC, mach(0x0100000C, b"/usr/lib/libSystem.B.dylib")), MAC).format == "Mach-O"


@pytest.mark.parametrize(
    ("library", "tag", "more", "said"),
    [
        (elf(62, b"GLIBC_2.4", b"GLIBC_2.29"), "", "", "needs glibc 2.29, and its tag promises 2.17"),
        (elf(62, b"libstdc++.so.6"), "", "", r"names libraries that its system may lack: libstdc\+\+.so.6"),
        (elf(183), "", "", "has a library in ELF for aarch64"),
        (pe(0x8664), "", "", "has a library in PE for x86_64"),
        (elf(3), "", "", "the library is for no system that is known"),
        (b"#!/bin/sh", "", "", "the library is for no system that is known"),
        (elf(62), "py3-none-linux_x86_64", "", "says tags .'py3-none-linux_x86_64'."),
        (elf(62), "", "eagle_edge_kernels/other.so", "has the libraries .*other.so"),
        (elf(62) + bytes(1_000_000), "", "", "more than 1000000"),
    ],
)
def test_what_is_refused(library: bytes, tag: str, more: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(WheelError, match=said):
        check(wheel(tmp_path, LINUX, library, tag, more), LINUX)


def test_a_wheel_named_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WheelError, match="is not named for manylinux2014_aarch64"):
        check(wheel(tmp_path, LINUX, elf(183)), ARM)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("ziglang", "scikit_build_core", "cmake", "ninja", "wheel")),
    reason="needs the extra wheels",
)
def test_a_wheel_for_linux_is_built(tmp_path: Path) -> None:
    """The check is a part of the build."""
    assert kernel_wheels.main([str(tmp_path), "--only", LINUX.tag]) == 0
    (made,) = tmp_path.iterdir()
    with zipfile.ZipFile(made) as file:
        found = contents_of(file.read("eagle_edge_kernels/eagle_kernels.so"))
    assert found.processor == "x86_64" and (2, 0) < found.glibc <= (2, 17)
