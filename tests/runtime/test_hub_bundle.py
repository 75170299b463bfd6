"""Bundles of the hub by their ids, over a server that speaks its protocol (hub_server.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle_runtime import EagleModel
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
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HOME": str(home), **more}
    for variable in ("HF_HUB_CACHE", "HF_TOKEN", *(() if "HF_HUB_OFFLINE" in more else ("HF_HUB_OFFLINE",))):
        env.pop(variable, None)
    env["HF_ENDPOINT"] = hub.endpoint
    command = [sys.executable, "-c", LOAD, name]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=home, check=True).stdout.strip()


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


def test_what_is_not_a_bundle_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    asked = {
        "me/nothing": "me/nothing is neither a folder here nor a bundle on the hub that you may read",
        "me/model": "me/model has no eagle_config.json, so it is not a bundle",
        "me/pair@v2": "me/pair@v2: there is no such revision",
        "./me/pair": f"{Path('me/pair')} is not a folder",
    }
    for name, problem in asked.items():
        assert problem in (line := said(hub, tmp_path, name)) and "\n" not in line
