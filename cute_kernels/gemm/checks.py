"""The argument contract of mm, bmm and linear, shared by the kernels and the references."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from cute_kernels.gemm.config_mxfp8 import BLOCK
from cute_kernels.runtime.checks import (
    FLOATS,
    FP64,
    HALVES,
    MAX_SIZE,
    expect,
    expect_dtype,
    expect_floats,
    expect_layer,
    expect_like,
    expect_tensor,
    fail,
)
from cute_kernels.runtime.operators import differentiates

Activation = Literal["relu", "silu", "gelu"]
ACTIVATIONS = (None, *get_args(Activation))


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
    """The operands of a product: matrices, or batches of them."""
    inputs = FP64 if fp64 else HALVES
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
    inputs, floats = (FP64, FLOATS + FP64) if fp64 else (HALVES, FLOATS)
    expect_layer("linear", "N", x, weight, inputs)
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


def check_epilogue(
    op: str, out_dtype: torch.dtype | None, activation: str | None, floats: tuple[torch.dtype, ...] = FLOATS
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    if out_dtype is not None:
        expect_dtype(op, "out_dtype", out_dtype, floats)
    if activation is not None and activation not in ACTIVATIONS:
        fail(op, "activation", f"be one of {ACTIVATIONS}", repr(activation))


MAX_GROUPS = 1024


def check_grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    out_dtype: torch.dtype | None,
    accumulate_into: Tensor | None,
    fp64: bool = False,
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got. ``fp64``: as in ``check_mm``."""
    op, inputs = "grouped_mm", FP64 if fp64 else HALVES
    expect_floats(op, "a", a, inputs)
    expect_floats(op, "b", b, inputs)
    a_shape, b_shape = a.shape, b.shape
    for name, shape in (("a", a_shape), ("b", b_shape)):
        if len(shape) not in (2, 3):
            fail(op, name, "be a matrix or a batch of matrices", f"shape {tuple(shape)}")
        for size in shape:
            if size > MAX_SIZE:
                fail(op, name, f"have dimensions of at most {MAX_SIZE}", f"shape {tuple(shape)}")
    if b.dtype is not a.dtype:
        fail(op, "b", f"have dtype {a.dtype}", b.dtype, TypeError)
    if b.device != a.device:
        fail(op, "b", f"be on {a.device}", b.device)
    if b_shape[-2] != a_shape[-1]:
        fail(op, "b", f"have {a_shape[-1]} rows, as a has columns", f"shape {tuple(b_shape)}")
    groups = a_shape[0] if len(a_shape) == 3 else b_shape[0] if len(b_shape) == 3 else None
    if len(a_shape) == len(b_shape) == 3:
        if b_shape[0] != groups:
            fail(op, "b", f"have {groups} matrices, as a has", f"shape {tuple(b_shape)}")
        if offs is not None:
            fail(op, "offs", "be None for two batches of matrices", type(offs).__name__)
    elif offs is None:
        fail(op, "offs", "be given where a or b is a matrix", None)
    else:
        _check_offs(offs, groups, a.device)
    if out_dtype is not None:
        expect_dtype(op, "out_dtype", out_dtype, FLOATS + FP64 if fp64 else FLOATS)
    if accumulate_into is not None:
        _check_accumulate_into(a, b, offs, out_dtype, accumulate_into, FP64 if fp64 else (torch.float32,))


