"""The argument contract of layer_norm and rms_norm, shared by the kernels and the reference."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, strided

from cute_kernels.runtime.checks import FLOATS, expect, expect_dtype, expect_floats, expect_like, expect_tensor, fail

Save = Literal["input", "output"]
MAX_COLUMNS = 262_144
UNDERFLOW, OVERFLOW = 2.0**-150, 2.0**128 - 2.0**103  # are 0 and infinite in fp32
MAX_ROWS = 2**31 - 2**24  # their indices are 32-bit and run ahead of the last by a resident grid's tiles in flight


def check_norm(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float,
    save: str,
    out_dtype: torch.dtype | None,
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    if not isinstance(x, Tensor) or x.layout is not strided or x.dtype not in FLOATS:
        expect_floats(op, "x", x)
    shape = x.shape
    if not shape:
        fail(op, "x", "have at least one dimension", "shape ()")
    n = shape[-1]
    if not 1 <= n <= MAX_COLUMNS:
        fail(op, "x", f"have between 1 and {MAX_COLUMNS} columns", n)
    rows = shape[0] if len(shape) == 2 else x.numel() // n
    if rows > MAX_ROWS:
        fail(op, "x", f"have at most {MAX_ROWS} rows", rows)
    if n > 1 and x.stride()[-1] != 1:
        fail(op, "x", "have a contiguous last dimension", f"stride {x.stride(-1)}")
    if weight is not None:
        _check_column(op, "weight", weight, n, x)
    if bias is not None:
        _check_column(op, "bias", bias, n, x)
    if residual is not None:
        expect_tensor(op, "residual", residual)
        if residual.dtype is not x.dtype and residual.dtype is not torch.float32:
            expect_dtype(op, "residual", residual.dtype, tuple(dict.fromkeys((x.dtype, torch.float32))))
        if residual.shape != shape or residual.device != x.device:
            expect_like(op, "residual", residual, tuple(shape), x.device)
        if n > 1 and residual.stride(-1) != 1:
            fail(op, "residual", "have a contiguous last dimension", f"stride {residual.stride(-1)}")
        if save == "output":
            check_options(op, eps, weight_offset, save, out_dtype)
            fail(op, "save", "be 'input' when there is a residual", repr(save))
    check_options(op, eps, weight_offset, save, out_dtype)


def _check_column(op: str, name: str, vector: Tensor, n: int, x: Tensor) -> None:
    if not isinstance(vector, Tensor) or vector.layout is not strided or vector.dtype not in FLOATS:
        expect_floats(op, name, vector)
    if vector.dim() != 1 or vector.numel() != n:
        fail(op, name, f"have shape {(n,)}, as x has {n} columns", tuple(vector.shape))
    index = vector.get_device()
    if index != x.get_device() or (index < 0 and vector.device != x.device):
        fail(op, name, f"be on {x.device}", vector.device)
    if not vector.is_contiguous():
        fail(op, name, "be contiguous", f"stride {vector.stride()}")


def check_options(op: str, eps: float, weight_offset: float, save: str, out_dtype: torch.dtype | None) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    good = type(eps) is float and UNDERFLOW < eps < OVERFLOW
    if not good:  # torch.compile traces no text of a number that is another at another call
        expect(False, op, "eps", "be a float, positive and finite in fp32", f"{eps!r} of type {type(eps).__name__}")
    good = type(weight_offset) is float and -OVERFLOW < weight_offset < OVERFLOW
    if not good:
        got = f"{weight_offset!r} of type {type(weight_offset).__name__}"
        expect(False, op, "weight_offset", "be a float, finite in fp32", got)
    if save != "input" and save != "output":
        fail(op, "save", "be 'input' or 'output'", repr(save))
    if out_dtype is not None:
        expect_dtype(op, "out_dtype", out_dtype)
