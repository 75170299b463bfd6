"""Inputs that do not fit, for the native operators: python tests/operator_fuzz.py --cases 1000000 --seed 1

Valid graphs and inputs of every operator are changed at random: shapes, types, ranks, empty tensors, values, positions,
masks, attributes, weights, plans of steps. A case must end in an error of ONNX Runtime or in outputs; one that ends the
process is named by the process that watches it. A case follows from the seed and its number alone. With a library that
is compiled with sanitizers (`make sanitize`) accesses out of bounds and undefined operations end the process too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from convolution_graphs import convolution
from delta_graphs import delta, scan
from eagle_export.recipes.blocks import Grid
from eagle_runtime.base.errors import BackendError
from eagle_runtime.ort.session import texts_mask
from expert_graphs import mixture
from operator_graphs import INSTRUCTION_SETS, Array, Heads, OneNode, instructions, library, norm, opened_model, product
from operator_graphs import random_blocks as blocks_of
from step_graphs import layers

Feeds = dict[str, Array]
FEEDS = 6  # valid ones of each graph
GRAPH_CASES = 24  # one of so many cases changes the graph too
RUNS = 3  # of a changed graph that can be opened
NUMBERS = (0.0, -0.0, 1.0, np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, 1e-38, 65504.0, 70000.0, -1e9, 2**31, -(2**63))
WHOLE = (0, 1, -1, 2, 3, 7, 8, 15, 16, 64, 255, 256, 257, 4096, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
FAR = 1 << 40  # bytes to a second layer, which no graph has
NOBODY = np.zeros(7, np.int64)  # the texts of a pass of one, of which none is read
TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UINT8, TensorProto.INT8, TensorProto.INT64)
HEADS = (
    Heads(4, 2, 16, 16),
    Heads(3, 3, 8, 8, window=5),
    Heads(4, 1, 32, 8, cap=20.0, turned=16),
    Heads(2, 2, 24, 24, rotated=False, kept="float16"),
    Heads(4, 2, 16, 16, window=9, kept="float16"),
    Heads(4, 2, 32, 32, kept="uint8"),
    Heads(2, 1, 256, 256, kept="uint8", cap=5.0),
    Heads(4, 2, 16, 16, window=6, kept="float16", sinks=True),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A graph whose inputs may have any shape, with sessions of it for each instruction set, and valid inputs. lengths:
    of attention whose rows may be of several texts, committed columns of each of `feeds`."""

    name: str
    model: bytes
    sessions: tuple[OneNode, ...]
    feeds: tuple[Feeds, ...]
    lengths: tuple[int, ...] = ()


