"""Models on the Hugging Face Hub: which files of one are needed, their headers by ranged reads, and their download.

huggingface_hub does all of the talking: tokens, caches, resumed downloads and HF_ENDPOINT are as for its other users.
It is asked for nothing unless a model is named by its id. Code, and pickled weights of a target, are never downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_export.checkpoint import PYTORCH, Checkpoint, StoredTensor, read_json
from eagle_export.errors import ExportError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
COMMIT = re.compile(r"[0-9a-f]{40}")
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
    """A model at one commit. files: name -> bytes. weights: those of its files that hold tensors."""

    id: HubId
    commit: str
    files: Mapping[str, int]
    weights: tuple[str, ...]


def hub_id(argument: str) -> HubId | None:
    """Returns the id that an argument is, None for what exists here, and for what is no OWNER/NAME[@REVISION]."""
    match = ID.fullmatch(argument)
    if match is None or Path(argument).exists() or argument.endswith(".gguf"):
        return None
    return HubId(match["name"], match["revision"])


def look_up(name: HubId, *, pickled: bool = False) -> HubModel:
    """Asks the hub for a model's commit and files; offline, takes what is in huggingface_hub's cache. pickled: whether
    pytorch_model.bin is taken where there is no safetensors file. Raises ExportError."""
    api = _api()
    with _errors(name):
        info = api.model_info(name.name, revision=name.revision, files_metadata=True)
        files = {each.rfilename: each.size or 0 for each in info.siblings or ()}
        commit = str(info.sha)
    if "config.json" not in files:
        raise ExportError(f"{name}: config.json is missing; give a model in the format of transformers")
    return HubModel(name, commit, files, _weights(api, name, commit, files, pickled))


def open_headers(model: HubModel) -> Checkpoint:
    """Returns the model's config, and its tensors without their values, by ranged reads. Paths in it begin with the
    model's id. Raises ExportError."""
    from huggingface_hub import HfFileSystem

    from eagle_export.inspection.pickled import pickled_tensors

    api, where = _api(), Path(str(model.id))
    config = read_json(_small_file(api, model.id, model.commit, "config.json"))
    tensors: dict[str, StoredTensor] = {}
    with _errors(model.id):
        for name in model.weights:
            if name == PYTORCH:
                system = HfFileSystem(endpoint=api.endpoint, token=api.token)
                with system.open(f"{model.id.name}@{model.commit}/{name}", block_size=1 << 16) as file:
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

    names = ["config.json", *model.weights, *([INDEX] if INDEX in model.files and SINGLE not in model.weights else [])]
    names += [name for name in TEXTS if texts and name in model.files]
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
        return Path(snapshot_download(model.id.name, revision=model.commit, allow_patterns=names))


def local_folder(argument: str, *, role: str, sources: dict[str, str]) -> Path:
    """Returns the folder that an argument of a command names: itself, or that of a hub id, downloaded. role: "target"
    or "draft"; the id and its commit go into `sources`. Raises ExportError."""
    name = hub_id(argument)
    if name is None:
        return Path(argument)
    model = look_up(name, pickled=role == "draft")
    sources[f"{role}: {name.name}"] = model.commit
    return download(model, texts=role == "target")


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


def _weights(api: HfApi, name: HubId, commit: str, files: Mapping[str, int], pickled: bool) -> tuple[str, ...]:
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
    if pickled and PYTORCH in files:
        return (PYTORCH,)
    if any(each.endswith((".bin", ".pt", ".pth")) for each in files):
        raise ExportError(
            f"{name} has no safetensors file, only pickled weights, which are not downloaded; give a model or a "
            "revision with safetensors"
        )
    raise ExportError(f"{name} has no {SINGLE}; give a model in the format of transformers")


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
    except errors.GatedRepoError:
        raise ExportError(
            f"{name} is gated: accept its licence on its page on the hub, and log in with `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise ExportError(f"{name}: the model has no revision {name.revision or 'main'!r}") from None
    except errors.RepositoryNotFoundError:
        raise ExportError(
            f"{name} is no folder here and no model on the hub, or it is private: check the name, or log in with "
            "`hf auth login`"
        ) from None
    except errors.EntryNotFoundError as error:
        raise ExportError(f"{name}: a file of the model is missing ({_first_line(error)})") from None
    except errors.SafetensorsParsingError as error:
        raise ExportError(f"{name}: the header of its weights is damaged ({_first_line(error)})") from None
    except errors.OfflineModeIsEnabled:
        raise ExportError(
            f"{name} is no folder here, and HF_HUB_OFFLINE forbids asking the hub; download it first, or unset that"
        ) from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise ExportError(f"{name}: the hub did not answer as it should ({_first_line(error)}); try again") from None
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):
            raise
        raise ExportError(f"{name}: the hub cannot be reached ({type(error).__name__}); try again") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
