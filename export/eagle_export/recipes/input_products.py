"""What compensated rounding (compensation.py) needs to know of recorded inputs [n, K]: the damped mean products of
their channels, and the factor that says how the error of one channel is fed back to those before it.

    gram = inputs.T @ inputs / n + diag(damping)        [K, K]
    gram = C @ C.T, a Cholesky factor;  lower = C / C.diagonal()

`Dense` holds both matrices. Where K is FEW times n or more, as with down_proj of a large model, `FewRows` gets all
products through the n rows, R = inputs / sqrt(n):

    gram @ error  = R.T @ (R @ error) + damping * error
    lower[i, k]   = R[:, i] @ outer[k]  for i > k

The second line is elimination with the Woodbury identity: let M = (I + sum of R[:, j] R[:, j].T / damping[j] over the
channels j before k)^-1. Channel k then has the pivot p = damping[k] + R[:, k].T @ M @ R[:, k], and outer[k] is
M @ R[:, k] / p. A group of channels is eliminated at once, with a Cholesky factor of its own.

Shapes: n rows, K channels, N columns of a weight's tile; a group has g channels, at most GROUP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from eagle_export.recipes.graph import Array
from eagle_export.recipes.tiles import product, side_by_side

GROUP = 512  # channels whose slopes are computed at once: one product is faster than many small ones
LEAST_DAMPING = 1e-4  # share of the channels' mean square that is added to each: a channel may always have been zero
FEW = 3  # per number of a weight `Dense` computes 2 K multiply-adds and `FewRows` 6 n


def products_of(inputs: Array) -> Products:
    """inputs: [n, K]. The same bits on any number of threads."""
    n, k = inputs.shape
    of: Callable[[Array], Products] = FewRows.of if goes_through_rows(k, n) else Dense.of
    # On one thread: torch's products and factors on two differ in their last bits, and of two processes that share an
    # export (base/beside.py) one may have more threads than the other.
    return side_by_side(of, [inputs])[0]


def goes_through_rows(k: int, n: int) -> bool:
    """Whether `products_of` [n, K] are FewRows."""
    return k >= FEW * n


@dataclass(frozen=True, slots=True)
class Dense:
    """gram, lower: [K, K]. squares [K]: each channel's mean square."""

    gram: Array
    lower: Array
    squares: Array

    @classmethod
    def of(cls, inputs: Array) -> Dense:
        import torch  # here alone, so that sizes are computed without it

        gram = damped_gram(inputs)
        lower = torch.linalg.cholesky(torch.from_numpy(gram)).numpy()  # 4 times as fast as NumPy's at K = 8192
        lower /= lower.diagonal().copy()
        return cls(gram, lower, np.square(inputs).mean(0))

    def within(self, rows: slice, columns: slice) -> Array:
        """Returns the part of `gram` for channels of one group."""
        return self.gram[rows, columns]

    def lower_of(self, rows: slice, columns: slice) -> Array:
        """As `within`, of `lower`."""
        return self.lower[rows, columns]

    def on(self, error: Array) -> _SpreadByProducts:
        """error [K, N]: of a tile's weight; zeros now, and changed in place from then on."""
        return _SpreadByProducts(self, error)


class _SpreadByProducts:
    """What the errors of a tile's channels mean for others, while they change."""

    def __init__(self, products: Dense, error: Array) -> None:
        self._products, self._error = products, error
        # The share of the channels before a group in its slope is the same on the way back: they move after it.
        self._before: dict[int, Array] = {}

    def feedback(self, rows: slice) -> Array:
        """Returns [g, N], what the errors of the channels after a group feed back to it. All others are zero."""
        return product(self._products.lower[rows.stop :, rows].T, self._error[rows.stop :])

    def slope(self, rows: slice) -> Array:
        """Returns [g, N], half the derivatives of the output's squared error by the errors of a group. Asked for each
        group twice: from the first to the last, and back."""
        gram, first = self._products.gram, rows.start
        if (before := self._before.pop(first, None)) is None:
            before = self._before[first] = product(gram[rows, :first], self._error[:first])
        slope = product(gram[rows, first:], self._error[first:])
        slope += before
        return slope

    def changed(self, channels: slice, change: Array) -> None:
        """The errors of some channels have changed by [channels, N]; they themselves are read."""