def subjects(rng: np.random.Generator) -> list[Subject]:
    """Every operator, in its forms."""

    def made(name: str, graph: OneNode, feeds: Callable[[int], Feeds], threads: int = 1) -> Subject:
        model = without_shapes(graph.model)
        sessions = []
        for each in INSTRUCTION_SETS:
            with instructions(each):
                sessions.append(opened_model(model, threads))
        return Subject(name, model, tuple(sessions), tuple(feeds(i) for i in range(FEEDS)))

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    found = []
    for k, shapes in (
        (64, [(24, Grid(4, 32, True)), (16, Grid(8, 16, False)), (8, Grid(4, 64, True))]),
        (200, [(50, Grid(4, 128, True))]),
        (48, [(33, Grid(8, 16, True))]),
    ):
        blocks = [blocks_of(rng, (k, n), grid) for n, grid in shapes]
        found.append(made("product", product(blocks), lambda i, k=k: {"x": normal(1, i + 1, k)}))  # type: ignore[misc]
    blocks = [blocks_of(rng, (64, 24), Grid(4, 32, True))]
    gated = product(blocks, more=("up", "added"), activation=1, biases=[normal(24)])
    widths = {"x": 64, "up": 64, "added": 24}
    found.append(made("gated", gated, lambda i: {name: normal(1, i + 1, n) for name, n in widths.items()}))
    normed = product(blocks, normal(64), epsilon=1e-5)
    found.append(made("normed", normed, lambda i: {"x": normal(1, i + 1, 64)}))
    summed = norm(normal(16), added=True)
    found.append(made("norm", summed, lambda i: {name: normal(1, i + 1, 48) for name in ("x", "added")}))
    lengths = [0, 1, 5, 33, 127, 130]
    for heads in HEADS:

        def feeds(i: int, heads: Heads = heads) -> Feeds:
            count = i * 3 % 8 + 1
            parents = [-1, *(int(rng.integers(max(0, node - 3), node)) for node in range(1, count))]
            return heads.feeds(heads.rows(rng, count), heads.past(rng, lengths[i]), parents, spare=10)

        one = made("attention", heads.session(), feeds)
        found.append(Subject(one.name, one.model, one.sessions, one.feeds, tuple(lengths)))
        if heads.kept == "float32" and not heads.window:

            def level(i: int, heads: Heads = heads) -> Feeds:
                past = heads.past(rng, 20 * i + 3)
                return heads.level(heads.feeds(heads.rows(rng, 5), past, [-1, 0, 0, 1, 3], 0), past, 3 * (i % 2))

            found.append(made("attention over rows", heads.session(by_rows=True), level))
    parents = [-1, 0, 0, 1, 3]
    for heads in (Heads(4, 2, 16, 16, rotated=False), Heads(2, 1, 24, 8, rotated=False, kept="float16")):
        layer = convolution(rng, heads, heads.kv_heads + 2, biased=heads.kv_heads == 1)
        one = made("convolution", layer.session(), lambda i, c=layer: c.feeds(rng, lengths[i], parents, 10))  # type: ignore[misc]
        found.append(Subject(one.name, one.model, one.sessions, one.feeds, tuple(lengths)))
    for shape in ((2, 4, 16, 16), (1, 1, 8, 40)):
        for name, net in (("delta", delta(rng, *shape)), ("scan", scan(rng, *shape))):
            one = made(name, net.session(), lambda i, d=net: d.feeds(rng, i % 3, parents))  # type: ignore[misc]
            found.append(Subject(one.name, one.model, one.sessions, one.feeds, (0,) * FEEDS))
    for norms in (False, True):
        both = layers(rng, norms=norms)
        found.append(made("steps", both.joined, lambda i, b=both: b.feeds(rng, 9 * i, parents), 1 + norms))  # type: ignore[misc]
    for sums in (False, True):
        experts = mixture(rng, 5, 32, 24, activation=3 if sums else 1, biased=sums)
        step = experts.session(sums=sums)
        found.append(made("experts", step, lambda i, e=experts, s=sums: e.feeds(rng, i + 1, 2, sums=s)))  # type: ignore[misc]
    return found


def without_shapes(model: bytes) -> bytes:
    """A graph whose inputs may have any shape, so that operators see what ONNX Runtime would refuse."""
    graph = onnx.load_from_string(model)
    for value in graph.graph.input:
        value.type.tensor_type.ClearField("shape")
    content: bytes = graph.SerializeToString()
    return content


