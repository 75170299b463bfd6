"""Models of the hub, over a server that speaks its protocol (hub_server.py): what is downloaded, and what is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import GOLDEN
from eagle_export.base.errors import ExportError
from eagle_export.reading.hub import HubId, HubModel, download, hub_id
from eagle_runtime.bundle.manifest import read_manifest
from hub_server import Hub, commit_of, serving
from mtp_writers import mimo, random_layer, read_folder
from systems import links_work, read_tensors

DEMO = Path(__file__).parents[2] / "tools" / "demo_pair"


@dataclass
class Shell:
    """Runs eagle-export in new processes, as a user of this hub with an empty cache of his own."""

    hub: Hub
    home: Path
    more: dict[str, str]

    def run(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        """Returns what is printed on stdout and stderr."""
        return self._run([sys.executable, "-m", "eagle_export.commands.cli", *arguments], status)

    def _run(self, command: list[str], status: int) -> tuple[str, str]:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "HF_HOME": str(self.home),
        }
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
            env.pop(name, None)
        if not links_work():  # Windows may make links that it does not follow, by which huggingface_hub is misled
            env["HF_HUB_DISABLE_SYMLINKS"] = "1"
        env |= {"HF_ENDPOINT": self.hub.endpoint, **self.more}
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=self.home)
        assert done.returncode == status, done.stderr
        return done.stdout, done.stderr

    def python(self, code: str) -> str:
        """Runs code with the names of eagle_export.reading.hub in a new process. Returns what it prints."""
        return self._run([sys.executable, "-c", f"from eagle_export.reading.hub import *\n{code}"], 0)[0].strip()

    def refusal(self, *arguments: str) -> str:
        """The error, which must be one line, of a command that fails."""
        _, err = self.run(*arguments, status=2)
        (line,) = err.strip().splitlines()
        return line.removeprefix("eagle-export").removeprefix(" inspect").removeprefix(": ")


def sharded(folder: Path) -> Path:
    """The golden target in two shards with an index, next to files that no export needs."""
    shutil.copytree(GOLDEN / "target", folder)
    tensors = read_tensors(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "modeling_acme.py").write_text("raise SystemExit('code of a checkpoint was run')")
    (folder / "pytorch_model.bin").write_bytes(b"x" * 1000)
    (folder / "consolidated.safetensors").write_bytes(b"x" * 1000)
    return folder


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    pickled, broken = tmp_path / "pickled", tmp_path / "broken"
    for folder in (pickled, broken):
        folder.mkdir()
        shutil.copy(GOLDEN / "head_eagle1" / "config.json", folder)
    torch.save(load_file(GOLDEN / "head_eagle1" / "model.safetensors"), pickled / "pytorch_model.bin")
    (broken / "README.md").write_text("no weights")
    damaged = shutil.copytree(GOLDEN / "target", tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"<html>not found</html>" * 10)
    gguf, adapter, opt = tmp_path / "gguf", tmp_path / "adapter", tmp_path / "opt"
    for folder, names in {
        gguf: ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-Q8_0.gguf"),
        adapter: ("adapter_config.json", "adapter_model.safetensors"),
        opt: ("config.json", "pytorch_model.bin"),
    }.items():
        folder.mkdir()
        for name in names:
            (folder / name).write_text('{"model_type": "opt"}')
    layer = random_layer(read_folder(GOLDEN / "target")[1])
    models = {
        "acme/target": {"main": sharded(tmp_path / "target"), "v1": GOLDEN / "target"},
        "acme/eagle1": {"main": GOLDEN / "head_eagle1"},
        "acme/pickled": {"main": pickled},
        "acme/broken": {"main": broken},
        "acme/damaged": {"main": damaged},
        "acme/gguf": {"main": gguf},
        "acme/adapter": {"main": adapter},
        "acme/opt": {"main": opt},
        "acme/demo": {"main": DEMO / "target"},
        "acme/gated": {"main": DEMO / "target"},
        "acme/mimo": {"main": mimo(GOLDEN / "target", layer, tmp_path / "mimo")},
    }
    home = tmp_path / "home"
    home.mkdir()
    with serving(Hub(models, gated={"acme/gated"})) as hub:
        yield Shell(hub, home, {})


@pytest.mark.parametrize(
    ("argument", "id"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", HubId("meta-llama/Llama-3.1-8B-Instruct", None)),
        ("Qwen/Qwen3-8B@refs/pr/3", HubId("Qwen/Qwen3-8B", "refs/pr/3")),
        ("./owner/name", None),
        ("../name", None),
        ("/owner/name", None),
        ("name", None),
        ("a/b/c", None),
        ("models/gemma-q4_0.gguf", None),
        ("tests/golden", None),  # a folder of that name is here
    ],
)
def test_what_is_an_id(argument: str, id: HubId | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN.parents[1])
    assert hub_id(argument) == id


def test_inspect_reads_headers_alone(shell: Shell) -> None:
    out, _ = shell.run("inspect", "acme/demo", "acme/eagle1", "--json")
    report, served = json.loads(out), shell.hub.served
    assert report["target"]["commit"] == commit_of(DEMO / "target") and not report["head"]["matches"]
    # The target's weights take 11 MB, of which huggingface_hub asks for the first 100 kB; the head's are smaller.
    head = (GOLDEN / "head_eagle1" / "model.safetensors").stat().st_size
    assert served["model.safetensors"] <= 100_001 + min(head, 100_001)
    assert set(served) == {"model.safetensors", "config.json"}
    assert shell.hub.ranges["model.safetensors"] == ["bytes=0-100000"] * 2


def test_inspect_of_shards_and_a_pickled_head(shell: Shell) -> None:
    out, _ = shell.run("inspect", "acme/target", "acme/pickled", "--json")
    report = json.loads(out)
    assert report["exportable"] and report["head"]["kind"] == "eagle1" and report["target"]["family"] == "Llama"
    assert (
        shell.hub.served["pytorch_model.bin"] > 0
    )  # the head's description; the target's file of that name is not read
    assert not any("acme/target" in each and "pytorch_model" in each for each in shell.hub.requests)


def test_a_pair_is_downloaded_and_exported(shell: Shell, tmp_path: Path) -> None:
    out, err = shell.run("acme/target", "acme/eagle1", "-o", str(tmp_path / "pair"))
    assert "eagle1 head, fp32" in out and "downloading 1.5 MB of acme/target at " in err
    tools = read_manifest(tmp_path / "pair").tools
    assert tools["target: acme/target"] == commit_of(tmp_path / "target")
    assert tools["draft: acme/eagle1"] == commit_of(GOLDEN / "head_eagle1")
    asked = " ".join(shell.hub.requests)
    assert not any(
        name in asked for name in ("modeling_acme.py", "pytorch_model.bin", "consolidated", "special_tokens")
    )
    assert shell.hub.requests[-1].endswith("model.safetensors")  # nothing is asked for after the last download

    shell.hub.requests.clear()
    shell.more["HF_HUB_OFFLINE"] = "1"
    shell.run("acme/target", "acme/eagle1", "-o", str(tmp_path / "offline"), "--no-certificate")
    assert not shell.hub.requests
    assert read_manifest(tmp_path / "offline").tools["target: acme/target"] == commit_of(tmp_path / "target")


DOWNLOAD = "print(download(look_up(HubId(*{id!r})), texts=True))"


def test_the_revision_is_the_one_that_was_asked_for(shell: Shell) -> None:
    folder = Path(shell.python(DOWNLOAD.format(id=("acme/target", "v1"))))
    assert folder.name == commit_of(GOLDEN / "target") and (folder / "model.safetensors").is_file()
    assert "model-00001-of-00002.safetensors" not in shell.hub.served


def test_a_cut_connection_is_resumed(shell: Shell) -> None:
    """huggingface_hub writes pieces of 10 MiB, and asks for what is missing after the last whole one."""
    file, piece = DEMO / "target" / "model.safetensors", 10 << 20
    shell.hub.cut[file.name] = piece + 70_000
    folder = Path(shell.python(DOWNLOAD.format(id=("acme/demo", None))))
    assert (folder / file.name).read_bytes() == file.read_bytes()
    assert shell.hub.served[file.name] == file.stat().st_size + 70_000
    assert shell.hub.ranges[file.name] == [f"bytes={piece}-"]


def test_a_failed_download_keeps_the_files_that_are_whole(shell: Shell, tmp_path: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    size = (tmp_path / "target" / first).stat().st_size
    shell.hub.absent.add(second)
    refused = "try:\n    download(look_up(HubId('acme/target', None)), texts=True)\nexcept ExportError as e: print(e)"
    assert shell.python(refused).startswith("acme/target: the hub did not answer as it should")
    assert shell.hub.served[first] == size
    shell.hub.absent.clear()
    assert (Path(shell.python(DOWNLOAD.format(id=("acme/target", None)))) / second).is_file()
    assert shell.hub.served[first] == size  # not again


def test_a_pair_that_does_not_match_is_refused_before_the_download(shell: Shell, tmp_path: Path) -> None:
    line = shell.refusal("acme/demo", "acme/eagle1", "-o", str(tmp_path / "pair"))
    assert "the head's vocabulary has 256 tokens, the target's 4096" in line and "no weights were downloaded" in line
    assert shell.hub.served["model.safetensors"] <= 200_002


def test_a_destination_that_is_taken_is_refused_before_the_download(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    assert "holds other files" in shell.refusal("acme/demo", "-o", str(tmp_path / "mine"))
    assert not shell.hub.served


ERRORS = {
    "acme/nothing": "acme/nothing is neither a folder here nor a model on the hub, or it is private",
    "acme/gated": "acme/gated is gated: accept its licence on its page on the hub, and log in",
    "acme/demo@v9": "acme/demo@v9: the model has no revision 'v9'",
    "acme/broken": "acme/broken has no model.safetensors",
    "acme/damaged": "acme/damaged: the header of its weights is damaged",
    "acme/pickled": "acme/pickled has no safetensors file, only pickled weights, which are not downloaded",
    "acme/gguf": "acme/gguf holds GGUF files; download one (`hf download acme/gguf m-Q8_0.gguf --local-dir .`) and",
    "acme/adapter": "acme/adapter holds an adapter without its model; merge it into the model (PEFT: merge_and_unload(",
    "acme/opt": "acme/opt/config.json: model_type is 'opt', but only 'llama'",
}


def test_errors_are_one_sentence(shell: Shell) -> None:
    """One process asks for all, after the command itself for one of them."""
    (first, sentence), *_ = ERRORS.items()
    assert sentence in shell.refusal("inspect", first)
    statuses = (
        f"from eagle_export.commands.cli import main\nprint([main(['inspect', name]) for name in {list(ERRORS)}])"
    )
    out, err = shell._run([sys.executable, "-c", statuses], 0)
    lines = err.strip().splitlines()
    assert out.strip() == str([2] * len(ERRORS)) and len(lines) == len(ERRORS)
    for line, why in zip(lines, ERRORS.values(), strict=True):
        assert why in line


def test_without_a_network(shell: Shell) -> None:
    shell.more["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nothing listens there
    assert "acme/demo: the hub cannot be reached" in shell.refusal("inspect", "acme/demo")
    shell.more["HF_HUB_OFFLINE"] = "1"
    assert "not in the hub's cache, and the hub is not asked" in shell.refusal("inspect", "acme/demo")


def test_a_local_folder_asks_no_hub(shell: Shell) -> None:
    code = "import os, sys; from pathlib import Path; from eagle_export.inspection.headers import fetched\n"
    code += f"print(fetched({str(GOLDEN / 'target')!r}, None, Path('pair')), os.environ['HF_HUB_OFFLINE'])\n"
    code += "assert 'huggingface_hub' not in sys.modules"
    assert shell.python(code) == f"({GOLDEN / 'target'!r}, None, {{}}) 1" and not shell.hub.requests


def test_a_disk_without_room_is_refused_before_the_download() -> None:
    files = {"config.json": 100, "model.safetensors": 10**18}
    with pytest.raises(
        ExportError, match=r"MB free, but acme/large takes 1000000000000 MB; free space, or set HF_HOME"
    ):
        download(HubModel(HubId("acme/large", None), "0" * 40, files, ("model.safetensors",)), texts=True)


def test_a_model_that_is_named_twice_drafts_with_its_own_layer(shell: Shell) -> None:
    """Its weights are downloaded once."""
    out, _ = shell.run("inspect", "acme/mimo")
    assert "(MiMo MTP); eagle-export acme/mimo acme/mimo drafts with it" in out
    out, err = shell.run("acme/mimo", "acme/mimo", "-o", "bundle", "--no-certificate")
    assert "mtp head" in out and err.count("downloading") == 1
    tools = read_manifest(shell.home / "bundle").tools
    assert tools["target: acme/mimo"] == tools["draft: acme/mimo"]


def test_a_bundle_is_pushed_and_loads_by_its_id(shell: Shell, tmp_path: Path) -> None:
    pair = (str(GOLDEN / "target"), str(GOLDEN / "head_eagle1"), "-o", str(tmp_path / "bundle"), "--no-certificate")
    assert "me/new cannot be written on the hub (" in shell.refusal(*pair, "--push", "me/new")
    assert "--push 'new' is not a name on the hub" in shell.refusal(*pair, "--push", "new")
    assert not (tmp_path / "bundle").exists(), "both are said before an export has begun"
    shell.hub.uploads, shell.more["HF_TOKEN"] = tmp_path / "uploads", "hf_x"
    out, _ = shell.run(*pair, "--push", "me/new")
    pushed = shell.hub.models["me/new"]["main"]
    assert out.splitlines()[-1] == f"me/new@{commit_of(pushed)}"
    listed = read_manifest(tmp_path / "bundle").files
    assert {path.relative_to(pushed).as_posix() for path in pushed.rglob("*") if path.is_file()} == {
        "eagle_config.json",
        *listed,
    }
    code = (
        "from eagle_runtime import EagleModel; print(EagleModel.load('me/new').generate([5, 6], max_new_tokens=4).tau)"
    )
    assert float(shell.python(code.replace(".tau", ".usage.tau"))) >= 1
