"""A checkpoint is data: code that lies in its folder, or is named in its configs, is never run."""

from __future__ import annotations

import ast
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle_export.commands.cli import main
from eagle_runtime import EagleError
from eagle_tools.bench.pytorch import _loaded, check_checkpoint
from eagle_train.data import load_tokenizer
from eagle_train.target import FrozenTarget
from export_workplace import configure, make_target

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("runtime", "calib", "export", "train", "tools", "studies")
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
    folder = make_target(tmp_path / "target")
    (folder / "own.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    configure(folder, auto_map=own, custom_generate="own")
    tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_an_export_runs_none(target: Path, tmp_path: Path) -> None:
    """The certificate loads the checkpoint with transformers."""
    assert main([str(target), "-o", str(tmp_path / "bundle")]) == 0
    assert json.loads((tmp_path / "bundle" / "eagle_config.json").read_text())["certificate"] is not None
    assert not (tmp_path / "ran").exists()


def test_nobody_is_asked_whether_to_run_some(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask on stdin; a yes that happens to stand there must not count."""
    own = Path(shutil.copytree(target, tmp_path / "own"))
    configure(own, model_type="own")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    refused = []
    loads: dict[str, Callable[[], object]] = {
        "own tokenizer": lambda: load_tokenizer(target, "here"),
        "target": lambda: FrozenTarget(target, torch.device("cpu")),
        "target for figures": lambda: _loaded(target, "fp32", "cpu"),
        "own config": lambda: check_checkpoint(own, 256),
        "own model": lambda: _loaded(own, "fp32", "cpu"),
    }
    for name, load in loads.items():
        try:
            load()
        except EagleError:
            refused.append(name)
    assert not (tmp_path / "ran").exists(), refused
    assert refused == ["own tokenizer", "own config", "own model"]


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
