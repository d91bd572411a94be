"""Kernels in place of torch's operators inside ``batch_invariant``: by name, on the tensors below autograd.

A replacement returns NotImplemented where it does not take the arguments (fp64, say).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import canonicalize_dim

from cute_kernels.gemm import fp32, grouped_mm
from cute_kernels.gemm.launch import gemm
from cute_kernels.invariance import fused_attention, indexed, losses, statistics
from cute_kernels.norm.checks import check_norm
from cute_kernels.norm.launch import norm_backward, norm_forward
from cute_kernels.reduction.config import MAX_COLUMNS
from cute_kernels.reduction.launch import softmax_backward, softmax_forward
from cute_kernels.reduction.op import sum_dimensions
from cute_kernels.runtime.checks import FLOATS, expect
from cute_kernels.runtime.operators import empty
from cute_kernels.runtime.rows import contiguous_rows

HALVES = (torch.bfloat16, torch.float16)


# Products


def _takes(a: Tensor, b: Tensor, c: Tensor | None = None) -> bool:
    """Whether the tensors are of one half precision on one GPU."""
    dtype, device = a.dtype, a.device
    if dtype not in HALVES or b.dtype != dtype or b.device != device:
        return False
    return c is None or (c.dtype == dtype and c.device == device)


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, *, dims: int = 2) -> Tensor:
    """The product of matrices, or of batches of them where ``dims`` is 3."""
    good = a.dim() == b.dim() == dims and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
    if not good or a.dtype != b.dtype:
        return NotImplemented
    if not _takes(a, b):
        # One product an element is the same in every batch, in any dtype
        if a.shape[-1] == 1 and out_dtype in (None, a.dtype):
            return a * b
        if a.dtype == torch.float32 and a.device == b.device and out_dtype in (None, *FLOATS):
            return fp32.product(a, b, out_dtype or a.dtype)
        return NotImplemented
    d = a.new_empty(*a.shape[:-1], b.shape[-1], dtype=out_dtype or a.dtype)
    gemm(a, b, d, None, None, None, None, False, False, True)
    return d


def _addmm(
    c: Tensor,
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    beta: float = 1,
    alpha: float = 1,
    dims: int = 2,
) -> Tensor:
    if c.dtype not in (a.dtype, out_dtype):
        return NotImplemented
    fits = dims == 2 and c.shape == b.shape[1:] and c.is_contiguous() and a.shape[1:] == b.shape[:1]
    if fits and alpha == beta == 1 and _takes(a, b, c if c.dtype == a.dtype else None):
        d = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype)
        gemm(a, b, d, None, c, None, None, False, False, True)
        return d
    product = _mm(a, b, torch.float32, dims=dims)
    return product if product is NotImplemented else _added(c, product, beta, alpha, out_dtype or a.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer in half precision: one product of all rows, the bias added before the product is rounded."""
    if not _takes(x, weight, bias) or weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        return NotImplemented
    n, k = weight.shape
    if bias is not None and (bias.shape != (n,) or not bias.is_contiguous()):
        return NotImplemented
    shape = x.shape
    y = empty(x, (*shape[:-1], n), x.dtype)
    if len(shape) == 2:
        gemm(x, weight, y, None, bias, None, None, False, False, False)
    elif y.numel():
        gemm(x.reshape(-1, k), weight, y.view(-1, n), None, bias, None, None, False, False, False)
    return y


def _added(c: Tensor, product: Tensor, beta: float, alpha: float, dtype: torch.dtype) -> Tensor:
    """beta c + alpha product in fp32; with a beta of 0 whatever c holds."""
    result = product if alpha == 1 else product * alpha
    c = c.expand(product.shape)
    return (result if beta == 0 else torch.add(result, c.float(), alpha=float(beta))).to(dtype)


def _mv(a: Tensor, v: Tensor) -> Tensor:
    result = _mm(a, v.unsqueeze(1))
    return result if result is NotImplemented else result.squeeze(1)


