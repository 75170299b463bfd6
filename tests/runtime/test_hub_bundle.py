"""Bundles of the hub by their ids, over a server that speaks its protocol (hub_server.py)."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest

from eagle_runtime import EagleModel
from eagle_runtime.opening import hub_bundle
from hub_server import Hub, commit_of, serving
from systems import needs_links

LOAD = """
import sys
from eagle_runtime import EagleError, EagleModel
try:
    with EagleModel.load(sys.argv[1], backend="cpu", threads=1) as model:
        print(*model.generate([5, 6, 7], max_new_tokens=8, temperature=0).token_ids)
except EagleError as error:
    print(error)
"""


@pytest.fixture
def hub(bundle_of: Callable[..., Path], tmp_path: Path) -> Iterator[Hub]:
    bundle, other = shutil.copytree(bundle_of("eagle1"), tmp_path / "bundle"), tmp_path / "other"
    (bundle / "engines").mkdir()
    (bundle / "engines" / "target.engine").write_bytes(b"code")
    other.mkdir()
    (other / "config.json").write_text("{}")
    models = {"me/pair": {"main": bundle, "v1": bundle}, "me/model": {"main": other}}
    with serving(Hub(models=models)) as served:
        yield served


def said(hub: Hub, home: Path, name: str, **more: str) -> str:
    """What a new process prints that loads this bundle, as a user of the hub with a cache in `home`."""
    return loaded(hub, home, name, **more).stdout.strip()


def loaded(hub: Hub, home: Path, name: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HOME": str(home), **more}
    for variable in ("HF_HUB_CACHE", "HF_TOKEN", *(() if "HF_HUB_OFFLINE" in more else ("HF_HUB_OFFLINE",))):
        env.pop(variable, None)
    env["HF_ENDPOINT"] = hub.endpoint
    command = [sys.executable, "-c", LOAD, name]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=home, check=True)


@needs_links
def test_a_bundle_is_downloaded_once_and_decodes(hub: Hub, bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    with EagleModel.load(bundle_of("eagle1"), backend="cpu", threads=1) as model:
        wanted = " ".join(map(str, model.generate([5, 6, 7], max_new_tokens=8, temperature=0).token_ids))
    home = tmp_path / "home"
    home.mkdir()
    assert said(hub, home, "me/pair@v1") == wanted
    sent = hub.served.copy()
    assert sent["target/model.onnx.data"] > 0 and not any("engine" in file for file in sent)
    assert said(hub, home, f"me/pair@{commit_of(hub.models['me/pair']['main'])}") == wanted
    assert hub.served == sent
    assert said(hub, home, "me/pair@v1", HF_HUB_OFFLINE="1") == wanted


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_hub_that_is_not_there_is_given_up_soon(tmp_path: Path) -> None:
    """Without the half minute of huggingface_hub's tries, which it tells of."""
    done = loaded(Hub(endpoint=f"http://127.0.0.1:{closed_port()}"), tmp_path, "me/pair")
    assert done.stdout.startswith("me/pair is not a folder here, and the hub does not give it (")
    assert done.stdout.endswith("check name and network, and try again\n") and "Retrying" not in done.stderr


def test_a_hub_that_comes_meanwhile_is_taken(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, stack = closed_port(), contextlib.ExitStack()
    template = f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda _: stack.enter_context(serving(hub, port)))
    with stack:
        hub_bundle._reach("me/pair", None)
    assert hub.requests == ["HEAD /me/pair/resolve/main/eagle_config.json"]


def test_what_is_not_a_bundle_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    asked = {
        "me/nothing": "me/nothing is neither a folder here nor a bundle on the hub that you may read",
        "me/model": "me/model has no eagle_config.json, so it is not a bundle",
        "me/pair@v2": "me/pair@v2: there is no such revision",
        "./me/pair": f"{Path('me/pair')} is not a folder",
    }
    for name, problem in asked.items():
        assert problem in (line := said(hub, tmp_path, name)) and "\n" not in line
