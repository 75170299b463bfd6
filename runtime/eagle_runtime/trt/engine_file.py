"""The engine files in a bundle and their sidecar, which describes them and is checked before an engine is loaded:

    engines/<library>-sm86-sm89/target.engine  draft.engine  engine.json

What a library does with a damaged engine, or with one for another version or GPU, is undefined. So such engines are
refused here, with an error that says what differs and which command builds the engines again.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
import typing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from eagle_runtime.base.errors import BackendError, BundleError
from eagle_runtime.base.files import SIDECAR_BYTES, file_sha256, inside, read_json
from eagle_runtime.bundle.manifest import Manifest, TensorSpec
from eagle_runtime.bundle.typed_json import from_json
from eagle_runtime.machine.nvidia import DeviceInfo
from eagle_runtime.trt.fixed_shapes import PAST_STEP, round_up

ENGINES = "engines"  # folder inside a bundle
SIDECAR = "engine.json"
SIDECAR_VERSION = 2


@dataclass(frozen=True, slots=True)
class Profile:
    """The sizes that one set of kernels serves: dimension of the graph -> smallest, tuned for, largest."""

    name: str
    sizes: dict[str, tuple[int, ...]]

    def serves(self, sizes: typing.Mapping[str, int]) -> bool:
        """Returns whether every dimension's size is within its limits."""
        return all(limit[0] <= sizes[name] <= limit[-1] for name, limit in self.sizes.items())


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table that the runtime looks up on the host: the bytes of an array, row by row."""

    file: str
    sha256: str
    size: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine. graph: the files it was built from, path in the bundle -> SHA-256. inputs, outputs: of the graph that
    was made of them. tables: "embedding", and "known" for a head that knows some tokens alone. kernels,
    fused_attention: numbers of kernels and fused attention kernels in a forward pass over a tree, for the first compute
    capability. weights, scratch: bytes of GPU memory of its weights, and of a forward pass of its largest profile. None
    where the library does not report them."""

    file: str
    sha256: str
    size: int
    graph: dict[str, str]
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    tables: dict[str, TableSpec]
    profiles: tuple[Profile, ...]
    kernels: int | None
    fused_attention: int | None
    weights: int | None
    scratch: int | None


@dataclass(frozen=True, slots=True)
class EngineSet:
    """A sidecar: the engines of a bundle. draft, keep: None for a bundle without a head; keep gathers accepted rows.

    compute_capabilities: of the GPUs that they run on. gpu, platform: the only model and system that they run on; None
    for any. context: tokens of prompt and output. weight_streaming: whether the target's weights can stay on the
    host."""

    schema_version: int
    library: str
    library_version: str
    compute_capabilities: tuple[str, ...]
    gpu: str | None
    platform: str | None
    context: int
    weight_streaming: bool
    target: EngineSpec
    draft: EngineSpec | None
    keep: EngineSpec | None

    @property
    def specs(self) -> dict[str, EngineSpec]:
        """ "target" and, where there is a head, "draft" and "keep"."""
        parts = {"target": self.target, "draft": self.draft, "keep": self.keep}
        return {name: spec for name, spec in parts.items() if spec is not None}

    @property
    def models(self) -> dict[str, EngineSpec]:
        """ "target" and, where there is a head, "draft"."""
        return {name: spec for name, spec in self.specs.items() if name != "keep"}

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """Engines that run on this machine."""

    folder: Path
    engines: EngineSet


def find_engines(
    bundle: Path,
    manifest: Manifest,
    library: str,
    version: str,
    device: DeviceInfo,
    context: int,
) -> EngineFolder:
    """Returns the engines of a bundle that this library version runs on this GPU, with their SHA-256 verified.

    manifest: the bundle's, with its hashes verified. context: rows of the caches. Raises BackendError if there are
    none, or BundleError about the engines that pass most checks."""
    sidecars = sorted((bundle / ENGINES).glob(f"{library}-sm*/{SIDECAR}"))
    command = build_command(bundle, library, device.compute_capability, context)
    if not sidecars:
        raise BackendError(f"{bundle} has no engines for {library}; build them: {command}")
    problems: list[tuple[int, BundleError]] = []
    for path in sidecars:
        try:
            engines = read_sidecar(path, command)
        except BundleError as error:
            problems.append((0, error))
            continue
        checks = _differences(path.parent, engines, manifest, version, device, context)
        failed = next(((rank, difference) for rank, difference in enumerate(checks) if difference is not None), None)
        if failed is None:
            return EngineFolder(path.parent, engines)
        problems.append((failed[0], BundleError(f"{path.parent}: {failed[1]}; build the engines again: {command}")))
    raise max(problems, key=lambda problem: problem[0])[1]