def _addmv(c: Tensor, a: Tensor, v: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    result = _mm(a, v.unsqueeze(1), torch.float32) if c.dtype == a.dtype else NotImplemented
    return result if result is NotImplemented else _added(c, result.squeeze(1), beta, alpha, a.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    result = _mm(a.unsqueeze(0), b.unsqueeze(1))
    return result if result is NotImplemented else result.view(())


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """In all four forms."""
    if bias is not None or not _takes(a, b):
        return NotImplemented
    return grouped_mm(a, b, offs, out_dtype=out_dtype)


# Sums


def _is_float(*tensors: Tensor) -> bool:
    return all(t.dtype in FLOATS for t in tensors)


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None, log: bool) -> Tensor:
    """Any dimension: one that is not the last, or not contiguous, is copied first."""
    dim = canonicalize_dim(x.dim(), dim)
    if not _is_float(x) or (x.dim() and x.shape[dim] > MAX_COLUMNS):
        return NotImplemented
    last = _rows_along(x, dim)
    y = torch.empty_like(last, dtype=dtype or x.dtype)
    softmax_forward(last, y, log)
    return _from_rows(y, x.shape, dim)


def _softmax_backward(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, log: bool) -> Tensor:
    if not _is_float(dy, y) or (y.dim() and y.shape[dim] > MAX_COLUMNS):
        return NotImplemented
    rows = _rows_along(y, dim)
    dx = torch.empty_like(rows, dtype=dtype)
    softmax_backward(rows, _rows_along(dy, dim), dx, log)
    return _from_rows(dx, y.shape, dim)


def _rows_along(x: Tensor, dim: int) -> Tensor:
    """x as contiguous rows along a dimension."""
    if not x.dim():
        return x.view(1, 1)
    x = x.movedim(dim, -1)
    return contiguous_rows(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]))


