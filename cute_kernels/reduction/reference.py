"""softmax, log_softmax, sum and mean in plain torch: the specification, and what runs without a supported GPU.

All in ``compute_dtype``, rounded once at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.reduction.checks import check_last, check_softmax, check_sum
from cute_kernels.runtime.strict import strict_rows


def softmax(
    x: Tensor, dim: int = -1, *, out_dtype: torch.dtype | None = None, compute_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Softmax over the last dimension; see ``cute_kernels.reduction.softmax``."""
    check_last("softmax", x, dim)
    check_softmax("softmax", x, out_dtype)
    strict_rows("softmax", x=x)
    return torch.softmax(x.to(compute_dtype), -1).to(out_dtype or x.dtype)


def log_softmax(
    x: Tensor, dim: int = -1, *, out_dtype: torch.dtype | None = None, compute_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Logarithm of the softmax over the last dimension; see ``cute_kernels.reduction.log_softmax``."""
    check_last("log_softmax", x, dim)
    check_softmax("log_softmax", x, out_dtype)
    strict_rows("log_softmax", x=x)
    return torch.log_softmax(x.to(compute_dtype), -1).to(out_dtype or x.dtype)


def sum(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Sum over dimensions; see ``cute_kernels.reduction.sum``."""
    dims = check_sum("sum", x, dim, keepdim, out_dtype)
    total = x.to(compute_dtype).sum(dims, keepdim=keepdim) if dims else x.to(compute_dtype, copy=True)
    return total.to(out_dtype or x.dtype)


def mean(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Mean over dimensions; see ``cute_kernels.reduction.mean``."""
    dims = check_sum("mean", x, dim, keepdim, out_dtype)
    total = sum(x, dims, keepdim=keepdim, out_dtype=compute_dtype, compute_dtype=compute_dtype)
    count = math.prod(x.shape[d] for d in dims)
    return (total / count).to(out_dtype or x.dtype)
