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
    expect_floats,
    expect_int,
    expect_like,
    expect_tensor,
    fail,
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
    _check_operands("mm", a, b, out_dtype, 2, fp64)
    if out is not None:
        _check_out(a, b, out_dtype, out, FLOATS + FP64 if fp64 else FLOATS)


def _check_out(
    a: Tensor, b: Tensor, out_dtype: torch.dtype | None, out: Tensor, floats: tuple[torch.dtype, ...]
) -> None:
    expect_tensor("mm", "out", out)
    if out_dtype is None:
        expect_dtype("mm", "out", out.dtype, floats)
    elif out.dtype is not out_dtype:
        fail("mm", "out", f"have dtype {out_dtype}", out.dtype, TypeError)
    expect_like("mm", "out", out, (a.shape[0], b.shape[1]), a.device)
    if out.shape[1] > 1 and out.stride(1) != 1:
        fail("mm", "out", "have a contiguous last dimension", f"strides {out.stride()}")
    if out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        fail("mm", "out", "have rows that do not overlap", f"strides {out.stride()}")
    if not is_compiling() and out.is_neg():  # a trace cannot ask: there the call of the operator fails
        fail("mm", "out", "hold its values in memory", "a view that is negated lazily")
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or out.requires_grad):
        fail("mm", "out", "be None where a gradient is wanted", "a tensor")
    if forward_ad._current_level >= 0:
        no_tangent = all(forward_ad.unpack_dual(t).tangent is None for t in (a, b, out))
        expect(no_tangent, "mm", "out", "be None where a tangent is wanted", "a tensor")


