"""The model's own settings of sampling hold where a caller does not say, by every way to ask."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_runtime import EagleModel, RequestError, SamplingParams
from eagle_runtime.app.request import request_of
from eagle_runtime.bundle.manifest import MANIFEST_NAME, SamplingDefaults
from insides import bundle_in

PROMPT = [5, 7, 200, 33]
OWN = SamplingDefaults(temperature=0.9, top_k=30, top_p=0.95, min_p=0.02, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def bundle(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose model is to be sampled."""
    folder = tmp_path_factory.mktemp("sampled") / "bundle"
    shutil.copytree(bundle_of("eagle1"), folder)
    data = json.loads((folder / MANIFEST_NAME).read_text())
    data["sampling"] = {name: getattr(OWN, name) for name in OWN.__slots__}
    (folder / MANIFEST_NAME).write_text(json.dumps(data))
    return folder


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[EagleModel]:
    with EagleModel.load(bundle, threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (0.9, 30, 0.95, 0.02, 1.1)),
        ({"temperature": None, "top_k": None}, (0.9, 30, 0.95, 0.02, 1.1)),
        ({"temperature": 0}, (0, 30, 0.95, 0.02, 1.1)),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0, "repetition_penalty": 1}, (0.9, 0, 1, 0, 1)),
        ({"sampling": SamplingParams()}, (0, 0, 1, 0, 1)),
        ({"sampling": SamplingParams(top_p=0.5), "temperature": 0.3}, (0.3, 0, 0.5, 0, 1)),
    ],
    ids=str,
)
def test_explicit_settings_win(model: EagleModel, settings: dict[str, Any], expected: tuple[float, ...]) -> None:
    request = request_of(bundle_in(model), bundle_in(model).state(), PROMPT, 64, seed=3, **settings)
    params = request.sampler.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty) == expected
    assert params.seed == 3


def test_unknown_settings_are_errors_even_if_none(model: EagleModel) -> None:
    with pytest.raises(RequestError, match="unknown setting 'temperture'; did you mean temperature"):
        model.generate(PROMPT, temperture=None)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match=r"unknown setting 'json_schema'; settings are .*, constraint, .*, seed, "):
        model.generate(PROMPT, json_schema={})  # type: ignore[call-arg]


def test_commands_take_them_too(bundle: Path, model: EagleModel) -> None:
    expected = model.generate(PROMPT, seed=4, max_new_tokens=8)
    greedy = model.generate(PROMPT, temperature=0, max_new_tokens=8)
    command = [sys.executable, "-m", "eagle_runtime.commands.cli", str(bundle), "--prompt-ids", "5,7,200,33", "--json"]
    command += ["--threads", "1", "--max-new-tokens", "8", "--seed", "4"]
    for more, result in (([], expected), (["--temperature", "0"], greedy)):
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=True)
        assert tuple(json.loads(done.stdout)["token_ids"]) == result.token_ids
    assert expected.token_ids != greedy.token_ids