def changed_values(rng: np.random.Generator, array: Array) -> Array:
    """A copy with other numbers in it: a few, or all, that are extreme, or some of the array's own elsewhere."""
    array = array.copy()
    if array.size == 0:
        return array
    flat = array.reshape(-1)
    count = int(rng.choice([1, 2, max(1, array.size // 4), array.size]))
    places = rng.integers(0, array.size, count)
    if rng.random() < 0.2:
        flat[places] = flat[rng.integers(0, array.size, count)]
    elif array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            flat[places] = np.array(rng.choice(NUMBERS, count)).astype(array.dtype)
    elif array.dtype == np.int64:
        flat[places] = [WHOLE[i] for i in rng.integers(0, len(WHOLE), count)]
        if rng.random() < 0.5:
            flat[places] = rng.integers(-9, 150, count)
    else:
        flat[places] = rng.integers(0, 256, count).astype(array.dtype)
    return array


def changed_shape(rng: np.random.Generator, array: Array) -> Array:
    """Rows more or fewer along an axis, axes that are exchanged, joined, new or gone, or nothing at all."""
    way = int(rng.integers(0, 7))
    if array.ndim and way in (0, 1, 2):
        axis = int(rng.integers(0, array.ndim))
        size = array.shape[axis]
        wanted = int(rng.choice([0, 1, max(0, size - 1), size + 1, size + 8, 2 * size]))
        if size == 0:
            return np.zeros([*array.shape[:axis], wanted, *array.shape[axis + 1 :]], array.dtype)
        array = np.take(array, np.arange(wanted) % size, axis)
    elif way == 3:
        array = array.transpose(rng.permutation(array.ndim))
    elif way == 4:
        array = array.reshape(-1)
    elif way == 5:
        array = np.expand_dims(array, int(rng.integers(0, array.ndim + 1)))
        array = np.expand_dims(array, 0) if rng.random() < 0.3 and array.ndim < 8 else array
    elif array.ndim:
        array = array[..., 0] if array.shape[-1] else array
    return np.ascontiguousarray(array)


def changed_feeds(rng: np.random.Generator, feeds: Feeds) -> Feeds:
    """Some of the inputs changed; all are copies, since operators may write into caches."""
    feeds = {name: array.copy() for name, array in feeds.items()}
    for _ in range(int(rng.integers(0, 4))):
        name = list(feeds)[int(rng.integers(0, len(feeds)))]
        way = rng.random()
        if way < 0.5:
            feeds[name] = changed_values(rng, feeds[name])
        elif way < 0.9:
            feeds[name] = changed_shape(rng, feeds[name])
        elif way < 0.95:  # as many rows more or fewer everywhere
            rows = int(rng.integers(0, 12))
            feeds = {n: a if a.ndim < 2 else np.resize(a, (a.shape[0], rows, *a.shape[2:])) for n, a in feeds.items()}
        else:
            kind = helper.tensor_dtype_to_np_dtype(TYPES[int(rng.integers(0, len(TYPES)))])
            with np.errstate(all="ignore"):
                feeds[name] = feeds[name].astype(kind)
    return feeds


def changed_model(rng: np.random.Generator, content: bytes) -> bytes:
    """A graph with one to three changes in attributes, weights, inputs or types."""
    model = onnx.load_from_string(content)
    for _ in range(int(rng.integers(1, 4))):
        node = model.graph.node[int(rng.integers(0, len(model.graph.node)))]
        way = rng.random()
        if way < 0.4 and node.attribute:
            _change_attribute(rng, node)
        elif way < 0.7 and (tensors := [*model.graph.initializer, *_constants(model)]):
            tensor = tensors[int(rng.integers(0, len(tensors)))]
            array = numpy_helper.to_array(tensor)
            array = changed_shape(rng, array) if rng.random() < 0.4 else changed_values(rng, array)
            if rng.random() < 0.1:
                with np.errstate(all="ignore"):
                    array = array.astype(helper.tensor_dtype_to_np_dtype(TYPES[int(rng.integers(0, len(TYPES)))]))
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        elif way < 0.9 and node.input:
            at, other = rng.integers(0, len(node.input), 2)
            if rng.random() < 0.3:
                del node.input[int(at) :]
            else:
                node.input[int(at)] = node.input[int(other)] if rng.random() < 0.7 else ""
        elif way < 0.95 and len(node.output) > 1:
            gone = node.output[-1]
            del node.output[-1]
            for value in [value for value in model.graph.output if value.name == gone]:
                model.graph.output.remove(value)
        else:
            value = model.graph.input[int(rng.integers(0, len(model.graph.input)))]
            value.type.tensor_type.elem_type = int(rng.choice(TYPES))
    changed: bytes = model.SerializeToString()
    return changed


def _constants(model: Any) -> list[Any]:
    return [a.t for node in model.graph.node if node.op_type == "Constant" for a in node.attribute if a.name == "value"]


def _change_attribute(rng: np.random.Generator, node: Any) -> None:
    attribute = node.attribute[int(rng.integers(0, len(node.attribute)))]
    if rng.random() < 0.1:
        node.attribute.remove(attribute)
    elif attribute.type == onnx.AttributeProto.INT:
        near = attribute.i + int(rng.integers(-9, 10)), 2 * attribute.i, attribute.i // 2
        far = WHOLE[int(rng.integers(0, len(WHOLE)))]
        attribute.i = far if rng.random() < 0.5 else near[int(rng.integers(0, len(near)))]
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = float(NUMBERS[int(rng.integers(0, len(NUMBERS)))])


class Fuzz:
    """Runs cases. ends: how many of each operator ended in what."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._subjects = subjects(np.random.default_rng(seed))
        self._library = ctypes.CDLL(str(library()))
        self._library.eagle_next_texts.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self.ends: Counter[tuple[str, str]] = Counter()

    def case(self, number: int) -> None:
        """Raises AssertionError for outputs that are not arrays, and any error that is not ONNX Runtime's."""
        rng = np.random.default_rng([self._seed, number])
        subject = self._subjects[int(rng.integers(0, len(self._subjects)))]
        which = int(rng.integers(0, 1 << 30)) % len(subject.sessions)  # the same inputs on every processor
        if number % GRAPH_CASES == 0:
            try:
                with instructions(INSTRUCTION_SETS[which]):
                    graph = opened_model(changed_model(rng, subject.model))
            except (BackendError, ValueError):
                self.ends[subject.name, "not opened"] += 1
                return
            for _ in range(RUNS):
                self._run(rng, subject, graph)
            return
        self._run(rng, subject, subject.sessions[which])

    def _run(self, rng: np.random.Generator, subject: Subject, graph: OneNode) -> None:
        feeds = subject.feeds[int(rng.integers(0, len(subject.feeds)))]
        kept: list[Feeds] = []  # whose caches are announced
        if subject.lengths and rng.random() < 0.1:
            kept, feeds = self._announced(rng, subject)
        feeds = changed_feeds(rng, feeds)
        if kept:  # the first text's cache is an input by its address
            feeds |= {name: kept[0][name] for name in ("keys", "values") if rng.random() < 0.9}
        self._library.eagle_write_rows(int(rng.integers(0, 3)) if rng.random() < 0.1 else 0)
        if feeds and rng.random() < 0.01:
            del feeds[next(iter(feeds))]
        try:
            outputs = graph.session.run(None, feeds)
        except Exception as error:  # of a dozen types without a common base
            if not (type(error).__module__.startswith("onnxruntime") or isinstance(error, ValueError | RuntimeError)):
                raise
            self.ends[subject.name, "refused"] += 1
        else:
            assert all(one is None or isinstance(one, np.ndarray) for one in outputs)  # None: only in the cache
            self.ends[subject.name, "computed"] += 1
        finally:
            self._library.eagle_next_texts(NOBODY.ctypes.data, 0, 1)
            self._library.eagle_write_rows(0)

    def _announced(self, rng: np.random.Generator, subject: Subject) -> tuple[list[Feeds], Feeds]:
        """Announces two or three texts of a subject; returns them, and the inputs of a pass over their rows."""
        chosen = rng.permutation(len(subject.feeds))[: int(rng.integers(2, 4))]
        texts = [{name: array.copy() for name, array in subject.feeds[i].items()} for i in chosen]
        numbers = []
        for one, i in zip(texts, chosen, strict=True):
            one["next"] = np.empty_like(one["values"])
            keys, values, following = (one[name].ctypes.data for name in ("keys", "values", "next"))
            numbers.append((keys, FAR, values, FAR, one["keys"].shape[1], subject.lengths[i], following))
        array = np.array(numbers, np.int64)
        if rng.random() < 0.5:  # caches of another shape begin before or after those
            other = array + np.array([16, 0, 16, 0, 0, 0, 16]) * int(rng.choice([-1, 1]))
            array = np.concatenate([other, array] if rng.random() < 0.5 else [array, other])
        assert self._library.eagle_next_texts(array.ctypes.data, len(texts), len(array) // len(texts)) == 0
        names = ("q", "k", "v", "x", "qkv", "b", "a", "dt", "positions", "cosine", "sine")
        feeds = {name: np.concatenate([one[name] for one in texts], 1) for name in names if name in texts[0]}
        ends = np.cumsum([one["positions"].shape[1] for one in texts]).tolist()
        mask = texts_mask([one["mask"][0, 0] for one in texts], ends)
        return texts, {**feeds, "keys": texts[0]["keys"], "values": texts[0]["values"], "mask": mask[None, None]}


def run(first: int, cases: int, seed: int, note: Callable[[int], None] = lambda number: None) -> Fuzz:
    """Runs cases from the number `first` on; returns what they ended in. note: called with each number before its
    case."""
    fuzz = Fuzz(seed)
    for number in range(first, first + cases):
        note(number)
        fuzz.case(number)
    return fuzz


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if a case ended the process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--note", type=Path, help=argparse.SUPPRESS)  # file of the watched process
    args = parser.parse_args(argv)
    if args.note is not None:
        with args.note.open("wb", buffering=0) as file:

            def note_number(number: int) -> None:
                os.pwrite(file.fileno(), b"%12d" % number, 0)

            ends = run(args.first, args.cases, args.seed, note_number).ends
        for (name, end), count in sorted(ends.items()):
            print(f"{name:20} {end:10} {count:9}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "number"
        arguments = ("--cases", str(args.cases), "--seed", str(args.seed), "--first", str(args.first))
        done = subprocess.run([sys.executable, __file__, *arguments, "--note", str(note)], check=False)
        if done.returncode == 0:
            return 0
        with contextlib.suppress(OSError):
            print(f"case {note.read_text().strip()} of seed {args.seed} ended the process ({done.returncode})")
    return 1


if __name__ == "__main__":
    sys.exit(main())
