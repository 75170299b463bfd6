"""Clients that people use: the bodies that they send are answered (data/client_bodies.json), and with `-m slow` each is
installed and run against a server (programs/).

After a client's release: start eagle-serve and tests/serve/recording_proxy.py, run its program with EAGLE_URL at the
proxy, and put what it wrote into the data.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raw_http import events, post

PROGRAMS = Path(__file__).parent / "programs"
BODIES = json.loads((Path(__file__).parents[1] / "data" / "client_bodies.json").read_text(encoding="utf-8"))
REQUESTS = [(client, index) for client, sent in BODIES.items() for index in range(len(sent["requests"]))]
# Program -> what pip installs for it, separated by spaces.
PACKAGES = {
    "openai_python": "openai",
    "litellm_python": "litellm",
    "langchain_python": "langchain-openai",
    "llama_index_python": "llama-index-llms-openai-like",
    "pydantic_ai_python": "pydantic-ai-slim[openai]",
    "instructor_python": "instructor",
    "ollama_python": "ollama",
    "lm_eval_python": "lm-eval[api] transformers",
}


@pytest.mark.parametrize(("client", "index"), REQUESTS, ids=[f"{client}-{index}" for client, index in REQUESTS])
def test_recorded_bodies_are_answered(address: str, client: str, index: int) -> None:
    sent = BODIES[client]["requests"][index]
    path, body = sent["path"], dict(sent["body"])
    if path in ("/v1/chat/completions", "/v1/completions"):
        body.setdefault("max_tokens", 32)  # enough to see that it is answered
    elif path.startswith("/api/"):
        body["options"] = {"num_predict": 32, **body.get("options", {})}
    answer = post(address, path, body, {"Content-Type": sent["content_type"]})
    assert answer.status == 200, answer.body
    assert answer.headers.get("x-eagle-ignored") == ("tools" if body.get("tool_choice") == "none" else None)
    if path == "/api/show":
        assert answer.data["capabilities"]
    elif path.startswith("/api/"):
        last = json.loads(answer.body.splitlines()[-1])
        assert last["done"] is True and last["done_reason"] in ("stop", "length", "load")
    elif body.get("stream"):
        said: list[Any] = [event for event in events(answer.body) if not str(event).startswith(":")]
        assert said[-1] == "[DONE]" or path == "/v1/responses"
    elif path == "/v1/responses":
        assert answer.data["status"] in ("completed", "incomplete") and answer.data["output"]
    else:
        assert answer.data["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")


def results(command: list[str], address: str, bundle: Path, folder: Path) -> dict[str, str | None]:
    """Feature -> why it failed, as a program says."""
    asked = {"EAGLE_URL": address, "EAGLE_MODEL": "pair", "EAGLE_BUNDLE": str(bundle)}
    env = {**os.environ, **asked, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert lines, run.stderr
    return {line["feature"]: line["problem"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("program", PACKAGES)
def test_a_python_client(program: str, address: str, served_bundle: Path, tmp_path: Path) -> None:
    python = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES[program].split()], check=True)
    found = results([str(python), str(PROGRAMS / f"{program}.py")], address, served_bundle, tmp_path)
    assert len(found) > 4 and not any(found.values()), found


@pytest.mark.slow
def test_the_node_client(address: str, served_bundle: Path, tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    assert npm and node, "install Node.js"
    subprocess.run([npm, "install", "--silent", "--prefix", str(tmp_path), "openai"], check=True)
    shutil.copy(PROGRAMS / "openai_node.mjs", tmp_path)
    found = results([node, "openai_node.mjs"], address, served_bundle, tmp_path)
    assert len(found) > 10 and not any(found.values()), found
