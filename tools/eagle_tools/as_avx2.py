"""A copy of ONNX Runtime that computes as on a processor with AVX2 alone, at full speed.

    python -m eagle_tools.as_avx2              the processor, and onnxruntime's version
    python -m eagle_tools.as_avx2 .avx2        writes .avx2/onnxruntime, which `PYTHONPATH=.avx2 python ...` imports

Kernels are chosen by the processor when the library is loaded. The copy's library is altered in two places: where it
asks which registers the system saves (XGETBV), the answer is that those of AVX-512 and AMX are not among them; where it
asks for the newer instructions on AVX2's registers (CPUID, leaf 7.1: AVX-VNNI), the answer is that there are none.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy  # noqa: F401  (detects instruction sets, which processor_features reads)

from eagle_runtime.base.errors import EagleError
from eagle_runtime.machine.host import processor_features, processor_name
from eagle_tools.own_python import run_python

SHOWN = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "amx_bf16")  # Linux's names
BEYOND = ("avx512f", "avx512_vnni", "avx_vnni")  # with one of these other kernels run than with AVX2 alone
LIBRARY = "onnxruntime_pybind11_state*.so"
# Prints whether byte products saturate, and the folder that onnxruntime came from.
PROBE = "from eagle_runtime.ort import library; print(library.byte_products_saturate(), library.ort.__file__)"


@dataclass(frozen=True, slots=True)
class Alteration:
    """Machine code that asks the processor, and what it becomes; both have the same length. sites: how often it occurs
    in the releases that are known. what: for messages."""

    what: str
    before: str
    after: str
    sites: int


ALTERATIONS = (
    # xor ecx,ecx; xgetbv; mov eax,eax; shl rdx,32; or rdx,rax -> xor ecx,ecx; mov eax,7; mov edx,eax; nop.
    # 7: the registers of x87, SSE and AVX.
    Alteration("XGETBV of the kernels", "31c9 0f01d0 89c0 48c1e220 4809c2", "31c9 b807000000 89c2 0f1f440000", 1),
    # xor ecx,ecx; xgetbv; shr edi,26; mov ecx,r8d -> mov eax,7; shr edi,26; mov ecx,r8d
    Alteration("XGETBV of the operators", "31c9 0f01d0 c1ef1a 4489c1", "b807000000 c1ef1a 4489c1", 1),
    # mov eax,7; mov ecx,1; cpuid -> xor eax,eax; xor ebx,ebx; xor ecx,ecx; xor edx,edx; nop
    Alteration("CPUID of leaf 7.1", "b807000000 b901000000 0fa2", "31c0 31db 31c9 31d2 0f1f4000", 2),
)


def altered(library: bytes, version: str) -> bytes:
    """Returns the content of ONNX Runtime's library with all ALTERATIONS. Raises EagleError where it asks the processor
    in other words, or more often, than the releases that are known."""
    for each in ALTERATIONS:
        before, after = bytes.fromhex(each.before), bytes.fromhex(each.after)
        assert len(before) == len(after), each
        sites = library.count(before)
        if sites != each.sites:
            raise EagleError(
                f"onnxruntime {version}: {each.what} was found {sites} times instead of {each.sites}; this release is "
                "compiled otherwise, so disassemble it and extend ALTERATIONS in tools/eagle_tools/as_avx2.py"
            )
        library = library.replace(before, after)
    return library


def installed() -> Path:
    """Returns the path of the installed library, also in a process that imports an altered copy of it. Raises
    EagleError."""
    try:
        distribution = importlib.metadata.distribution("onnxruntime")
    except importlib.metadata.PackageNotFoundError:
        raise EagleError("onnxruntime is not installed; pip install 'eagle-edge[cpu]'") from None
    (library,) = Path(str(distribution.locate_file("onnxruntime/capi"))).glob(LIBRARY)
    return library


def prepare(folder: Path) -> Path:
    """Writes folder/onnxruntime anew, an altered copy of the installed package whose other files are hard links where
    the file system has them, and lets another process try it. Returns the library's path. Raises EagleError."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise EagleError(f"this processor is not x86-64 but {platform.machine()}; there is nothing to alter")
    library, copy = installed(), folder / "onnxruntime"
    content = altered(library.read_bytes(), importlib.metadata.version("onnxruntime"))
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(
        library.parents[1], copy, copy_function=_link, ignore=shutil.ignore_patterns(LIBRARY, "__pycache__")
    )
    place = copy / "capi" / library.name
    place.write_bytes(content)
    saturates, origin = _try(folder)
    if Path(origin).parent != copy.resolve() or saturates != "True":
        raise EagleError(f"{place}: onnxruntime came from {origin}, byte products saturate: {saturates}; expected True")
    return place


def beyond_avx2(features: Collection[str]) -> list[str]:
    """Returns those of BEYOND that a processor has."""
    return [name for name in BEYOND if name in features]


def describe() -> str:
    """Returns one line: the processor, what it has of SHOWN, and onnxruntime's version."""
    features = processor_features()
    has = [name for name in SHOWN if name in features]
    lacks = [name for name in SHOWN if name not in features]
    return (
        f"{processor_name()}, {os.cpu_count()} cores, {platform.machine()}; has {', '.join(has) or 'none of these'}; "
        f"lacks {', '.join(lacks) or 'none'}; onnxruntime {importlib.metadata.version('onnxruntime')}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the processor; with a folder, prepares it where the processor is more than AVX2, else removes it."""
    parser = argparse.ArgumentParser(prog="as_avx2", description="onnxruntime as on a processor with AVX2 alone")
    parser.add_argument("folder", nargs="?", type=Path, help="where the altered copy is written")
    folder: Path | None = parser.parse_args(argv).folder
    print(describe())
    if folder is None:
        return 0
    if not beyond_avx2(processor_features()):
        shutil.rmtree(folder, ignore_errors=True)
        print("as on AVX2: this processor has neither AVX-512 nor VNNI, so the installed library computes like that")
        return 0
    try:
        print(f"as on AVX2: {prepare(folder)}")
    except EagleError as error:
        print(f"as_avx2: {error}", file=sys.stderr)
        return 1
    return 0


def _link(source: str, place: str) -> None:
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)


def _try(folder: Path) -> tuple[str, str]:
    """What PROBE prints with the copy, imported as its users import it."""
    paths = os.pathsep.join([str(folder.resolve()), *(path for path in sys.path if path)])
    printed = run_python(["-c", PROBE], "the altered onnxruntime fails", {**os.environ, "PYTHONPATH": paths})
    saturates, origin = printed.split(maxsplit=1)
    return saturates, origin.strip()


if __name__ == "__main__":
    sys.exit(main())
