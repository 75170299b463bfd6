"""Models on the Hugging Face Hub: which files of one are needed, their headers by ranged reads, and their download; and
the upload of finished bundles, which are loaded from there by their ids.

huggingface_hub does all of the talking: tokens, caches, resumed downloads and HF_ENDPOINT are as for its other users.
It is asked for nothing unless a model is named by its id. Code, and pickled weights of a target, are never downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import (
    ADAPTER,
    HEAD_FILES,
    INDEX,
    MASK_FILE,
    PICKLED_FILES,
    PROCESSOR_TEMPLATE,
    SINGLE,
    TEXT_FILES,
    Checkpoint,
    open_checkpoint,
    other_content,
    read_json,
)
from eagle_export.reading.stored_tensors import StoredTensor
from eagle_runtime.base.errors import first_line
from eagle_runtime.bundle.manifest import MANIFEST_NAME, read_manifest

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
GGUF, PICKLED_ENDINGS = ".gguf", (".bin", ".pt", ".pth")
Known = Callable[[Path, Path], None]  # called with a name for errors and the path of a config.json
QUIET = ("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_UPDATE_CHECK")


@dataclass(frozen=True, slots=True)
class HubId:
    """OWNER/NAME, and the branch, tag or commit that was asked for."""

    name: str
    revision: str | None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model at one commit. files: name -> bytes. weights: those of its files that hold tensors. cached: its folder in
    huggingface_hub's cache, if the hub was not asked."""

    id: HubId
    commit: str
    files: Mapping[str, int]
    weights: tuple[str, ...]
    cached: Path | None = None


def hub_id(argument: str) -> HubId | None:
    """Returns the id that an argument is, None for what exists here, and for what is not an OWNER/NAME[@REVISION]."""
    match = ID.fullmatch(argument)
    if match is None or Path(argument).exists() or argument.endswith(".gguf"):
        return None
    return HubId(match["name"], match["revision"])


def look_up(name: HubId, *, pickled: bool = False, known: Known | None = None) -> HubModel:
    """Asks the hub for a model's commit and files; with HF_HUB_OFFLINE, takes what is in huggingface_hub's cache.
    pickled: whether pickled weights are taken where there is no safetensors file. known: raises ExportError for a
    config.json whose model could not be read in any file; called where there is no safetensors file. Raises
    ExportError."""
    api = _api()
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _cached(api, name, pickled, known)
    with _errors(name):
        info = api.model_info(name.name, revision=name.revision, files_metadata=True)
        files = {each.rfilename: each.size or 0 for each in info.siblings or ()}
        commit = str(info.sha)
    if "config.json" not in files:
        other = None if pickled else _other_content(name, files)
        raise ExportError(other or f"{name}: config.json is missing; give a model in the format of transformers")
    return HubModel(name, commit, files, _weights(api, name, commit, files, pickled, known))


def _cached(api: HfApi, name: HubId, pickled: bool, known: Known | None) -> HubModel:
    with _errors(name):
        # What every download of this module has, if it is there.
        patterns = ["config.json", "model*.safetensors", INDEX, *HEAD_FILES]
        folder = Path(
            api.snapshot_download(name.name, revision=name.revision, local_files_only=True, allow_patterns=patterns)
        )
    files = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    if "config.json" not in files or not any(each in files for each in (SINGLE, INDEX, *HEAD_FILES, *PICKLED_FILES)):
        raise ExportError(
            f"{name}: only a part of the model is in the cache, and HF_HUB_OFFLINE forbids asking the hub for the rest"
        )
    return HubModel(name, folder.name, files, _weights(api, name, folder.name, files, pickled, known), folder)


