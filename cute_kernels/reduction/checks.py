"""The argument contract of softmax, log_softmax, sum and mean, shared by the kernels and the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.reduction.config import MAX_COLUMNS
from cute_kernels.runtime.checks import expect, expect_dtype, expect_floats, expect_int, expect_tensor, fail

MAX_ROWS = 2**31 - 2**24  # as of the norms


def check_softmax(op: str, x: Tensor, out_dtype: torch.dtype | None) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    expect_floats(op, "x", x)
    if not x.dim():
        fail(op, "x", "have at least one dimension", "shape ()")
    n = x.shape[-1]
    if n > MAX_COLUMNS:
        fail(op, "x", f"have at most {MAX_COLUMNS} columns", n)
    if n > 1 and x.stride(-1) != 1:
        fail(op, "x", "have a contiguous last dimension", f"stride {x.stride(-1)}")
    if x.numel() > MAX_ROWS * n:
        fail(op, "x", f"have at most {MAX_ROWS} rows", x.numel() // n)
    if out_dtype is not None:
        expect_dtype(op, "out_dtype", out_dtype)


def check_last(op: str, x: Tensor, dim: int) -> None:
    """Raise TypeError or ValueError unless ``dim`` is the last dimension, as torch names it."""
    if type(dim) is int and dim == -1:
        return
    expect_tensor(op, "x", x)
    expect_int(op, "dim", dim)
    last = x.dim() - 1
    if dim != last or last < 0:  # a message would make a symbolic number a constant
        expected = f"be -1 or {last}, the last dimension (x.movedim(dim, -1) puts another one there)"
        expect(False, op, "dim", expected if last >= 0 else "be -1", dim)


def check_columns(shape: Sequence[int], parts: int) -> None:
    """Raise ValueError if (matrices, rows, columns) summed over rows in so many parts take too many CTAs for a grid."""
    ctas = shape[0] * parts * -(-shape[2] // 32)  # at most; a warp has 32 columns and more
    fits = max(ctas, *shape) <= MAX_ROWS
    expect(fits, "sum", "x", f"have at most {MAX_ROWS} sums of 256 rows and 32 columns", f"shape {tuple(shape)}")


def check_sum(
    op: str, x: Tensor, dim: int | Sequence[int] | None, keepdim: bool, out_dtype: torch.dtype | None
) -> tuple[int, ...]:
    """The dimensions to sum over, ascending; raises TypeError or ValueError, naming argument, expected and got."""
    expect_floats(op, "x", x)
    if not isinstance(keepdim, bool):
        fail(op, "keepdim", "be a bool", type(keepdim).__name__, TypeError)
    if out_dtype is not None:
        expect_dtype(op, "out_dtype", out_dtype)
    if dim is None:
        return tuple(range(x.dim()))
    dims = (dim,) if type(dim) is int else dim
    if not (isinstance(dims, (tuple, list)) and all([type(d) is int for d in dims])):
        fail(op, "dim", "be None, an int or ints", repr(dim), TypeError)
    if not all([-x.dim() <= d < x.dim() for d in dims]):
        fail(op, "dim", f"be of {x.dim()} dimensions", dim)
    dims = sorted([d % x.dim() for d in dims])
    if len({*dims}) != len(dims):
        fail(op, "dim", "name each dimension once", dim)
    return tuple(dims)


def check_cumsum(x: Tensor, dim: int, out_dtype: torch.dtype | None) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    expect_floats("cumsum", "x", x)
    expect_int("cumsum", "dim", dim)
    if not -x.dim() <= dim < x.dim():
        fail("cumsum", "dim", f"be of {x.dim()} dimensions", dim)
    if x.shape[dim] > MAX_ROWS or x.numel() > MAX_ROWS * max(x.shape[dim], 1):
        fail("cumsum", "x", f"have at most {MAX_ROWS} rows, and elements of a row", tuple(x.shape))
    if out_dtype is not None:
        expect_dtype("cumsum", "out_dtype", out_dtype)


def check_norm(
    x: Tensor, ord: float, dim: int | Sequence[int] | None, keepdim: bool, out_dtype: torch.dtype | None
) -> tuple[int, ...]:
    """The dimensions, as ``check_sum`` has them; raises TypeError or ValueError naming argument, expected and got."""
    dims = check_sum("norm", x, dim, keepdim, out_dtype)
    if ord not in (1.0, 2.0, math.inf):
        fail("norm", "ord", "be 1, 2 or inf", repr(ord), ValueError if type(ord) is float else TypeError)
    return dims


def check_list(xs: Sequence[Tensor]) -> None:
    """Raise TypeError unless these are tensors."""
    if not isinstance(xs, (list, tuple)):
        fail("norms", "xs", "be a list of tensors", type(xs).__name__, TypeError)


def check_variance(
    op: str,
    x: Tensor,
    dim: int | Sequence[int] | None,
    correction: float,
    keepdim: bool,
    out_dtype: torch.dtype | None,
) -> tuple[int, ...]:
    """The dimensions, as ``check_sum`` has them; raises TypeError or ValueError naming argument, expected and got."""
    dims = check_sum(op, x, dim, keepdim, out_dtype)
    if type(correction) is not float or not math.isfinite(correction):
        fail(op, "correction", "be a finite number", repr(correction), TypeError)
    return dims


def check_width(op: str, n: int) -> None:
    """Raise ValueError unless a cluster holds a row of so many elements."""
    if n > MAX_COLUMNS:
        fail(op, "x", f"have at most {MAX_COLUMNS} elements a row", n)
