"""softmax, log_softmax, sum and mean on torch tensors: the public functions, allocation, autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.reduction import reference
from cute_kernels.reduction.checks import check_last, check_softmax, check_sum
from cute_kernels.reduction.launch import softmax_backward, softmax_forward, sum_rows, sum_squares, sum_whole
from cute_kernels.runtime.autograd import apply, as_rows, cast, first_derivative_only, gradient_rows
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import differentiates, mode_of, uses_reference


def softmax(
    x: Tensor, dim: int = -1, *, out_dtype: torch.dtype | None = None, backend: Backend | None = None
) -> Tensor:
    """``exp(x - max(x)) / sum(exp(x - max(x)))`` over the last dimension.

    Args:
        x: (..., N) bf16, fp16 or fp32; N up to 262,144; last dimension contiguous; the leading dimensions must collapse
            to rows of one stride.
        dim: the last dimension, as in torch; for another one ``movedim`` it.
        out_dtype: bf16, fp16 or fp32; x's if None.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        The probabilities, of x's shape.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32 arithmetic, one rounding at the end. A row of the result, and of the gradient of x, has the same bits
        whatever the number of rows and its place among them, in matrices of the same dtypes and the same alignment of
        rows. A row that is -inf throughout, or has +inf or NaN in it, becomes NaN. An incoming gradient without
        contiguous rows is copied.

    Example:
        >>> import torch
        >>> from cute_kernels.reduction import softmax
        >>> softmax(torch.tensor([[0.0, 0.0, float("-inf")]]))
        tensor([[0.5000, 0.5000, 0.0000]])
    """
    return _softmax("softmax", x, dim, out_dtype, backend)


def log_softmax(
    x: Tensor, dim: int = -1, *, out_dtype: torch.dtype | None = None, backend: Backend | None = None
) -> Tensor:
    """``x - max(x) - log(sum(exp(x - max(x))))`` over the last dimension.

    Args:
        x: (..., N) bf16, fp16 or fp32; N up to 262,144; last dimension contiguous; the leading dimensions must collapse
            to rows of one stride.
        dim: the last dimension, as in torch; for another one ``movedim`` it.
        out_dtype: bf16, fp16 or fp32; x's if None.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        The log-probabilities, of x's shape.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32 arithmetic, one rounding at the end. A row of the result, and of the gradient of x, has the same bits
        whatever the number of rows and its place among them, in matrices of the same dtypes and the same alignment of
        rows. A row that is -inf throughout, or has +inf or NaN in it, becomes NaN. An incoming gradient without
        contiguous rows is copied.

    Example:
        >>> import torch
        >>> from cute_kernels.reduction import log_softmax
        >>> log_softmax(torch.tensor([[0.0, 0.0]])).round(decimals=3)
        tensor([[-0.6930, -0.6930]])
    """
    return _softmax("log_softmax", x, dim, out_dtype, backend)


def _softmax(op: str, x: Tensor, dim: int, out_dtype: torch.dtype | None, backend: Backend | None) -> Tensor:
    if type(dim) is not int or dim != -1:
        check_last(op, x, dim)
    if uses_reference(op, x, backend):
        return getattr(reference, op)(x, out_dtype=out_dtype)
    check_softmax(op, x, out_dtype)
    if differentiates(x):
        return apply(_SoftmaxFunction, x, op, out_dtype)
    return _softmax_forward(x, op, out_dtype)


def _softmax_forward(x: Tensor, op: str, out_dtype: torch.dtype | None) -> Tensor:
    rows = as_rows(op, "x", x)
    mode = mode_of(x)
    y = mode.empty(x, x.shape, out_dtype or x.dtype)
    mode.of(softmax_forward)(rows, as_rows(op, "y", y), op == "log_softmax")
    return y


class _SoftmaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, op, out_dtype):
        y = _softmax_forward(x, op, out_dtype)
        ctx.save_for_backward(y)
        ctx.call = op, x.dtype
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        (y,), (op, dtype) = ctx.saved_tensors, ctx.call
        mode = mode_of(y, dy)
        dx, rows = mode.empty(y, y.shape, dtype), gradient_rows(dy, mode.eager)
        mode.of(softmax_backward)(as_rows(op, "y", y), rows, as_rows(op, "dx", dx), op == "log_softmax")
        return dx, None, None


def sum(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Sum over dimensions.

    Args:
        x: bf16, fp16 or fp32 of any shape and strides; a copy is made where dimensions that are summed together, or
            those before or behind them, do not collapse to one, or the last ones are not contiguous.
        dim: dimension or dimensions to sum over; None: all, with one kernel for tensors of all sizes.
        keepdim: whether they stay, with size 1.
        out_dtype: bf16, fp16 or fp32; x's if None.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        The sums: x's shape without the dimensions summed over.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32 sums, one rounding at the end. The order of a sum depends on its length and its place in x's shape (the
        last dimensions, others, or, where ``dim`` is None, the whole tensor); it does not depend on the number of sums.
        That of a whole tensor follows from its length alone: docs/numerics.md has it. Rows that are off the alignment
        which they would have in a contiguous tensor are copied.

    Example:
        >>> import torch
        >>> from cute_kernels.reduction import sum
        >>> sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), dim=-1)
        tensor([3., 7.])
    """
    return _reduce("sum", x, dim, keepdim, out_dtype, backend)