def open_headers(model: HubModel) -> Checkpoint:
    """Returns config and headers of tensors, by ranged reads. Paths begin with the model's id. Raises ExportError."""
    from huggingface_hub import HfFileSystem

    from eagle_export.reading.pickled import pickled_tensors

    api, where = _api(), Path(str(model.id))
    if model.cached is not None and not set(model.weights) & set(PICKLED_FILES):
        return replace(open_checkpoint(model.cached), folder=where)
    config = read_json(_small_file(api, model.id, model.commit, "config.json"))
    tensors: dict[str, StoredTensor] = {}
    with _errors(model.id):
        for name in model.weights:
            if name in PICKLED_FILES:
                system = HfFileSystem(endpoint=api.endpoint, token=api.token)
                remote = f"{model.id.name}@{model.commit}/{name}"
                cached = None if model.cached is None else model.cached / name
                with system.open(remote, block_size=1 << 16) if cached is None else cached.open("rb") as file:
                    tensors |= pickled_tensors(file, where / name)
                continue
            header = api.parse_safetensors_file_metadata(model.id.name, name, revision=model.commit)
            for tensor, each in header.tensors.items():
                tensors[tensor] = StoredTensor(tensor, where / name, tuple(each.shape), str(each.dtype))
    return Checkpoint(where, config, tensors)


def download(model: HubModel, *, texts: bool) -> Path:
    """Downloads what an export reads into huggingface_hub's cache, unless it is there. texts: whether the tokenizer's
    files are among that. Returns the folder. Raises ExportError; an interrupted download is resumed by the next one."""
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache

    if model.cached is not None:
        return model.cached
    names = ["config.json", *model.weights, *([INDEX] if INDEX in model.files and SINGLE not in model.weights else [])]
    others = (*TEXT_FILES, PROCESSOR_TEMPLATE, MASK_FILE) if texts else (MASK_FILE,)
    names += [name for name in others if name in model.files]
    missing = [
        name
        for name in names
        if not isinstance(try_to_load_from_cache(model.id.name, name, revision=model.commit), str)
    ]
    size = sum(model.files[name] for name in missing)
    cache = Path(constants.HF_HUB_CACHE)
    if missing:
        _check_space(cache, size, model)
        print(f"eagle-export: downloading {size / 1e6:.1f} MB of {model.id} at {model.commit[:12]}", file=sys.stderr)
    with _errors(model.id):
        # By the revision's name, so that the cache knows it without a network.
        folder = Path(snapshot_download(model.id.name, revision=model.id.revision, allow_patterns=names))
    if folder.name != model.commit:
        raise ExportError(f"{model.id} was changed while it was downloaded; try again")
    return folder