def check_bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None, fp64: bool = False) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got. ``fp64``: as in ``check_mm``."""
    _check_operands("bmm", a, b, out_dtype, 3, fp64)
    (entries, rows, _), (matrices, _, columns) = a.shape, b.shape
    if matrices != entries:  # as there
        fail("bmm", "b", f"have {entries} matrices, as a has", f"shape {tuple(b.shape)}")
    # 32 bits count tiles, of which none has less than a row or a column to itself
    if entries * rows > MAX_SIZE:
        fail("bmm", "a", f"have at most {MAX_SIZE} rows", f"{entries * rows} in shape {tuple(a.shape)}")
    if entries * columns > MAX_SIZE:
        fail("bmm", "b", f"have at most {MAX_SIZE} columns", f"{entries * columns} in shape {tuple(b.shape)}")


def _check_operands(op: str, a: Tensor, b: Tensor, out_dtype: torch.dtype | None, dims: int, fp64: bool) -> None:
    """Of a product, matrices or batches of them."""
    inputs = FP64 if fp64 else INPUTS
    expect_floats(op, "a", a, inputs)
    expect_floats(op, "b", b, inputs)
    a_shape, b_shape = a.shape, b.shape
    if len(a_shape) != dims or len(b_shape) != dims:
        name, shape = ("a", a_shape) if len(a_shape) != dims else ("b", b_shape)
        fail(op, name, "be a matrix" if dims == 2 else "be a batch of matrices", f"shape {tuple(shape)}")
    for size in a_shape:
        if size > MAX_SIZE:
            fail(op, "a", f"have dimensions of at most {MAX_SIZE}", f"{tuple(a_shape)}")
    for size in b_shape:
        if size > MAX_SIZE:
            fail(op, "b", f"have dimensions of at most {MAX_SIZE}", f"{tuple(b_shape)}")
    if b.dtype is not a.dtype:
        fail(op, "b", f"have dtype {a.dtype}", b.dtype, TypeError)
    if b_shape[-2] != a_shape[-1]:  # a message with a symbolic size in it makes that a constant of the graph
        fail(op, "b", f"have {a_shape[-1]} rows, as a has columns", f"shape {tuple(b_shape)}")
    if b.device != a.device:
        fail(op, "b", f"be on {a.device}", b.device)
    if out_dtype is not None:
        expect_dtype(op, "out_dtype", out_dtype, FLOATS + FP64 if fp64 else FLOATS)


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
    _check_layer("linear", "N", x, weight, inputs)
    if bias is not None:
        expect_floats("linear", "bias", bias, floats)
        if bias.dim() != 1 or bias.shape[0] != weight.shape[0] or bias.device != x.device:
            expect_like("linear", "bias", bias, (weight.shape[0],), x.device)
        if not bias.is_contiguous():
            fail("linear", "bias", "be contiguous", f"stride {bias.stride()}")
    check_epilogue("linear", out_dtype, activation, floats)
    if num_valid_tokens is not None:
        op, name = "linear", "num_valid_tokens"
        expect_floats(op, name, num_valid_tokens, (torch.int32,))
        if num_valid_tokens.numel() != 1:
            fail(op, name, "have one element", num_valid_tokens.numel())
        if num_valid_tokens.device != x.device:
            fail(op, name, f"be on {x.device}", num_valid_tokens.device)


def _check_layer(op: str, features: str, x: Tensor, weight: Tensor, inputs: tuple[torch.dtype, ...]) -> None:
    """x (..., K) and weight (N, K), or whatever the number of ``features`` is called."""
    _check_sizes(op, "x", x, inputs)
    _check_sizes(op, "weight", weight, inputs)
    shape, weight_shape = x.shape, weight.shape
    if not shape:
        fail(op, "x", "have at least one dimension", f"shape {tuple(shape)}")
    if len(shape) > 2 and (rows := math.prod(shape[:-1])) > MAX_SIZE:  # numel() takes no symbolic sizes
        fail(op, "x", f"have at most {MAX_SIZE} rows", f"{rows} in shape {tuple(shape)}")
    if len(weight_shape) != 2:
        fail(op, "weight", f"be a matrix ({features}, K)", f"shape {tuple(weight_shape)}")
    if weight.dtype is not x.dtype:
        fail(op, "weight", f"have dtype {x.dtype}", weight.dtype, TypeError)
    if weight_shape[1] != shape[-1]:
        fail(op, "weight", f"have {shape[-1]} columns, as x has", f"shape {tuple(weight_shape)}")
    if weight.device != x.device:
        fail(op, "weight", f"be on {x.device}", weight.device)


def _check_sizes(op: str, name: str, t: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    expect_floats(op, name, t, dtypes)
    for size in t.shape:
        if size > MAX_SIZE:
            fail(op, name, f"have dimensions of at most {MAX_SIZE}", f"shape {tuple(t.shape)}")


def check_epilogue(
    op: str, out_dtype: torch.dtype | None, activation: str | None, floats: tuple[torch.dtype, ...] = FLOATS
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    if out_dtype is not None:
        expect_dtype(op, "out_dtype", out_dtype, floats)
    if activation is not None and activation not in ACTIVATIONS:
        fail(op, "activation", f"be one of {ACTIVATIONS}", repr(activation))


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
    for name, t, dims in (("x", x, (-1,)), ("weight", weight, (-1, -2))):
        got = f"shape {tuple(t.shape)}, strides {t.stride()}, address {t.data_ptr():#x}"
        expect(contiguous_dim(t, t.shape) in dims, "linear_log_prob", name, "have rows that start on 16 bytes", got)
    return x, weight, "k" if contiguous_dim(weight, weight.shape) == -1 else "n"


def contiguous_dim(t: Tensor, shape: tuple[int, ...]) -> int:
    """-1 or -2, the dimension of a matrix of halves, or of a batch, that TMA reads along; 0 if it reads none."""
    strides = t.stride()
    of_rows, of_columns = strides[-2], strides[-1]
    if t.data_ptr() & 15 or (len(strides) == 3 and strides[0] & 7):
        return 0
    if of_columns == 1 and not of_rows & 7 and of_rows >= shape[-1]:
        return -1
    if of_rows == 1 and not of_columns & 7 and of_columns >= shape[-2]:
        return -2
    return 0