def _from_rows(rows: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    if not shape:
        return rows.view(())
    dim %= len(shape)
    if dim == len(shape) - 1:
        return rows.view(shape)
    moved = [size for d, size in enumerate(shape) if d != dim]
    return rows.view(*moved, shape[dim]).movedim(-1, dim).contiguous()


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    y = _softmax(x, dim, dtype, False)
    if y is NotImplemented:
        return y
    return y.masked_fill((x == -math.inf).all(dim, keepdim=True), 0.0)


def _sum(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    mean: bool = False,
) -> Tensor:
    dtype = dtype or x.dtype
    if not _is_float(x) or dtype not in FLOATS:
        return NotImplemented
    dims, shape = statistics.named_dims(x, dim), x.shape
    over = range(len(shape)) if dims is None else dims
    count = math.prod([shape[d] for d in over])
    scale = (1.0 / count if count else math.nan) if mean else 1.0
    y = sum_dimensions(x, dims, scale, dtype)
    return y.view([1 if d in over else size for d, size in enumerate(shape)]) if keepdim else y


def _nansum(
    x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return _sum(x.masked_fill(x.isnan(), 0), dim, keepdim, dtype=dtype)


def _trace(x: Tensor) -> Tensor:
    expect(x.dim() == 2, "trace", "self", "be a matrix", tuple(x.shape))
    return _sum(x.diagonal())


# Norms


def _norm_rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    n = math.prod(shape)
    return contiguous_rows(x.reshape(x.numel() // n, n))


def _norm(kind: str, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float | None):
    """(y, statistics (1 or 2, ..., 1 for each of ``shape``)), rstd and mean; or NotImplemented."""
    given = [t for t in (x, weight, bias) if t is not None]
    if not _is_float(*given) or not 0 < math.prod(shape) <= MAX_COLUMNS:
        return NotImplemented
    eps = torch.finfo(torch.float32).eps if eps is None else float(eps)
    if not eps > 0:
        return NotImplemented
    rows = _norm_rows(x, shape)
    y = torch.empty_like(rows)
    statistics = x.new_empty(2 if kind == "layer" else 1, len(rows), dtype=torch.float32)
    columns = [None if t is None else t.contiguous().view(-1) for t in (weight, bias)]
    check_norm(f"{kind}_norm", rows, *columns, None, eps, 0.0, "input", None)
    norm_forward(rows, None, *columns, y, None, statistics, kind, eps, 0.0)
    outer = x.shape[: x.dim() - len(shape)]
    return y.view(x.shape), statistics.view(len(statistics), *outer, *(1 for _ in shape))


def _norm_backward(
    kind: str, dy: Tensor, x: Tensor, shape: Sequence[int], statistics: list[Tensor], weight, bias, mask
) -> tuple[Tensor | None, ...]:
    given = [t for t in (dy, x, weight, bias) if t is not None]
    if not _is_float(*given) or not 0 < math.prod(shape) <= MAX_COLUMNS:
        return NotImplemented
    rows, dy_rows = _norm_rows(x, shape), _norm_rows(dy, shape)
    statistics = torch.stack([t.reshape(-1) for t in statistics])
    columns = [None if t is None else t.contiguous().view(-1) for t in (weight, bias)]
    dx = torch.empty_like(rows) if mask[0] else None
    dw, db = (
        torch.empty_like(t) if wanted and t is not None else None for t, wanted in zip(columns, mask[1:], strict=True)
    )
    if any(t is not None for t in (dx, dw, db)):
        arguments = columns[0], None, statistics, dx, None, dw, db
        norm_backward(rows, dy_rows, None, *arguments, kind, "input", 1.0, 0.0, False, False)
    return (
        None if dx is None else dx.view(x.shape),
        None if dw is None else dw.view(weight.shape),
        None if db is None else db.view(bias.shape),
    )


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float):
    result = _norm("layer", x, shape, weight, bias, eps)
    if result is NotImplemented:
        return result
    y, (rstd, mean) = result
    return y, mean, rstd


def _layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, mask):
    return _norm_backward("layer", dy, x, shape, [rstd, mean], weight, bias, mask)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None):
    result = _norm("rms", x, shape, weight, None, eps)
    return result if result is NotImplemented else (result[0], result[1][0])


def _rms_norm_backward(dy, x, shape, rstd, weight, mask):
    result = _norm_backward("rms", dy, x, shape, [rstd], weight, None, (*mask, False))
    return result if result is NotImplemented else result[:2]


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "linear.default": linear,
    "mm.default": _mm,
    "mm.dtype": _mm,
    "addmm.default": _addmm,
    "addmm.dtype": _addmm,
    "bmm.default": functools.partial(_mm, dims=3),
    "bmm.dtype": functools.partial(_mm, dims=3),
    "baddbmm.default": functools.partial(_addmm, dims=3),
    "baddbmm.dtype": functools.partial(_addmm, dims=3),
    "mv.default": _mv,
    "addmv.default": _addmv,
    "dot.default": _dot,
    "vdot.default": _dot,
    "_grouped_mm.default": _grouped_mm,
    "_softmax.default": lambda x, dim, half_to_float: _softmax(x, dim, _widened(x, half_to_float), False),
    "_log_softmax.default": lambda x, dim, half_to_float: _softmax(x, dim, _widened(x, half_to_float), True),
    "_safe_softmax.default": _safe_softmax,
    "_softmax_backward_data.default": functools.partial(_softmax_backward, log=False),
    "_log_softmax_backward_data.default": functools.partial(_softmax_backward, log=True),
    "sum.default": _sum,
    "sum.dim_IntList": _sum,
    "mean.default": functools.partial(_sum, mean=True),
    "mean.dim": functools.partial(_sum, mean=True),
    "nansum.default": _nansum,
    "trace.default": _trace,
    "native_layer_norm.default": _layer_norm,
    "native_layer_norm_backward.default": _layer_norm_backward,
    "_fused_rms_norm.default": _rms_norm,
    "_fused_rms_norm_backward.default": _rms_norm_backward,
    **fused_attention.REPLACEMENTS,
    **indexed.REPLACEMENTS,
    **losses.REPLACEMENTS,
    **statistics.REPLACEMENTS,
}


def _widened(x: Tensor, half_to_float: bool) -> torch.dtype:
    return torch.float32 if half_to_float else x.dtype