def go_offline() -> None:
    """Lets no library of this process fetch anything from here on."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    constants: Any = sys.modules.get("huggingface_hub.constants")
    if constants is not None:  # it has read the environment already
        constants.HF_HUB_OFFLINE = True


def _api() -> HfApi:
    for name in QUIET:
        os.environ.setdefault(name, "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ExportError("models of the hub need huggingface_hub; pip install 'eagle-edge[export]'") from None
    return HfApi()


def _weights(
    api: HfApi, name: HubId, commit: str, files: Mapping[str, int], pickled: bool, known: Known | None
) -> tuple[str, ...]:
    """The files with the tensors."""
    if SINGLE in files:
        return (SINGLE,)
    if INDEX in files:
        shards = read_json(_small_file(api, name, commit, INDEX)).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(each, str) for each in shards.values()):
            raise ExportError(f"{name}/{INDEX} has no weight_map; the model is incomplete")
        wanted = tuple(sorted(set(shards.values())))
        if lost := [each for each in wanted if each not in files]:
            raise ExportError(f"{name}: {lost[0]} is missing, which its index names; the model is incomplete")
        return wanted
    if single := [each for each in (*HEAD_FILES, *(PICKLED_FILES if pickled else ())) if each in files]:
        return (single[0],)
    if not pickled:
        if (other := _other_content(name, files)) is not None:
            raise ExportError(other)
        if known is not None:  # else no file would help
            known(Path(str(name)), _small_file(api, name, commit, "config.json"))
    if any(each.endswith(PICKLED_ENDINGS) for each in files):
        raise ExportError(
            f"{name} has no safetensors file, only pickled weights, which are not downloaded; give a model or a "
            "revision with safetensors"
        )
    raise ExportError(f"{name} has no {SINGLE}; give a model in the format of transformers")


def _other_content(name: HubId, files: Mapping[str, int]) -> str | None:
    """What a model without config.json or safetensors file holds instead, in a sentence for an error; None if nothing
    that is known, or pickled weights."""
    if ADAPTER not in files and any(each.endswith(GGUF) for each in files):
        # Neither projectors of images nor the parts of a file.
        whole = [each for each in files if each.endswith(GGUF) and not re.search(r"mmproj|-of-\d+\.gguf$", each)]
        good = [each for each in whole if "q8_0" in each.lower()] or whole
        file = max(good, key=files.__getitem__, default="FILE")
        return (
            f"{name} holds GGUF files; download one (`hf download {name.name} {file} --local-dir .`) and give "
            f"{file} in place of the id"
        )
    beside = any(each.endswith(PICKLED_ENDINGS) for each in files)  # weights, which graphs next to them are made of
    return other_content(name, [each for each in files if each == ADAPTER or not beside])


def _small_file(api: HfApi, name: HubId, commit: str, file: str) -> Path:
    with _errors(name):
        return Path(api.hf_hub_download(name.name, file, revision=commit))


def _check_space(cache: Path, size: int, model: HubModel) -> None:
    existing = next(each for each in (cache, *cache.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise ExportError(
            f"{cache} has {free / 1e6:.0f} MB free, but {model.id} takes {size / 1e6:.0f} MB; free space, or set "
            "HF_HOME to a folder on another disk"
        )


@contextmanager
def _errors(name: HubId) -> Iterator[None]:
    """Turns the errors of huggingface_hub, and of the network, into ExportErrors of one sentence."""
    from huggingface_hub import errors

    try:
        yield
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError):
        raise ExportError(
            f"{name} is not a folder here and not in the hub's cache, and the hub is not asked (HF_HUB_OFFLINE) or "
            "does not answer; check the name, or connect"
        ) from None
    except errors.GatedRepoError:
        raise ExportError(
            f"{name} is gated: accept its licence on its page on the hub, and log in with `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise ExportError(f"{name}: the model has no revision {name.revision or 'main'!r}") from None
    except errors.RepositoryNotFoundError:
        raise ExportError(
            f"{name} is neither a folder here nor a model on the hub, or it is private: check the name, or log in with "
            "`hf auth login`"
        ) from None
    except errors.EntryNotFoundError as error:
        raise ExportError(f"{name}: a file of the model is missing ({first_line(error)})") from None
    except errors.SafetensorsParsingError as error:
        raise ExportError(f"{name}: the header of its weights is damaged ({first_line(error)})") from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise ExportError(f"{name}: the hub did not answer as it should ({first_line(error)}); try again") from None
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):
            raise
        raise ExportError(f"{name}: the hub cannot be reached ({type(error).__name__}); try again") from None


def make_repository(name: str) -> None:
    """Makes OWNER/NAME on the hub, private, unless it is there. Raises ExportError, before an export has begun."""
    if (match := ID.fullmatch(name)) is None or match["revision"]:
        raise ExportError(f"--push {name!r} is not a name on the hub; give OWNER/NAME")
    with _write_errors(name):
        _api().create_repo(name, private=True, exist_ok=True)


def push(bundle: Path, name: str) -> str:
    """Uploads a bundle to OWNER/NAME: the manifest and the files that it lists, no engines. Returns the commit. Raises
    ExportError; the bundle stays where it is."""
    files = [MANIFEST_NAME, *read_manifest(bundle).files]
    with _write_errors(name):
        from huggingface_hub import constants

        constants.HF_HUB_OFFLINE = False  # an export forbids downloads; make_repository has reached the hub
        return str(_api().upload_folder(repo_id=name, folder_path=bundle, allow_patterns=files).oid)


@contextmanager
def _write_errors(name: str) -> Iterator[None]:
    """Turns what huggingface_hub and the network raise into ExportErrors of one sentence."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("huggingface_hub", "httpx")) and not isinstance(error, OSError):
            raise
        raise ExportError(
            f"{name} cannot be written on the hub ({first_line(error)}); log in with `hf auth login`, or check the name"
        ) from None
