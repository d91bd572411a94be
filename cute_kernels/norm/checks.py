"""The argument contract of layer_norm and rms_norm, shared by the kernels and the reference."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cute_kernels.runtime.checks import expect, expect_dtype, expect_like, expect_tensor

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
    expect_tensor(op, "x", x)
    expect_dtype(op, "x", x.dtype)
    expect(x.dim() >= 1, op, "x", "have at least one dimension", f"shape {tuple(x.shape)}")
    n = x.shape[-1]
    expect(1 <= n <= MAX_COLUMNS, op, "x", f"have between 1 and {MAX_COLUMNS} columns", n)
    expect(x.numel() // n <= MAX_ROWS, op, "x", f"have at most {MAX_ROWS} rows", x.numel() // n)
    expect(n == 1 or x.stride(-1) == 1, op, "x", "have a contiguous last dimension", f"stride {x.stride(-1)}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            expect_tensor(op, name, vector)
            expect_dtype(op, name, vector.dtype)
            good = vector.dim() == 1 and vector.shape[0] == n
            expect(good, op, name, f"have shape {(n,)}, as x has {n} columns", tuple(vector.shape))
            expect(vector.device == x.device, op, name, f"be on {x.device}", vector.device)
            expect(vector.is_contiguous(), op, name, "be contiguous", f"stride {vector.stride()}")
    if residual is not None:
        expect_tensor(op, "residual", residual)
        expect_dtype(op, "residual", residual.dtype, tuple(dict.fromkeys((x.dtype, torch.float32))))
        expect_like(op, "residual", residual, tuple(x.shape), x.device)
        contiguous = n == 1 or residual.stride(-1) == 1
        expect(contiguous, op, "residual", "have a contiguous last dimension", f"stride {residual.stride(-1)}")
    check_options(op, eps, weight_offset, save, out_dtype)
    expect(save == "input" or residual is None, op, "save", "be 'input' when there is a residual", repr(save))


def check_options(op: str, eps: float, weight_offset: float, save: str, out_dtype: torch.dtype | None) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    good = type(eps) is float and UNDERFLOW < eps < OVERFLOW
    if not good:  # torch.compile traces no text of a number that is another at another call
        expect(False, op, "eps", "be a float, positive and finite in fp32", f"{eps!r} of type {type(eps).__name__}")
    good = type(weight_offset) is float and -OVERFLOW < weight_offset < OVERFLOW
    if not good:
        got = f"{weight_offset!r} of type {type(weight_offset).__name__}"
        expect(False, op, "weight_offset", "be a float, finite in fp32", got)
    expect(save in ("input", "output"), op, "save", "be 'input' or 'output'", repr(save))
    if out_dtype is not None:
        expect_dtype(op, "out_dtype", out_dtype)
