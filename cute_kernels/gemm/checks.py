"""The argument contract of mm, bmm, linear and linear_log_prob, shared by the kernels and the references."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from cute_kernels.runtime.checks import (
    FLOATS,
    expect,
    expect_dtype,
    expect_float,
    expect_int,
    expect_like,
    expect_tensor,
)

INPUTS = (torch.bfloat16, torch.float16)
FP64 = (torch.float64,)
Activation = Literal["relu", "silu", "gelu"]
ACTIVATIONS = (None, *get_args(Activation))
# What divides the logits: its inverse, too, is far from the ends of fp32
TEMPERATURES = 1e-6, 1e6
MAX_SIZE = 2**31 - 2**9  # coordinates are 32-bit and run ahead of the last element by a tile


def check_mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None, out: Tensor | None, fp64: bool = False) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got. ``fp64``: the reference's, of fp64 operands."""
    floats = _check_operands("mm", a, b, out_dtype, 2, "be a matrix", fp64)
    if out is not None:
        expect_tensor("mm", "out", out)
        dtype = out_dtype or a.dtype
        if out_dtype is None:
            expect_dtype("mm", "out", out.dtype, floats)
        else:
            expect(out.dtype == dtype, "mm", "out", f"have dtype {dtype}", out.dtype, TypeError)
        expect_like("mm", "out", out, (a.shape[0], b.shape[1]), a.device)
        contiguous = out.shape[1] <= 1 or out.stride(1) == 1
        expect(contiguous, "mm", "out", "have a contiguous last dimension", f"strides {out.stride()}")
        separate = out.shape[0] <= 1 or out.stride(0) >= out.shape[1]
        expect(separate, "mm", "out", "have rows that do not overlap", f"strides {out.stride()}")
        if not is_compiling():  # a trace cannot ask: there the call of the operator fails
            expect(not out.is_neg(), "mm", "out", "hold its values in memory", "a view that is negated lazily")
        no_grad = not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or out.requires_grad))
        expect(no_grad, "mm", "out", "be None where a gradient is wanted", "a tensor")
        if forward_ad._current_level >= 0:
            no_tangent = all(forward_ad.unpack_dual(t).tangent is None for t in (a, b, out))
            expect(no_tangent, "mm", "out", "be None where a tangent is wanted", "a tensor")


def check_bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None, fp64: bool = False) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got. ``fp64``: as in ``check_mm``."""
    _check_operands("bmm", a, b, out_dtype, 3, "be a batch of matrices", fp64)
    entries = a.shape[0]
    if b.shape[0] != entries:  # as there
        expect(False, "bmm", "b", f"have {entries} matrices, as a has", f"shape {tuple(b.shape)}")
    # 32 bits count tiles, of which none has less than a row or a column to itself
    for name, t, what, size in (("a", a, "rows", a.shape[1]), ("b", b, "columns", b.shape[2])):
        if entries * size > MAX_SIZE:
            expect(False, "bmm", name, f"have at most {MAX_SIZE} {what}", f"{entries * size} in shape {tuple(t.shape)}")


def _check_operands(
    op: str, a: Tensor, b: Tensor, out_dtype: torch.dtype | None, dims: int, expected: str, fp64: bool
) -> tuple[torch.dtype, ...]:
    """Of a product, matrices or batches of them; returns the dtypes that a result may have."""
    inputs, floats = (FP64, FLOATS + FP64) if fp64 else (INPUTS, FLOATS)
    for name, t in (("a", a), ("b", b)):
        expect_tensor(op, name, t)
        expect_dtype(op, name, t.dtype, inputs)
        expect(t.dim() == dims, op, name, expected, f"shape {tuple(t.shape)}")
        fits = all(size <= MAX_SIZE for size in t.shape)
        expect(fits, op, name, f"have dimensions of at most {MAX_SIZE}", f"{tuple(t.shape)}")
    expect(b.dtype == a.dtype, op, "b", f"have dtype {a.dtype}", b.dtype, TypeError)
    if b.shape[-2] != a.shape[-1]:  # a message with a symbolic size in it makes that a constant of the graph
        expect(False, op, "b", f"have {a.shape[-1]} rows, as a has columns", f"shape {tuple(b.shape)}")
    expect(b.device == a.device, op, "b", f"be on {a.device}", b.device)
    if out_dtype is not None:
        expect_dtype(op, "out_dtype", out_dtype, floats)
    return floats


def check_separate(out: Tensor, *operands: Tensor) -> None:
    """Raise ValueError where a product would be written over an operand that is still read."""
    for name, operand in zip(("a", "b"), operands, strict=True):
        if _may_overlap(out, operand):
            expect(False, "mm", "out", f"not share memory with {name}", f"address {out.data_ptr():#x}")


def _may_overlap(out: Tensor, operand: Tensor) -> bool:
    """Whether two tensors may have an element in common; not if they are matrices, other columns of one matrix."""
    if not (out.numel() and operand.numel()):
        return False
    size = out.element_size()
    first, last = _extent(out)
    other_first, other_last = _extent(operand)
    if last <= other_first or other_last <= first:
        return False
    pitch, widths = out.stride(0) * size, []
    if out.dim() == 3 or pitch == 0:  # a batch, one row
        return True
    for t in (out, operand):
        rows, columns = (0, 1) if t.stride(1) == 1 else (1, 0)
        if t.stride(columns) != 1 or (t.shape[rows] > 1 and t.stride(rows) * t.element_size() != pitch):
            return True
        widths.append(t.shape[columns] * t.element_size())
    offset = (other_first - first) % pitch
    return offset < widths[0] or offset + widths[1] > pitch


def _extent(t: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and behind the last one."""
    steps = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (steps + 1) * t.element_size()


