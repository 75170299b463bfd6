"""A checkpoint is data: code that lies in its folder, or is named in its configs, is never run."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import GOLDEN
from eagle_export.cli import main

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("runtime", "calib", "export", "train", "tools")
# What it leaves when it is imported, by whatever name.
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).touch()
class Config(LlamaConfig): pass
class Model(LlamaForCausalLM): pass
class Tokenizer(PreTrainedTokenizerFast): pass
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The golden target, whose configs ask for code of its own at every place where transformers looks for some."""
    folder = tmp_path / "target"
    shutil.copytree(GOLDEN / "target", folder)
    shutil.copyfile(GOLDEN / "byte_tokenizer.json", folder / "tokenizer.json")
    (folder / "own.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config["custom_generate"] = "own"
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_an_export_runs_none(target: Path, tmp_path: Path) -> None:
    """The certificate loads the checkpoint with transformers."""
    assert main([str(target), str(GOLDEN / "head_eagle1"), "-o", str(tmp_path / "bundle")]) == 0
    assert json.loads((tmp_path / "bundle" / "eagle_config.json").read_text())["certificate"] is not None
    assert not (tmp_path / "ran").exists()


LOADS = """
import sys, torch
from pathlib import Path
from eagle_runtime import EagleError
from eagle_tools.bench.pytorch import _loaded, check_checkpoint
from eagle_train.data import load_tokenizer
from eagle_train.target import FrozenTarget
target, own = map(Path, sys.argv[1:])
for load in (
    lambda: load_tokenizer(target, "here"),
    lambda: FrozenTarget(target, torch.device("cpu")),
    lambda: _loaded(target, "fp32", "cpu"),
    lambda: check_checkpoint(own, 256),
    lambda: _loaded(own, "fp32", "cpu"),
):
    try:
        load()
        print("loaded")
    except EagleError as error:
        print("refused")
"""


def test_nobody_is_asked_whether_to_run_some(target: Path, tmp_path: Path) -> None:
    """transformers would ask on stdin; a yes that happens to stand there must not count."""
    own = Path(shutil.copytree(target, tmp_path / "own"))
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"model_type": "own"}))
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONPATH": paths, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", LOADS, str(target), str(own)]
    done = subprocess.run(command, input="y\n" * 9, capture_output=True, text=True, check=True, env=env)
    assert not (tmp_path / "ran").exists(), done.stdout
    assert done.stdout.split() == ["refused", "loaded", "loaded", "refused", "refused"]


def test_every_load_says_so() -> None:
    """from_pretrained with trust_remote_code=False, and no weights that are pickled."""
    loads = 0
    for path in (path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            if node.func.attr == "from_pretrained":
                loads += 1
                assert given.get("trust_remote_code") is False, where
                name = ast.unparse(node.func.value)
                assert "Model" not in name.replace("ForCausalLM", "Model") or given.get("use_safetensors") is True, (
                    where
                )
            if ast.unparse(node.func) == "torch.load":
                assert given.get("weights_only") is True, where
            assert ast.unparse(node.func) not in ("pickle.load", "pickle.loads", "joblib.load"), where
    assert loads >= 5