def mean(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Mean over dimensions: their sum times 1 / their number.

    Args:
        x: bf16, fp16 or fp32 of any shape and strides; a copy is made where dimensions that are summed together, or
            those before or behind them, do not collapse to one, or the last ones are not contiguous.
        dim: dimension or dimensions to average over; None: all, with one kernel for tensors of all sizes.
        keepdim: whether they stay, with size 1.
        out_dtype: bf16, fp16 or fp32; x's if None.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        The means: x's shape without the dimensions averaged over.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        The sum, in the order of ``sum``, and its product with 1 / the number are fp32; one rounding at the end. Rows
        that are off the alignment which they would have in a contiguous tensor are copied.

    Example:
        >>> import torch
        >>> from cute_kernels.reduction import mean
        >>> mean(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), dim=0, keepdim=True)
        tensor([[2., 3.]])
    """
    return _reduce("mean", x, dim, keepdim, out_dtype, backend)


def _reduce(op: str, x: Tensor, dim, keepdim: bool, out_dtype: torch.dtype | None, backend: Backend | None) -> Tensor:
    if uses_reference(op, x, backend):
        return getattr(reference, op)(x, dim, keepdim=keepdim, out_dtype=out_dtype)
    dims = check_sum(op, x, dim, keepdim, out_dtype)
    count = math.prod([x.shape[d] for d in dims])
    scale = 1.0 if op == "sum" else 1.0 / count if count else math.nan
    call = x, None if dim is None else dims, scale, out_dtype or x.dtype
    y = apply(_SumFunction, *call) if differentiates(x) else sum_dimensions(*call)
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
    return y.view(shape) if keepdim else y


class _SumFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dims, scale, dtype):
        ctx.call = x.shape, x.dtype, dims, scale
        return sum_dimensions(x, dims, scale, dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        shape, dtype, dims, scale = ctx.call
        dx = dy if scale == 1.0 else dy.float() * scale
        dx = dx.to(dtype).view([1 if dims is None or d in dims else size for d, size in enumerate(shape)])
        return dx.expand(shape), None, None, None


def sum_dimensions(
    x: Tensor, dims: tuple[int, ...] | None, scale: float, dtype: torch.dtype, squares: bool = False
) -> Tensor:
    """``scale`` times the sums, or those of squares, over ``dims``, ascending: neighbours together, the last first.

    ``dims`` of None: the whole tensor, in its own order. If ``dims`` names all dimensions, the order is that of a row.
    """
    if dims is None:
        mode = mode_of(x)
        y = mode.empty(x, (1,), dtype)
        mode.of(sum_whole)(x.reshape(1, -1), y, scale, squares)
        return y.view(())
    runs: list[list[int]] = []
    for d in dims:
        if runs and runs[-1][-1] == d - 1:
            runs[-1].append(d)
        else:
            runs.append([d])
    if not runs:
        return cast((x.float().square() if squares else x.float()) * scale, dtype)  # never x itself
    shape, mode = list(x.shape), mode_of(x)
    for i, run in enumerate(reversed(runs)):
        first, behind = run[0], run[-1] + 1
        sizes = [math.prod(shape[:first]), math.prod(shape[first:behind])]
        if behind < len(shape):  # by its place, not its size: one sum beside no other has the bits of one of many
            sizes.append(math.prod(shape[behind:]))
        x = x.reshape(sizes)
        if len(sizes) == 3 and sizes[2] > 1 and x.stride(2) != 1:
            x = x.contiguous()
        last = i == len(runs) - 1
        y = mode.empty(x, (sizes[0], *sizes[2:]), dtype if last else torch.float32)
        mode.of(sum_squares if squares and i == 0 else sum_rows)(x, y, scale if last else 1.0)
        del shape[first:behind]
        x = y
    return x.view(shape)
