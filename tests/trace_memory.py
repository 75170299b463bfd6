"""Traces of equal modules, made once per run of tests: nine tenths of an export of a tiny pair is its trace.

A trace depends on the module alone: its classes, their settings, shapes of parameters and values of buffers. They make
the key, with the exporter's source and the packages that trace. A module with something that the key does not cover is
traced anew; with EAGLE_FRESH_TRACES=1 all are.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import dis
import functools
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import onnx
import onnx_ir as ir
import onnxscript
import torch
import transformers
from filelock import FileLock
from onnx_ir.tensor_adapters import TorchTensor, to_torch_dtype
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import PretrainedConfig

import eagle_export

GIVEN = "names given"  # in the metadata of a written trace
KEPT = 24  # traces in memory, each a graph without weights
OF_TORCH = frozenset(vars(torch.nn.Module()))  # parameters, buffers and hooks are described apart, or are not there


@functools.cache
def exporter() -> str:
    """What makes a trace of a module: a digest of the exporter's source, and the versions of what it traces with."""
    digest = hashlib.sha256()
    for path in sorted(Path(eagle_export.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return " ".join([digest.hexdigest(), *(each.__version__ for each in (torch, transformers, onnx, onnxscript, ir))])


class UndescribedError(Exception):
    """A value that the key does not cover."""


def describe(value: Any) -> str:
    """Returns a text that is equal for equal values, in any process. Raises UndescribedError for what it does not
    know."""
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, torch.Tensor):
        kind = f"{tuple(value.shape)} {value.dtype}"
        if isinstance(value, FakeTensor):
            return f"fake {kind}"
        content = value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return f"{kind} {hashlib.sha256(content).hexdigest()}"
    if isinstance(value, PretrainedConfig):
        return f"{type(value)} {value._attn_implementation} {describe(value.to_dict())}"
    if isinstance(value, torch.nn.Module):
        return "module"  # one of modules()
    if isinstance(value, tuple | list | torch.Size):
        return f"{type(value)} [{', '.join(map(describe, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{describe(key)}: {describe(each)}' for key, each in value.items())}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(describe, value)))}}}"
    if isinstance(value, CodeType):
        return f"code {value.co_code!r} {describe(value.co_consts)} {value.co_names}"
    if isinstance(value, functools.partial):
        return f"partial {describe(value.func)} {describe(_read_by(value.func, value.args))} {describe(value.keywords)}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return f"{type(value)} {describe(fields)}"
    name = getattr(value, "__qualname__", None)
    bound = getattr(value, "__self__", None)  # a module for functions in C
    if callable(value) and name is not None and (bound is None or isinstance(bound, ModuleType)):
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        code, defaults = getattr(value, "__code__", None), getattr(value, "__defaults__", None)
        return f"{value.__module__}.{name} {describe(cells)} {describe(defaults)} {describe(code)}"
    raise UndescribedError(f"{type(value)}")


def _read_by(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    """The positional arguments, without those that no instruction of the function names: what most families do to
    logits does not depend on the config."""
    code: CodeType | None = getattr(function, "__code__", None)
    if code is None:
        return list(arguments)
    values = [each.argval for each in dis.get_instructions(code)]
    named = {name for value in values for name in (value if isinstance(value, tuple) else [value])}
    unread = {index for index, name in enumerate(code.co_varnames[: code.co_argcount]) if name not in named}
    return ["unread" if index in unread else each for index, each in enumerate(arguments)]


def describe_module(module: torch.nn.Module) -> str:
    """Returns a text of all that a trace of the module depends on. Raises UndescribedError."""
    lines = []
    for name, part in module.named_modules(remove_duplicate=False):
        own = {key: value for key, value in vars(part).items() if key not in OF_TORCH}
        children = [key for key, child in part._modules.items() if child is not None]
        hooks = [key for key in OF_TORCH if "hooks" in key and getattr(part, key)]
        lines.append(f"{name} {describe(type(part))} {part.training} {children} {hooks} {describe(own)}")
        for key, tensor in [*part._parameters.items(), *part._buffers.items()]:
            lines.append(f"  {key} {describe(tensor)}")
    return "\n".join(lines)


class TraceMemory:
    """Traces by what they were made of. asked, traced: how often."""

    def __init__(self, folder: Path) -> None:
        """folder: of a run of tests, or of several; their processes share the traces there."""
        self.enabled = not os.environ.get("EAGLE_FRESH_TRACES")
        self.asked = self.traced = 0
        self._folder = folder
        self._kept: OrderedDict[str, ir.Model] = OrderedDict()

    def around(self, trace: Callable[..., ir.Model]) -> Callable[..., ir.Model]:
        """Returns `trace`, which gets a module first, with this memory."""

        def traced(module: torch.nn.Module, *settings: Any) -> ir.Model:
            self.traced += 1
            return trace(module, *settings)

        def remembered(module: torch.nn.Module, *settings: Any) -> ir.Model:
            self.asked += 1
            try:
                what = f"{trace.__name__} {describe(settings)}\n{describe_module(module)}" if self.enabled else None
            except UndescribedError:
                what = None
            if what is None:
                return traced(module, *settings)
            key = hashlib.sha256(f"{exporter()}\n{what}".encode()).hexdigest()
            if key not in self._kept:
                file = self._folder / f"{key}.onnx"
                with FileLock(f"{file}.lock"):  # another process may be tracing the same
                    if file.exists():
                        self._kept[key] = read(file)
                    else:
                        self._kept[key] = traced(module, *settings)
                        with contextlib.suppress(OSError):  # a test may have filled the disk
                            write(self._kept[key], file)
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return _copy(self._kept[key])

        return remembered


def write(model: ir.Model, file: Path) -> None:
    """Writes a trace: of its fake weights the shapes and types, and which names it has given."""
    model = _copy(model)
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and isinstance(tensor.raw, FakeTensor):
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor("", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
    given = {key: sorted(each) if isinstance(each, set) else each for key, each in _given(model).items()}
    model.metadata_props[GIVEN] = json.dumps(given)
    beside = file.with_suffix(".part")
    beside.write_bytes(ir.to_proto(model).SerializeToString())
    beside.rename(file)


def read(file: Path) -> ir.Model:
    """Reads what `write` wrote."""
    model: ir.Model = ir.from_proto(onnx.ModelProto.FromString(file.read_bytes()))
    given = json.loads(model.metadata_props.pop(GIVEN))
    _given(model).update({key: set(each) if isinstance(each, list) else each for key, each in given.items()})
    with FakeTensorMode():
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                fake = torch.empty(tensor.shape.numpy(), dtype=to_torch_dtype(tensor.dtype))
                value.const_value = TorchTensor(fake, name)
    return model


def _given(model: ir.Model) -> dict[str, Any]:
    """The state of what names new values and nodes."""
    state: dict[str, Any] = vars(model.graph._name_authority)
    return state


def _copy(model: ir.Model) -> ir.Model:
    """A copy that numbers new values and nodes as the model itself would, so that bundles are equal to the byte."""
    copied = model.clone()
    copied.graph._name_authority = copy.deepcopy(model.graph._name_authority)
    return copied
