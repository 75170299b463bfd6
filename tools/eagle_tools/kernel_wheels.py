"""Wheels of eagle-edge-kernels for six systems, compiled on one machine: python -m eagle_tools.kernel_wheels OUT

`ziglang`, a package, is a C++ compiler with the headers and C libraries of all these systems. Linux's glibc is that of
2014 (2.17), Windows' runtime is the one that is part of Windows, and nothing else is linked. Needs scikit-build-core,
CMake, ninja, wheel and ziglang (`pip install "eagle-edge[wheels]"`); the first time takes some minutes per system, in
which the compiler builds that system's start files, and a minute in all later on.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_tools.wheel_contents import WheelError, check_wheel

KERNELS = Path(__file__).parents[2] / "kernels"


@dataclass(frozen=True, slots=True)
class System:
    """tag: the platform part of the wheel's name. target: its name for zig. processor: as CMake calls it. suffix: of
    the library's file."""

    tag: str
    target: str
    processor: str
    suffix: str = ".so"


SYSTEMS = (
    System("manylinux2014_x86_64", "x86_64-linux-gnu.2.17", "x86_64"),
    System("manylinux2014_aarch64", "aarch64-linux-gnu.2.17", "aarch64"),
    System("win_amd64", "x86_64-windows-gnu", "x86_64", ".dll"),
    System("win_arm64", "aarch64-windows-gnu", "aarch64", ".dll"),
    System("macosx_11_0_arm64", "aarch64-macos.11.0", "aarch64"),
    System("macosx_11_0_x86_64", "x86_64-macos.11.0", "x86_64"),
)


def build(system: System, out: Path) -> Path:
    """Compiles the operators for a system and returns the wheel, which is written to `out` if its
    contents are those of its tag. Raises subprocess.CalledProcessError with the compiler's messages on stderr, and
    WheelError."""
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder) / "c++"
        compiler.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -m ziglang c++ -target {system.target} -nostdlib++ "$@"\n',
            encoding="utf-8",
        )
        compiler.chmod(0o755)
        # As if for Linux throughout: the compiler knows what a shared library is elsewhere, and CMake would ask for
        # tools of the other system.
        defines = {
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": system.processor,
            "CMAKE_CXX_COMPILER": compiler,
            "LIBRARY_SUFFIX": system.suffix,
            "CMAKE_MODULE_LINKER_FLAGS": "-s",
        }
        settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, *settings, "--wheel-dir", folder, str(KERNELS)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        tag = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", system.tag, str(wheel)]
        name = subprocess.run(tag, check=True, capture_output=True, encoding="utf-8").stdout.split()[-1]
        check_wheel(Path(folder) / name, system.tag, system.processor, system.suffix)
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(Path(folder) / name, out / name))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eagle_tools.kernel_wheels", description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the wheels")
    parser.add_argument("--only", choices=[system.tag for system in SYSTEMS], help="one of the systems")
    args = parser.parse_args(argv)
    for system in SYSTEMS:
        if args.only in (None, system.tag):
            try:
                wheel = build(system, args.out)
            except subprocess.CalledProcessError as error:
                print(f"kernel_wheels: {system.tag} failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
                return 2
            except WheelError as error:
                print(f"kernel_wheels: {error}", file=sys.stderr)
                return 2
            print(f"{wheel}  {wheel.stat().st_size / 1e3:.0f} kB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
