"""logsumexp, cumsum, norm, norms, var and std on torch tensors: the public functions, allocation, autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.reduction import reference
from cute_kernels.reduction.checks import check_cumsum, check_list, check_norm, check_sum, check_variance, check_width
from cute_kernels.reduction.config import MAX_COLUMNS
from cute_kernels.reduction.launch_statistics import log_sum_exp_rows, prefix_sum_rows, variance_rows
from cute_kernels.reduction.op import sum_dimensions
from cute_kernels.runtime.autograd import apply, cast, first_derivative_only, moved
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import differentiates, mode_of, uses_reference
from cute_kernels.runtime.real import as_float

FP32 = torch.float32


def rows_of(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """(the others, ``dims``) as a matrix of rows; copied if it is none."""
    others = [d for d in range(x.dim()) if d not in dims]
    n = math.prod([x.shape[d] for d in dims])
    rows = math.prod([x.shape[d] for d in others])
    return x.permute((*others, *dims)).reshape(rows, n)


def shaped(y: Tensor, x: Tensor, dims: tuple[int, ...] | None, keepdim: bool) -> Tensor:
    """One value a row in the shape of x without ``dims``, all if None, or with size 1 there."""
    over = range(x.dim()) if dims is None else dims
    return y.view([1 if d in over else size for d, size in enumerate(x.shape) if keepdim or d not in over])


def count(x: Tensor, dims: tuple[int, ...] | None) -> int:
    """Elements of a row along ``dims``, all if None."""
    return x.numel() if dims is None else math.prod([x.shape[d] for d in dims])


def kept(y: Tensor, x: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    """Reshape y, which has x's shape without ``dims``, all if None, to have size 1 there."""
    return y.reshape([1 if dims is None or d in dims else size for d, size in enumerate(x.shape)])


