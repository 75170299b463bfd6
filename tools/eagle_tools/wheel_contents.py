"""What a wheel of eagle-edge-kernels says and has: the tag of its system, that system's library alone, and of the C
library no version newer than the tag promises."""

from __future__ import annotations

import re
import struct
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from eagle_runtime.base.errors import EagleError

LARGEST = 1_000_000  # bytes of a wheel
GLIBC = (2, 17)  # that of the manylinux2014 tags
# Of a file's header: what it begins with, where its processor is named, and the names.
ELF, MACH = b"\x7fELF\x02\x01", b"\xcf\xfa\xed\xfe"
PROCESSORS = {ELF: {62: "x86_64", 183: "aarch64"}, MACH: {0x01000007: "x86_64", 0x0100000C: "aarch64"}}
OF_PE = {0x8664: "x86_64", 0xAA64: "aarch64"}
# Libraries that every system of a tag has, as lower case: Windows' own C library is in parts.
OF_SYSTEM = re.compile(
    rb"lib[cm]\.so\.6|lib(pthread|dl)\.so\.[02]|ld-linux[\w-]*\.so\.\d|/usr/lib/libsystem\.b\.dylib"
    rb"|(kernel32|ntdll|api-ms-win-crt-[\w-]+)\.dll"
)
LIBRARY = re.compile(rb"(?:/[\w./-]+/)?[\w+-]+(?:\.[\w+-]+)*\.(?:so\.\d+|dll|dylib)", re.IGNORECASE)
OWN = b"eagle_kernels"  # the name that the library has itself


class WheelError(EagleError):
    """A wheel is not what its name says."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Of a library: format, processor, libraries that it names, newest version of glibc that it names."""

    format: str
    processor: str
    needed: frozenset[str]
    glibc: tuple[int, ...]


def contents_of(library: bytes) -> Contents:
    """What a shared library's file says. Names of libraries and versions stand in it as text, so that all that could be
    needed is found, whatever table it stands in. Raises WheelError for what is no such file."""
    kind, processor = "", ""
    if library.startswith(ELF):
        kind, processor = "ELF", PROCESSORS[ELF].get(struct.unpack_from("<H", library, 18)[0], "")
    elif library.startswith(MACH):
        kind, processor = "Mach-O", PROCESSORS[MACH].get(struct.unpack_from("<I", library, 4)[0], "")
    elif library.startswith(b"MZ"):
        (at,) = struct.unpack_from("<I", library, 60)
        if library[at : at + 4] == b"PE\0\0":
            kind, processor = "PE", OF_PE.get(struct.unpack_from("<H", library, at + 4)[0], "")
    if not processor:
        raise WheelError("the library is for no system that is known")
    found = {name.lower() for name in LIBRARY.findall(library) if not name.startswith(OWN)}
    versions = [tuple(map(int, version.split(b"."))) for version in re.findall(rb"GLIBC_([\d.]+\d)", library)]
    return Contents(kind, processor, frozenset(map(bytes.decode, found)), max(versions, default=()))


def check_wheel(wheel: Path, tag: str, processor: str, suffix: str) -> Contents:
    """Returns what the library of a wheel has. tag, processor, suffix: as of kernel_wheels.System. Raises
    WheelError."""

    def refuse(why: str) -> WheelError:
        return WheelError(f"{wheel.name} {why}; see tools/eagle_tools/kernel_wheels.py")

    if not wheel.name.endswith(f"-py3-none-{tag}.whl"):
        raise refuse(f"is not named for {tag}")
    if wheel.stat().st_size > LARGEST:
        raise refuse(f"has {wheel.stat().st_size} bytes, more than {LARGEST}")
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        (described,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        fields = Parser().parsestr(files.read(described).decode())
        if fields.get_all("Tag") != [f"py3-none-{tag}"] or fields["Root-Is-Purelib"] != "false":
            raise refuse(f"says tags {fields.get_all('Tag')} and Root-Is-Purelib {fields['Root-Is-Purelib']}")
        libraries = [name for name in names if re.search(r"\.(so|dll|dylib|pyd|lib|a|pdb)$", name)]
        if libraries != [f"eagle_edge_kernels/eagle_kernels{suffix}"]:
            raise refuse(f"has the libraries {', '.join(libraries) or 'none'}")
        found = contents_of(files.read(libraries[0]))
    formats = {"ELF": "manylinux", "Mach-O": "macosx", "PE": "win"}
    if found.processor != processor or not tag.startswith(formats[found.format]):
        raise refuse(f"has a library in {found.format} for {found.processor}")
    if found.glibc > GLIBC:
        raise refuse(f"needs glibc {'.'.join(map(str, found.glibc))}, and its tag promises {'.'.join(map(str, GLIBC))}")
    if other := sorted(name for name in found.needed if not OF_SYSTEM.fullmatch(name.encode())):
        raise refuse(f"names libraries that its system may lack: {', '.join(other)}")
    return found