def check_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    activation: str | None,
    num_valid_tokens: Tensor | None,
    fp64: bool = False,
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got. ``fp64``: as in ``check_mm``."""
    inputs, floats = (FP64, FLOATS + FP64) if fp64 else (INPUTS, FLOATS)
    for name, t in (("x", x), ("weight", weight)):
        expect_tensor("linear", name, t)
        expect_dtype("linear", name, t.dtype, inputs)
        expect(
            all(size <= MAX_SIZE for size in t.shape),
            "linear",
            name,
            f"have dimensions of at most {MAX_SIZE}",
            t.shape,
        )
    expect(x.dim() >= 1, "linear", "x", "have at least one dimension", f"shape {tuple(x.shape)}")
    rows = math.prod(x.shape[:-1])  # numel() takes no symbolic sizes
    if rows > MAX_SIZE:  # as in check_mm
        expect(False, "linear", "x", f"have at most {MAX_SIZE} rows", f"{rows} in shape {tuple(x.shape)}")
    expect(weight.dim() == 2, "linear", "weight", "be a matrix (N, K)", f"shape {tuple(weight.shape)}")
    expect(weight.dtype == x.dtype, "linear", "weight", f"have dtype {x.dtype}", weight.dtype, TypeError)
    if weight.shape[1] != x.shape[-1]:
        expect(False, "linear", "weight", f"have {x.shape[-1]} columns, as x has", f"shape {tuple(weight.shape)}")
    expect(weight.device == x.device, "linear", "weight", f"be on {x.device}", weight.device)
    if bias is not None:
        expect_tensor("linear", "bias", bias)
        expect_dtype("linear", "bias", bias.dtype, floats)
        expect_like("linear", "bias", bias, (weight.shape[0],), x.device)
        expect(bias.is_contiguous(), "linear", "bias", "be contiguous", f"stride {bias.stride()}")
    check_epilogue("linear", out_dtype, activation, floats)
    if num_valid_tokens is not None:
        expect_tensor("linear", "num_valid_tokens", num_valid_tokens)
        expect_dtype("linear", "num_valid_tokens", num_valid_tokens.dtype, (torch.int32,))
        expect(
            num_valid_tokens.numel() == 1, "linear", "num_valid_tokens", "have one element", num_valid_tokens.numel()
        )
        expect(
            num_valid_tokens.device == x.device,
            "linear",
            "num_valid_tokens",
            f"be on {x.device}",
            num_valid_tokens.device,
        )


def check_epilogue(op: str, out_dtype: torch.dtype | None, activation: str | None, floats=FLOATS) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    if out_dtype is not None:
        expect_dtype(op, "out_dtype", out_dtype, floats)
    expect(activation in ACTIVATIONS, op, "activation", f"be one of {ACTIVATIONS}", repr(activation))


def check_log_prob(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, temperature: float, fp64: bool = False
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got. ``fp64``: as in ``check_mm``."""
    op, inputs = "linear_log_prob", FP64 if fp64 else INPUTS
    for name, t in (("x", x), ("weight", weight), ("target", target)):
        expect_tensor(op, name, t)
        expect_dtype(op, name, t.dtype, (torch.int64, torch.int32) if name == "target" else inputs)
        fits = all(size <= MAX_SIZE for size in t.shape)
        expect(fits, op, name, f"have dimensions of at most {MAX_SIZE}", f"shape {tuple(t.shape)}")
    expect(x.dim() >= 1, op, "x", "have at least one dimension", f"shape {tuple(x.shape)}")
    rows = math.prod(x.shape[:-1])
    if rows > MAX_SIZE:  # as in check_mm
        expect(False, op, "x", f"have at most {MAX_SIZE} rows", f"{rows} in shape {tuple(x.shape)}")
    expect(weight.dim() == 2, op, "weight", "be a matrix (V, K)", f"shape {tuple(weight.shape)}")
    expect(weight.dtype == x.dtype, op, "weight", f"have dtype {x.dtype}", weight.dtype, TypeError)
    if weight.shape[1] != x.shape[-1]:
        expect(False, op, "weight", f"have {x.shape[-1]} columns, as x has", f"shape {tuple(weight.shape)}")
    expect(weight.shape[0] > 0, op, "weight", "have at least one row", f"shape {tuple(weight.shape)}")
    expect(weight.device == x.device, op, "weight", f"be on {x.device}", weight.device)
    expect_like(op, "target", target, tuple(x.shape[:-1]), x.device)
    expect_int(op, "ignore_index", ignore_index)
    expect(-(2**63) <= ignore_index < 2**63, op, "ignore_index", "be an int of 64 bits", ignore_index)
    expect_float(op, "temperature", temperature)
    low, high = TEMPERATURES
    expect(low <= temperature <= high, op, "temperature", f"be between {low} and {high}", temperature)