def check_grouped_mm_mxfp8(
    a: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor | None,
    out_dtype: torch.dtype | None,
    accumulate_into: Tensor | None,
) -> None:
    """Raise TypeError or ValueError, naming argument, expected and got."""
    op = "grouped_mm"
    expect_floats(op, "a", a, (torch.bfloat16,))
    if a.dim() != 2:
        fail(op, "a", "be a matrix with b_scale", f"shape {tuple(a.shape)}")
    for size in a.shape:
        if size > MAX_SIZE:
            fail(op, "a", f"have dimensions of at most {MAX_SIZE}", f"shape {tuple(a.shape)}")
    check_mxfp8_matrices(op, "b", b, "b_scale", b_scale, True)
    for name, t in (("b", b), ("b_scale", b_scale)):
        if t.device != a.device:
            fail(op, name, f"be on {a.device}", t.device)
    if b.shape[1] != a.shape[1]:
        fail(op, "b", f"have {a.shape[1]} rows, as a has columns", f"shape {tuple(b.shape)}")
    if offs is None:
        fail(op, "offs", "be given where a or b is a matrix", None)
    _check_offs(offs, b.shape[0], a.device)
    if out_dtype is not None:
        expect_dtype(op, "out_dtype", out_dtype, FLOATS)
    if accumulate_into is not None:
        fail(op, "accumulate_into", "be None with b_scale", type(accumulate_into).__name__)
    if differentiates(a, b):
        fail(op, "b_scale", "be None where a gradient is wanted", "a tensor")


def check_mxfp8_matrices(op: str, name: str, q: Tensor, scale_name: str, scale: Tensor, transposed: bool) -> None:
    """Raise TypeError or ValueError unless q is e4m3 (E, N, K), or if ``transposed`` the transpose, with its scales."""
    expect_floats(op, name, q, (torch.float8_e4m3fn,))
    expect_floats(op, scale_name, scale, (torch.float8_e8m0fnu,))
    wanted = "(E, K, N)" if transposed else "(E, N, K)"
    if q.dim() != 3 or q.shape[1] % BLOCK or q.shape[2] % BLOCK:
        fail(op, name, f"have shape {wanted} of multiples of {BLOCK}", f"shape {tuple(q.shape)}")
    for size in q.shape:
        if size > MAX_SIZE:
            fail(op, name, f"have dimensions of at most {MAX_SIZE}", f"shape {tuple(q.shape)}")
    rows = q.mT if transposed else q
    if not rows.is_contiguous():
        fail(
            op, name, "be the transpose of contiguous ones" if transposed else "be contiguous", f"strides {q.stride()}"
        )
    experts, n, k = rows.shape
    if tuple(scale.shape) != (experts, n, k // BLOCK):
        fail(op, scale_name, f"have shape {(experts, n, k // BLOCK)}", tuple(scale.shape))
    if not scale.is_contiguous():
        fail(op, scale_name, "be contiguous", f"strides {scale.stride()}")


def _check_offs(offs: Tensor, groups: int | None, device: torch.device) -> None:
    op = "grouped_mm"
    expect_floats(op, "offs", offs, (torch.int32,))
    if offs.dim() != 1:
        fail(op, "offs", "have one dimension", f"shape {tuple(offs.shape)}")
    if groups is not None and offs.shape[0] != groups:
        fail(op, "offs", f"have {groups} elements, as there are matrices", offs.shape[0])
    if offs.shape[0] > MAX_GROUPS:
        fail(op, "offs", f"have at most {MAX_GROUPS} elements", offs.shape[0])
    if offs.device != device:
        fail(op, "offs", f"be on {device}", offs.device)
    if not offs.is_contiguous():
        fail(op, "offs", "be contiguous", f"stride {offs.stride()}")


def _check_accumulate_into(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    out_dtype: torch.dtype | None,
    target: Tensor,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    op, name = "grouped_mm", "accumulate_into"
    if a.dim() != 2 or b.dim() != 2:
        fail(
            op,
            name,
            "be None where the rows of groups are not summed over",
            f"a of {a.dim()}, b of {b.dim()} dimensions",
        )
    expect_floats(op, name, target, dtypes)
    expect_like(op, name, target, (offs.shape[0], a.shape[0], b.shape[1]), a.device)
    if not target.is_contiguous():
        fail(op, name, "be contiguous", f"strides {target.stride()}")
    if out_dtype is not None:
        fail(op, "out_dtype", f"be None with {name}", out_dtype)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or target.requires_grad):
        fail(op, name, "be None where a gradient is wanted", "a tensor")
