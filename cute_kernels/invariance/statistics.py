"""Replacements of torch's logsumexp, cumsum, norms and variances.

As in ``aten.py``: a function takes an operator's arguments, and returns NotImplemented for those it has no kernel for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import canonicalize_dim, reduction_dims

from cute_kernels.reduction.config import MAX_COLUMNS
from cute_kernels.reduction.op import sum_dimensions
from cute_kernels.reduction.op_statistics import log_sum_exp, prefix_sums, spread, vector_norm
from cute_kernels.runtime.checks import FLOATS

Dims = int | Sequence[int] | None
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def named_dims(x: Tensor, dim: Dims) -> tuple[int, ...] | None:
    """Ascending; None where none is named: torch then has the whole tensor."""
    named = (dim,) if isinstance(dim, int) else tuple(dim or ())
    if not named:
        return None
    count = x.dim()
    if len(named) == 1 and -count <= named[0] < count:
        return (named[0] % count,)
    dims = reduction_dims(x.shape, named)  # takes 2 us (CPU)
    return tuple(sorted(dims)) if count else ()


def dims_over(x: Tensor, dim: Dims) -> tuple[int, ...]:
    """Ascending; all where none is named."""
    dims = named_dims(x, dim)
    return tuple(range(x.dim())) if dims is None else dims


def _takes(x: Tensor, dtype: torch.dtype | None = None) -> bool:
    return x.dtype in FLOATS and (dtype is None or dtype in FLOATS)


def _logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    dims = dims_over(x, dim)
    if not _takes(x) or math.prod(x.shape[d] for d in dims) > MAX_COLUMNS:
        return NotImplemented
    return log_sum_exp(x, dims, keepdim, x.dtype)[0]


def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if x.is_floating_point() and dtype in INTEGERS:
        return x.to(dtype).cumsum(dim, dtype=dtype)  # torch, too, converts before it adds
    if not _takes(x, dtype):
        return NotImplemented
    if not x.dim():
        return x.to(dtype or x.dtype, copy=True)
    return prefix_sums(x, canonicalize_dim(x.dim(), dim), dtype or x.dtype)


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if not _takes(x, dtype) or ord not in (1, 2, math.inf):
        return NotImplemented
    return vector_norm(x, float(ord), named_dims(x, dim), keepdim, dtype or x.dtype)


def _norm(x: Tensor, p: float | None = 2, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim)


def _dist(x: Tensor, y: Tensor, p: float = 2) -> Tensor:
    return _vector_norm(x - y, p)


def _foreach_norm(xs: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    found = [_vector_norm(x, ord, dtype=dtype) for x in xs]
    return NotImplemented if any(y is NotImplemented for y in found) else found


def _variance(root: bool) -> Callable[..., Any]:
    def function(x: Tensor, dim: Dims = None, *, correction: float | None = 1, keepdim: bool = False) -> Tensor:
        if not _takes(x):
            return NotImplemented
        return spread(x, named_dims(x, dim), 1.0 if correction is None else float(correction), root, keepdim, x.dtype)

    return function


def _variance_and_mean(root: bool) -> Callable[..., Any]:
    def function(
        x: Tensor, dim: Dims = None, *, correction: float | None = 1, keepdim: bool = False
    ) -> tuple[Tensor, Tensor]:
        y = _variance(root)(x, dim, correction=correction, keepdim=keepdim)
        if y is NotImplemented:
            return y
        count = math.prod(x.shape[d] for d in dims_over(x, dim))
        mean = sum_dimensions(x, named_dims(x, dim), 1.0 / count if count else math.nan, x.dtype)
        return y, mean.view(y.shape)

    return function


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "logsumexp.default": _logsumexp,
    "cumsum.default": _cumsum,
    "linalg_vector_norm.default": _vector_norm,
    "norm.Scalar": _norm,
    "norm.ScalarOpt_dim": _norm,
    "dist.default": _dist,
    "_foreach_norm.Scalar": _foreach_norm,
    "var.correction": _variance(False),
    "std.correction": _variance(True),
    "var_mean.correction": _variance_and_mean(False),
    "std_mean.correction": _variance_and_mean(True),
}