def logsumexp(
    x: Tensor,
    dim: int | Sequence[int] = -1,
    *,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """``max(x) + log(sum(exp(x - max(x))))`` over dimensions.

    Args:
        x: bf16, fp16 or fp32 of any shape and strides; up to 262,144 elements are summed. A copy is made where ``dim``
            is not the last dimensions, or rows are not contiguous.
        dim: dimension or dimensions.
        keepdim: whether they stay, with size 1.
        out_dtype: bf16, fp16 or fp32; x's if None.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        x's shape without the dimensions.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32 arithmetic, one rounding at the end. An exponential of a bf16 or fp16 element is off by 2^-22 of itself.
        The order of a sum depends on its length and x's dtype alone: an element has the same bits in every batch. A row
        that is -inf throughout becomes -inf, one with +inf +inf. The gradient is ``exp(x - y) dy``, element by element
        in fp32.

    Example:
        >>> import torch
        >>> from cute_kernels.reduction import logsumexp
        >>> logsumexp(torch.zeros(2, 8)).exp().round()
        tensor([8., 8.])
    """
    if uses_reference("logsumexp", x, backend):
        return reference.logsumexp(x, dim, keepdim=keepdim, out_dtype=out_dtype)
    dims = check_sum("logsumexp", x, dim, keepdim, out_dtype)
    check_width("logsumexp", math.prod([x.shape[d] for d in dims]))
    call = x, dims, keepdim, out_dtype or x.dtype
    return apply(_LogSumExpFunction, *call) if differentiates(x) else log_sum_exp(*call)[0]


def log_sum_exp(x: Tensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(logsumexp over ``dims``, the same in fp32 and of the shape that broadcasts)."""
    rows = rows_of(x, dims)
    mode = mode_of(x)
    y = mode.empty(x, rows.shape[:1], FP32)
    mode.of(log_sum_exp_rows)(rows, y)
    return shaped(cast(y, dtype), x, dims, keepdim), kept(y, x, dims)


class _LogSumExpFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dims, keepdim, dtype):
        y, wide = log_sum_exp(x, dims, keepdim, dtype)
        ctx.save_for_backward(x, wide)
        ctx.dims = dims
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        shift = torch.where(y.isinf(), 0.0, y)  # as torch: of a row that is infinite
        dx = torch.exp(x.float() - shift) * kept(dy, x, ctx.dims).float()
        return dx.to(x.dtype), None, None, None


def cumsum(x: Tensor, dim: int = -1, *, out_dtype: torch.dtype | None = None, backend: Backend | None = None) -> Tensor:
    """Prefix sums along a dimension.

    Args:
        x: bf16, fp16 or fp32 of any shape and strides. A copy is made where ``dim`` is not the last dimension, or rows
            are not contiguous.
        dim: the dimension.
        out_dtype: bf16, fp16 or fp32; x's if None.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        x's shape.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32 sums, one rounding of each at the end. Element j is a function of elements 0 to j of its row alone, in an
        order that j fixes: a longer row moves no bit of it. Tiles of 1024 are summed as a tree, and one after the
        other. The gradient is the same sum from the end.

    Example:
        >>> import torch
        >>> from cute_kernels.reduction import cumsum
        >>> cumsum(torch.tensor([1.0, 2.0, 3.0]))
        tensor([1., 3., 6.])
    """
    if uses_reference("cumsum", x, backend):
        return reference.cumsum(x, dim, out_dtype=out_dtype)
    check_cumsum(x, dim, out_dtype)
    call = x, dim % x.dim(), out_dtype or x.dtype
    return apply(_CumSumFunction, *call) if differentiates(x) else prefix_sums(*call)


def prefix_sums(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """``cumsum`` of checked arguments."""
    last = x.movedim(dim, -1)
    rows = last.reshape(last.shape[:-1].numel(), last.shape[-1])
    if rows.shape[1] > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    mode = mode_of(x)
    y = mode.empty(x, tuple(last.shape), dtype)
    mode.of(prefix_sum_rows)(rows, y.view(rows.shape))
    return moved(y, -1, dim)


class _CumSumFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, dtype):
        ctx.call = dim, x.dtype
        return prefix_sums(x, dim, dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        dim, dtype = ctx.call
        return prefix_sums(dy.flip(dim), dim, dtype).flip(dim), None, None


def norm(
    x: Tensor,
    ord: float = 2.0,
    dim: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """A vector norm over dimensions.

    Args:
        x: bf16, fp16 or fp32 of any shape and strides; copied where ``sum`` copies.
        ord: 2: the root of the sum of squares; 1: the sum of magnitudes; inf: the largest magnitude.
        dim: dimension or dimensions; None: all.
        keepdim: whether they stay, with size 1.
        out_dtype: bf16, fp16 or fp32; x's if None.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        x's shape without the dimensions.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32 sums in the order of ``sum``, one rounding at the end. Squares are not rounded before they are added. As in
        torch they are not scaled: magnitudes beyond 1.8e19 give inf. The gradient is ``x dy / y``, 0 where y is 0.

    Example:
        >>> import torch
        >>> from cute_kernels.reduction import norm
        >>> norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), dim=1)
        tensor([5., 0.])
    """
    if uses_reference("norm", x, backend):
        return reference.norm(x, ord, dim, keepdim=keepdim, out_dtype=out_dtype)
    ord = as_float(ord)
    dims = check_norm(x, ord, dim, keepdim, out_dtype)
    call = x, ord, None if dim is None else dims, keepdim, out_dtype or x.dtype
    return apply(_NormFunction, *call) if differentiates(x) else vector_norm(*call)


def vector_norm(x: Tensor, ord: float, dims: tuple[int, ...] | None, keepdim: bool, dtype: torch.dtype) -> Tensor:
    """``norm`` of checked arguments; ``dims`` of None: of the whole tensor, as in ``sum_dimensions``."""
    if dims == ():
        y = x.float().abs()
    elif ord == 2.0:
        y = sum_dimensions(x, dims, 1.0, FP32, squares=True).sqrt()
    elif ord == 1.0:
        y = sum_dimensions(x.abs(), dims, 1.0, FP32)
    else:
        y = x.abs().amax(() if dims is None else dims)
    y = cast(y, dtype)
    return kept(y, x, dims) if keepdim else y


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ord, dims, keepdim, dtype):
        y = vector_norm(x, ord, dims, keepdim, FP32)
        ctx.save_for_backward(x, y)
        ctx.call = ord, dims
        return cast(y, dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        (x, y), (ord, dims) = ctx.saved_tensors, ctx.call
        y, dy = kept(y, x, dims), kept(dy, x, dims).float()
        if ord == 2.0:
            dx = x.float() * torch.where(y == 0, 0.0, dy / y)
        else:
            dx = x.sign().float() * dy
            if ord == math.inf:
                largest = x.abs() == y
                dx = torch.where(largest, dx if dims == () else dx / largest.sum(dims, keepdim=True), 0.0)
        return dx.to(x.dtype), None, None, None, None


def norms(xs: Sequence[Tensor], ord: float = 2.0, *, backend: Backend | None = None) -> list[Tensor]:
    """``norm`` of each of a list of tensors, all of its elements together: what clipping of gradients needs.

    Args:
        xs: bf16, fp16 or fp32 tensors of any shapes and strides.
        ord: 1, 2 or inf.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        A tensor without dimensions for each, of its dtype.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        Each has the bits of ``norm`` of it alone: an order that follows from its length.

    Example:
        >>> import torch
        >>> from cute_kernels.reduction import norms
        >>> norms([torch.ones(4), torch.ones(3, 3)])
        [tensor(2.), tensor(3.)]
    """
    check_list(xs)
    return [norm(x, ord, backend=backend) for x in xs]


def var(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    correction: float = 1.0,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Variance over dimensions: ``sum((x - mean(x))^2) / (n - correction)``.

    Args:
        x: bf16, fp16 or fp32 of any shape and strides. A copy is made where ``dim`` is not the last dimensions, or rows
            are not contiguous.
        dim: dimension or dimensions; None: all.
        correction: what is subtracted from the number of elements; 1: the unbiased estimate.
        keepdim: whether the dimensions stay, with size 1.
        out_dtype: bf16, fp16 or fp32; x's if None.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        x's shape without the dimensions.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32 arithmetic, centred before it is squared, one rounding at the end. The order of a sum depends on its length
        and x's dtype alone; of a whole tensor, ``dim`` of None, it is that of ``sum``. The gradient is
        ``2 (x - mean) dy / (n - correction)``.

    Example:
        >>> import torch
        >>> from cute_kernels.reduction import var
        >>> var(torch.tensor([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]]), dim=1)
        tensor([1., 0.])
    """
    return _spread("var", x, dim, correction, keepdim, out_dtype, backend)