@dataclass(frozen=True, slots=True)
class FewRows:
    """As Dense. rows [n, K] and outer [K, n]: R and outer; damping [K]; gram, lower [K, GROUP]: of each channel with
    those of its group."""

    rows: Array
    outer: Array
    damping: Array
    gram: Array
    lower: Array
    squares: Array

    @classmethod
    def of(cls, inputs: Array) -> FewRows:
        import torch

        n, k = inputs.shape
        rows, squares = inputs / np.float32(np.sqrt(n)), np.square(inputs).mean(0)
        damping, outer, inverse = _damping(squares, n), np.empty((k, n), np.float32), np.eye(n, dtype=np.float32)
        gram, lower = np.zeros((k, GROUP), np.float32), np.zeros((k, GROUP), np.float32)
        for first in range(0, k, GROUP):
            group = slice(first, min(first + GROUP, k))
            size, own = group.stop - first, rows[:, group]
            seen = product(inverse, own)
            pivots = product(own.T, seen) + np.diag(damping[group])
            factor = torch.linalg.cholesky(torch.from_numpy(pivots))
            known = torch.linalg.solve_triangular(factor, torch.from_numpy(seen).T, upper=False).numpy()
            inverse -= product(known.T, known)
            diagonal = factor.diagonal().numpy()
            outer[group] = known / diagonal[:, None]
            lower[group, :size] = factor.numpy() / diagonal
            gram[group, :size] = product(own.T, own) + np.diag(damping[group])
        return cls(rows, outer, damping, gram, lower, squares)

    def within(self, rows: slice, columns: slice) -> Array:
        return self.gram[rows, _in_group(columns)]

    def lower_of(self, rows: slice, columns: slice) -> Array:
        return self.lower[rows, _in_group(columns)]

    def on(self, error: Array) -> _SpreadByRows:
        return _SpreadByRows(self, error)


class _SpreadByRows:
    """As _SpreadByProducts."""

    def __init__(self, products: FewRows, error: Array) -> None:
        self._products, self._error = products, error
        self._outputs = np.zeros((len(products.rows), error.shape[1]), np.float32)  # R @ error

    def feedback(self, rows: slice) -> Array:
        return product(self._products.outer[rows], self._outputs)

    def slope(self, rows: slice) -> Array:
        slope = product(self._products.rows[:, rows].T, self._outputs)
        slope += self._products.damping[rows, None] * self._error[rows]
        return slope

    def changed(self, channels: slice, change: Array) -> None:
        import torch

        rows = torch.from_numpy(self._products.rows[:, channels])
        torch.from_numpy(self._outputs).addmm_(rows, torch.from_numpy(change))


Products = Dense | FewRows


def damped_gram(inputs: Array) -> Array:
    """Returns [K, K], the mean products of the inputs' channels over n rows, with their squares damped."""
    n, k = inputs.shape
    gram: Array = np.empty((k, k), np.float32)
    for first in range(0, k, GROUP):  # of a symmetric matrix half is computed
        block = slice(first, min(first + GROUP, k))
        gram[block, first:] = product(inputs[:, block].T, inputs[:, first:])
        gram[first:, block] = gram[block, first:].T
    gram /= np.float32(n)
    gram[np.diag_indices(k)] += _damping(gram.diagonal(), n)
    return gram


def _damping(squares: Array, n: int) -> Array:
    """Returns [K], what is added to the mean squares [K]. Few rows estimate the squares better than the products, so
    the squares are raised by a share of K / n."""
    damping: Array = squares * np.float32(len(squares) / n) + max(float(squares.mean()), 1e-20) * LEAST_DAMPING
    return damping


def _in_group(channels: slice) -> slice:
    """Returns where channels are in their group."""
    first = channels.start // GROUP * GROUP
    return slice(channels.start - first, channels.stop - first)