def build_command(bundle: Path, library: str, compute_capability: str, context: int) -> str:
    """Returns the command that builds engines for this GPU."""
    capability = f" --compute-capability {compute_capability}" if library == "tensorrt-rtx" else ""
    return f"eagle-export engines {bundle} --backend {library}{capability} --context {context}"


def read_sidecar(path: Path, command: str) -> EngineSet:
    """Returns a sidecar in a bundle's folder of engines. command: the one that writes it, for messages. Raises
    BundleError if it cannot be read or has another schema."""
    again = f"build the engines again: {command}"
    try:
        if not inside(path.parents[2], path):
            raise BundleError(f"{path} leaves the bundle by a link; {again}")
    except OSError as error:  # a loop of links
        raise BundleError(f"{path} cannot be read ({error}); {again}") from None
    data = read_json(path, SIDECAR_BYTES, BundleError, again)
    version = data.get("schema_version")
    if version != SIDECAR_VERSION:
        raise BundleError(f"{path}: schema_version is {version!r}, this runtime reads {SIDECAR_VERSION}; {again}")
    try:
        engines = typing.cast(EngineSet, from_json(EngineSet, data, str(path)))
    except BundleError as error:
        what, _, _ = str(error).partition(";")
        raise BundleError(f"{what}; {again}") from None
    for name, spec in engines.specs.items():
        limits = [limit for item in spec.profiles for limit in item.sizes.values()]
        whole = all(len(limit) == 3 and list(limit) == sorted(limit) for limit in limits)
        if not (whole and (name == "keep" or (limits and all("P" in item.sizes for item in spec.profiles)))):
            raise BundleError(f"{path}: {name}: profiles need three sizes each; {again}")
    return engines


def host_platform() -> str:
    """Returns the system and processor, such as "linux-x86_64", which TensorRT's engines are bound to."""
    return f"{sys.platform}-{platform.machine().lower()}"


def _differences(
    folder: Path,
    engines: EngineSet,
    manifest: Manifest,
    version: str,
    device: DeviceInfo,
    context: int,
) -> typing.Iterator[str | None]:
    """Yields per check what differs, or None; cheap checks come first, the files' hashes last."""
    built = "the engines were built for {}, but this is {}"
    capabilities = ", ".join(engines.compute_capabilities)
    fits = device.compute_capability in engines.compute_capabilities
    here = device.compute_capability
    yield None if fits else f"the engines were built for compute capability {capabilities}, but this GPU has {here}"
    yield None if engines.gpu in (None, device.name) else built.format(engines.gpu, device.name)
    here = host_platform()
    yield None if engines.platform in (None, here) else built.format(engines.platform, here)
    same = engines.library_version == version
    built_by = f"{engines.library} {engines.library_version}"
    pip = f"pip install {engines.library}=={engines.library_version}"
    yield None if same else f"built by {built_by}, but {version} is installed ({pip} runs them as they are)"
    same = set(engines.models) == set(manifest.models) and (engines.draft is None) == (engines.keep is None)
    yield None if same else "the engines are of a bundle with another draft head, or of none"
    for name, spec in engines.models.items():
        folder_of = PurePosixPath(manifest.models[name].graph.file).parent
        graph = {file: digest for file, digest in manifest.files.items() if PurePosixPath(file).parent == folder_of}
        stale = sorted(file for file in {*graph, *spec.graph} if graph.get(file) != spec.graph.get(file))
        yield f"{spec.file} was built from another {stale[0]} than the bundle now has" if stale else None
    for spec in engines.models.values():
        most = min(profile.sizes["P"][-1] for profile in spec.profiles)
        short = most < round_up(context, PAST_STEP)
        too_small = f"{spec.file} serves {most} rows, but the context needs {context}"
        yield f"{too_small} (a context of {engines.context} needs no new engines)" if short else None
    files: dict[str, EngineSpec | TableSpec] = {}
    for spec in engines.specs.values():
        files |= {spec.file: spec, **{table.file: table for table in spec.tables.values()}}
    for each in files.values():
        yield _damage(folder, each)


def _damage(folder: Path, spec: EngineSpec | TableSpec) -> str | None:
    path = folder / spec.file
    if Path(spec.file).name != spec.file or not path.is_file():
        return f"{spec.file} is missing"
    try:
        if not inside(folder, path):
            return f"{spec.file} leaves the folder by a link"
        intact = path.stat().st_size == spec.size and file_sha256(path) == spec.sha256
    except OSError as error:
        return f"{spec.file} cannot be read ({error.strerror})"
    return None if intact else f"{spec.file} does not match its SHA-256 in {SIDECAR}"