def std(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    correction: float = 1.0,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Standard deviation over dimensions: the root of ``sum((x - mean(x))^2) / (n - correction)``.

    Args:
        x: bf16, fp16 or fp32 of any shape and strides. A copy is made where ``dim`` is not the last dimensions, or rows
            are not contiguous.
        dim: dimension or dimensions; None: all.
        correction: what is subtracted from the number of elements; 1: the unbiased estimate of the variance.
        keepdim: whether the dimensions stay, with size 1.
        out_dtype: bf16, fp16 or fp32; x's if None.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        x's shape without the dimensions.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        fp32 arithmetic, centred before it is squared, one rounding at the end. The order of a sum depends on its length
        and x's dtype alone; of a whole tensor, ``dim`` of None, it is that of ``sum``. The gradient is
        ``(x - mean) dy / ((n - correction) y)``, 0 where y is 0.

    Example:
        >>> import torch
        >>> from cute_kernels.reduction import std
        >>> std(torch.tensor([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]]), dim=1)
        tensor([1., 0.])
    """
    return _spread("std", x, dim, correction, keepdim, out_dtype, backend)


def _spread(
    op: str,
    x: Tensor,
    dim: int | Sequence[int] | None,
    correction: float,
    keepdim: bool,
    out_dtype: torch.dtype | None,
    backend: Backend | None,
) -> Tensor:
    if uses_reference(op, x, backend):
        function = getattr(reference, op)
        return function(x, dim, correction=correction, keepdim=keepdim, out_dtype=out_dtype)
    correction = as_float(correction)
    dims = check_variance(op, x, dim, correction, keepdim, out_dtype)
    call = x, None if dim is None else dims, correction, op == "std", keepdim, out_dtype or x.dtype
    return apply(_SpreadFunction, *call) if differentiates(x) else spread(*call)


def spread(
    x: Tensor, dims: tuple[int, ...] | None, correction: float, root: bool, keepdim: bool, dtype: torch.dtype
) -> Tensor:
    """The variance, or its root, of checked arguments; ``dims`` of None: of the whole tensor.

    That, and rows that no cluster holds, are centred in memory.
    """
    n = count(x, dims)
    scale = _inverse(n, correction)
    if dims is None or n > MAX_COLUMNS:
        mean = kept(sum_dimensions(x, dims, 1.0 / n if n else math.nan, FP32), x, dims)
        y = sum_dimensions(x.float() - mean, dims, scale, FP32, squares=True)
    else:
        rows = rows_of(x, dims)
        mode = mode_of(x)
        y = mode.empty(x, rows.shape[:1], FP32)
        mode.of(variance_rows)(rows, y, scale)
    y = y.sqrt() if root else y
    return shaped(cast(y, dtype), x, dims, keepdim)


def _inverse(n: int, correction: float) -> float:
    """1 / (n - correction): of so few elements that there is no estimate 0 / 0 or, as in torch, inf."""
    return 1.0 / (n - correction) if n > correction else math.inf


class _SpreadFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dims, correction, root, keepdim, dtype):
        y = spread(x, dims, correction, root, keepdim, FP32)
        ctx.save_for_backward(x, y)
        ctx.call = dims, correction, root
        return cast(y, dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        (x, y), (dims, correction, root) = ctx.saved_tensors, ctx.call
        y, dy = kept(y, x, dims), kept(dy, x, dims).float()
        n = count(x, dims)
        mean = kept(sum_dimensions(x, dims, 1.0 / n if n else math.nan, FP32), x, dims)
        factor = torch.where(y == 0, 0.0, dy / y) if root else 2.0 * dy
        dx = (x.float() - mean) * (factor * _inverse(n, correction))
        return dx.to(x.dtype), None, None, None, None, None