def operands(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, str]:
    """x and weight with rows for TMA, and the dimension that the weight's neighbours lie along, "k" or "n".

    A single row has no stride to speak of, and gets one. A product over no k is one over zeros.

    Raises:
        ValueError: they have rows that TMA cannot read.
    """
    k = x.shape[1]
    if not k:
        return x.new_zeros(x.shape[0], 8), weight.new_zeros(weight.shape[0], 8), "k"
    x, weight = (
        t.as_strided(t.shape, (k + -k % 8, 1)) if t.shape[0] <= 1 and t.stride(1) == 1 else t for t in (x, weight)
    )
    for name, t, majors in (("x", x, ("k",)), ("weight", weight, ("k", "rows"))):
        got = f"shape {tuple(t.shape)}, strides {t.stride()}, address {t.data_ptr():#x}"
        expect(operand_major(t) in majors, "linear_log_prob", name, "have rows that start on 16 bytes", got)
    return x, weight, "k" if operand_major(weight) == "k" else "n"


def operand_major(t: Tensor) -> str | None:
    """The dimension of an operand (..., rows, k) that TMA reads along, "k" or "rows"; None if it cannot."""
    unit = 16 // t.element_size()
    if t.data_ptr() % 16 == 0 and (t.dim() == 2 or t.stride(0) % unit == 0):
        (rows, k), (of_rows, of_k) = t.shape[-2:], t.stride()[-2:]
        if of_k == 1 and of_rows % unit == 0 and of_rows >= k:
            return "k"
        if of_rows == 1 and of_k % unit == 0 and of_k >= rows:
            return "rows"
    return None
