"""Ready bundles on the Hugging Face Hub, by their ids: OWNER/NAME, or OWNER/NAME@REVISION.

huggingface_hub (extra hub) does all of the talking, so logins, its cache, HF_ENDPOINT and HF_HUB_OFFLINE are as for its
other users. It is imported, and asked, only for an argument that is not here and looks like an id. Only the manifest
and the files that it lists are downloaded, and no engine files, which are code. Their hashes are compared when the
bundle is loaded, as those of any bundle.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.errors import BundleError, first_line
from eagle_runtime.base.files import MANIFEST_BYTES, read_json
from eagle_runtime.bundle.manifest import MANIFEST_NAME

ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
EXTRA = "a bundle of the hub needs huggingface_hub; pip install 'eagle-edge[hub]'"
# Seconds for which a hub that refuses connections is asked, and between two times; chosen, as what somebody waits for.
REACH_S, PAUSE_S = 2.0, 0.5
log = logging.getLogger(__name__)


def bundle_folder(bundle: str | Path) -> Path:
    """Returns the folder of a bundle. What an id names is downloaded into huggingface_hub's cache, unless it is there;
    a download that was cut goes on. Raises BundleError."""
    match = ID.fullmatch(bundle) if isinstance(bundle, str) else None
    if match is None or Path(bundle).exists():
        return Path(bundle)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    name, revision = match["name"], match["revision"]
    with _errors(str(bundle)):
        from huggingface_hub import hf_hub_download

        _reach(name, revision)
        folder = Path(hf_hub_download(name, MANIFEST_NAME, revision=revision)).parent  # named by its commit
        for file in _listed(folder / MANIFEST_NAME):
            hf_hub_download(name, file, revision=folder.name)
    log.info("%s is the bundle at commit %s, in %s", bundle, folder.name, folder)
    return folder


def _reach(name: str, revision: str | None) -> None:
    """Asks the hub for a manifest that is not in the cache, for REACH_S seconds where it refuses the connection. Raises
    the errors of huggingface_hub, whose downloads try for half a minute before they say that there is no network."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    cached = try_to_load_from_cache(name, MANIFEST_NAME, revision=revision)
    if constants.HF_HUB_OFFLINE or isinstance(cached, str):
        return
    url, end = hf_hub_url(name, MANIFEST_NAME, revision=revision), time.monotonic() + REACH_S
    while True:
        try:
            get_hf_file_metadata(url)
        except Exception as error:
            if type(error).__name__ != "ConnectError" or time.monotonic() > end:
                raise
            time.sleep(PAUSE_S)
        else:
            return


def _listed(manifest: Path) -> list[str]:
    """The files that a manifest lists, which is read in full when they are there. Raises BundleError."""
    files = read_json(manifest, MANIFEST_BYTES, BundleError, "export the bundle again").get("files")
    if not isinstance(files, dict):
        raise BundleError(
            f"{manifest}: files is {short_repr(files)}, which is not a JSON object; export the bundle again"
        )
    wrong = [file for file in files if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts]
    if wrong:
        raise BundleError(f"{manifest}: file path {short_repr(wrong[0])} leaves the bundle; do not use it")
    return list(files)


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Turns what huggingface_hub and the network raise into BundleErrors of one sentence."""
    try:
        yield
    except BundleError:
        raise
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        raise BundleError(f"{name} is not a folder here, and {EXTRA}") from None
    except Exception as error:
        kind = type(error).__name__
        if kind in ("RepositoryNotFoundError", "GatedRepoError"):
            problem = "is neither a folder here nor a bundle on the hub that you may read: check the name, or log in"
            raise BundleError(f"{name} {problem} with `hf auth login`") from None
        if kind in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
            raise BundleError(f"{name} has no {MANIFEST_NAME}, so it is not a bundle; export it first") from None
        if kind == "RevisionNotFoundError":
            raise BundleError(f"{name}: there is no such revision; give a branch, a tag or a commit") from None
        if not type(error).__module__.startswith(("huggingface_hub", "httpx")) and not isinstance(error, OSError):
            raise
        raise BundleError(
            f"{name} is not a folder here, and the hub does not give it ({first_line(error)}); check name and network, "
            "and try again"
        ) from None
