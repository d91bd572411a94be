"""The argument contract of softmax, log_softmax, sum and mean, shared by the kernels and the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.reduction.config import MAX_COLUMNS
from cute_kernels.runtime.checks import expect, expect_dtype, expect_int, expect_tensor

MAX_ROWS = 2**31 - 2**24  # as of the norms


def check_softmax(op: str, x: Tensor, out_dtype: torch.dtype | None) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    expect_tensor(op, "x", x)
    expect_dtype(op, "x", x.dtype)
    expect(x.dim() >= 1, op, "x", "have at least one dimension", f"shape {tuple(x.shape)}")
    n = x.shape[-1]
    expect(n <= MAX_COLUMNS, op, "x", f"have at most {MAX_COLUMNS} columns", n)
    expect(n <= 1 or x.stride(-1) == 1, op, "x", "have a contiguous last dimension", f"stride {x.stride(-1)}")
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


def check_rows(op: str, rows: int) -> None:
    """Raise ValueError if there are more rows than a kernel counts in 32 bits."""
    expect(rows <= MAX_ROWS, op, "x", f"have at most {MAX_ROWS} rows", rows)


def check_columns(shape: Sequence[int], parts: int) -> None:
    """Raise ValueError if (matrices, rows, columns) summed over rows in so many parts take too many CTAs for a grid."""
    ctas = shape[0] * parts * -(-shape[2] // 32)  # at most; a warp has 32 columns and more
    fits = max(ctas, *shape) <= MAX_ROWS
    expect(fits, "sum", "x", f"have at most {MAX_ROWS} sums of 256 rows and 32 columns", f"shape {tuple(shape)}")


def check_sum(
    op: str, x: Tensor, dim: int | Sequence[int] | None, keepdim: bool, out_dtype: torch.dtype | None
) -> tuple[int, ...]:
    """The dimensions to sum over, ascending; raises TypeError or ValueError, naming argument, expected and got."""
    expect_tensor(op, "x", x)
    expect_dtype(op, "x", x.dtype)
    expect(isinstance(keepdim, bool), op, "keepdim", "be a bool", type(keepdim).__name__, TypeError)
    if out_dtype is not None:
        expect_dtype(op, "out_dtype", out_dtype)
    if dim is None:
        return tuple(range(x.dim()))
    dims = (dim,) if type(dim) is int else dim
    good = isinstance(dims, (tuple, list)) and all([type(d) is int for d in dims])
    expect(good, op, "dim", "be None, an int or ints", repr(dim), TypeError)
    expect(all([-x.dim() <= d < x.dim() for d in dims]), op, "dim", f"be of {x.dim()} dimensions", dim)
    dims = sorted([d % x.dim() for d in dims])
    expect(len({*dims}) == len(dims), op, "dim", "name each dimension once", dim)
    return tuple(dims)
