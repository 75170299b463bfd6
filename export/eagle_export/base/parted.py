"""Tensors that are read, converted and quantised a part at a time, so that a large one is never held whole in fp32.

A part is a range of rows or of columns. PART bounds the numbers that are worked on; an embedding of 128256 x 4096 would
take 2.1 GB in fp32, next to as much for what is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Array = npt.NDArray[Any]
Part = Callable[[int, slice], Array]  # axis, range -> values

PART = 1 << 24  # numbers, 64 MB in fp32; smaller tensors are worked on whole
STEP = 64  # rows or columns of a part are a multiple of this


class PartedTensor(ir.LazyTensor):
    """A tensor whose values are computed when they are written, and of which a part can be read alone."""

    __slots__ = ("along", "part")

    def __init__(self, part: Part, along: int, dtype: ir.DataType, shape: tuple[int, ...], name: str) -> None:
        """part: returns the values of a range along an axis. along: the axis whose parts are cheap to read."""
        super().__init__(self._whole, dtype=dtype, shape=ir.Shape(shape), name=name)
        self.part, self.along = part, along

    def __repr__(self) -> str:
        # The parent's would name this object's method.
        return f"PartedTensor({self.name!r}, {self.dtype}, {self.shape})"

    def _whole(self) -> ir.TensorProtocol:
        shape, along = self.shape.numpy(), self.along
        ranges = list(parts(shape, along))
        if len(ranges) == 1:
            return ir.tensor(np.ascontiguousarray(self.part(along, ranges[0])), dtype=self.dtype)
        out = np.empty(shape, self.dtype.numpy())
        for each in ranges:
            out[_index(along, each)] = self.part(along, each)
        return ir.tensor(out, dtype=self.dtype)


def parts(shape: tuple[int, ...], axis: int) -> Iterator[slice]:
    """Yields the ranges along an axis in which a tensor is worked on; one if it has PART numbers or fewer."""
    length = shape[axis] if shape else 1
    size = int(np.prod(shape, dtype=np.int64))
    if size <= PART:
        yield slice(0, length)
        return
    count = max(STEP, PART // (size // length) // STEP * STEP)
    for start in range(0, length, count):
        yield slice(start, min(start + count, length))


def part_of(tensor: ir.TensorProtocol, axis: int, piece: slice) -> Array:
    """Returns the values of a range along an axis, of any tensor."""
    if isinstance(tensor, PartedTensor):
        return tensor.part(axis, piece)
    values: Array = tensor.numpy()[_index(axis, piece)]
    return values


def along(tensor: ir.TensorProtocol) -> int:
    """Returns the axis whose parts are cheap to read."""
    return tensor.along if isinstance(tensor, PartedTensor) else 0


def transposed(tensor: PartedTensor) -> PartedTensor:
    """Returns the tensor [rows, columns] as [columns, rows]."""
    rows, columns = tensor.shape.numpy()

    def part(axis: int, piece: slice) -> Array:
        return turned(tensor.part(1 - axis, piece))

    return PartedTensor(part, 1 - tensor.along, tensor.dtype, (columns, rows), str(tensor.name))


def turned(array: Array) -> Array:
    """Returns an array [rows, columns] as [columns, rows] in C order. torch, which has to have its type, writes it by
    blocks, in half of NumPy's time or less."""
    import torch  # here alone, so that sizes are computed without it

    result: Array = torch.from_numpy(array).T.contiguous().numpy()
    return result


def scaled(tensor: ir.TensorProtocol, factors: Array, scaled_axis: int) -> PartedTensor:
    """Returns the tensor times factors along one axis, in its own type."""
    shape = tensor.shape.numpy()

    def part(axis: int, piece: slice) -> Array:
        array = part_of(tensor, axis, piece)
        own = factors[piece] if axis == scaled_axis else factors
        sizes = [1] * len(shape)
        sizes[scaled_axis] = -1
        product = array.astype(np.float32, copy=False) * own.reshape(sizes)
        result: Array = product.astype(array.dtype, copy=False)
        return result

    return PartedTensor(part, along(tensor), tensor.dtype, tuple(shape), str(tensor.name))


def _index(axis: int, piece: slice) -> tuple[slice, ...]:
    return (slice(None),) * axis + (piece,)
