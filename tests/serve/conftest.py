"""A small pair in int8 with a tokenizer and a chat template, served over HTTP."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import put_listed, put_tokenizer, with_template
from eagle_runtime import EagleModel
from eagle_serve.server import serving

TEMPLATE = (
    "{% if messages[0].content == 'refuse this' %}{{ raise_exception('no thanks') }}{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}{% if enable_thinking %}t{% endif %}a: "
)


@pytest.fixture(scope="session")
def served_bundle(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token is a byte of ASCII; the text that comes of it means nothing."""
    return with_template(bundle_of("eagle1", "int8"), tmp_path_factory.mktemp("served") / "pair", TEMPLATE)


@pytest.fixture(scope="session")
def served_model(served_bundle: Path) -> Iterator[EagleModel]:
    with EagleModel.load(served_bundle, threads=1) as model:
        yield model


@pytest.fixture(scope="session")
def address(served_model: EagleModel, served_bundle: Path) -> Iterator[str]:
    """A server with the usual options."""
    with serving(served_model, served_bundle) as where:
        yield where


@pytest.fixture(scope="session")
def thinking_address(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a model whose template lets every answer begin with reasoning."""
    bundle = shutil.copytree(bundle_of("eagle1", "int8"), tmp_path_factory.mktemp("served") / "thinks")
    put_tokenizer(bundle)
    # "</think>" ends it
    put_listed(
        bundle,
        "chat_template.jinja",
        (TEMPLATE + "{# </think> #}{% if enable_thinking is not defined or ").encode()
        + b"enable_thinking %}<think>{% endif %}",
    )
    with EagleModel.load(bundle, threads=1) as model, serving(model, bundle) as where:
        yield where
