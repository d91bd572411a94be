"""softmax, log_softmax, sum and mean in plain torch: the specification, and what runs without a supported GPU.

All in ``compute_dtype``, rounded once at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.reduction.checks import (
    check_cumsum,
    check_last,
    check_list,
    check_norm,
    check_softmax,
    check_sum,
    check_variance,
)
from cute_kernels.reduction.config import WHOLE_PART, WHOLE_SUMS, WHOLE_THREADS
from cute_kernels.runtime.real import as_float
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


def whole_sum(x: Tensor, squares: bool = False) -> Tensor:
    """The fp32 sum of a whole tensor, or of its squares, in the order of the kernels: for tests, bit by bit.

    Parts of WHOLE_PART elements are summed, then the parts' sums as one part more, however long. In a part running sum
    r of WHOLE_SUMS takes elements r, r + WHOLE_SUMS, ..., ascending, the squares fused. Then thread t of WHOLE_THREADS
    adds running sums t, t + WHOLE_THREADS, ..., ascending; a warp's 32 threads are added by halves, sum i and i + 16,
    then i + 8, 4, 2, 1; the warps ascending.
    """
    parts = x.reshape(-1).split(WHOLE_PART * 1024)  # memory for fp32
    partials = torch.cat([_part_sums(_padded(some, WHOLE_PART).view(-1, WHOLE_PART), squares) for some in parts])
    if len(partials) > 1:
        partials = _part_sums(_padded(partials, WHOLE_SUMS).unsqueeze(0), False)
    return partials.squeeze(0)


def _padded(x: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(x.float(), (0, -len(x) % multiple))


def _part_sums(parts: Tensor, squares: bool) -> Tensor:
    sums = parts.new_zeros(len(parts), WHOLE_SUMS)
    for values in parts.split(WHOLE_SUMS, 1):
        # Squares: one rounding, but where fp64 rounds to the middle of two fp32 numbers
        sums = (values.double().square() + sums.double()).float() if squares else sums + values
    sums = _ascending(sums.view(len(parts), -1, WHOLE_THREADS))
    sums = sums.view(len(parts), -1, 32)
    for width in (16, 8, 4, 2, 1):
        sums = sums[..., :width] + sums[..., width:]
    return _ascending(sums).squeeze(1)


def _ascending(x: Tensor) -> Tensor:
    """The sum over dimension 1, one after the other."""
    total = x[:, 0]
    for value in x.unbind(1)[1:]:
        total = total + value
    return total


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


def logsumexp(
    x: Tensor,
    dim: int | Sequence[int] = -1,
    *,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Logarithm of a sum of exponentials; see ``cute_kernels.reduction.logsumexp``."""
    dims = check_sum("logsumexp", x, dim, keepdim, out_dtype)
    return torch.logsumexp(x.to(compute_dtype), dims, keepdim).to(out_dtype or x.dtype)


def cumsum(
    x: Tensor, dim: int = -1, *, out_dtype: torch.dtype | None = None, compute_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Prefix sums; see ``cute_kernels.reduction.cumsum``."""
    check_cumsum(x, dim, out_dtype)
    return x.to(compute_dtype).cumsum(dim).to(out_dtype or x.dtype)


def norm(
    x: Tensor,
    ord: float = 2.0,
    dim: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A vector norm; see ``cute_kernels.reduction.norm``."""
    ord = as_float(ord)
    dims = check_norm(x, ord, dim, keepdim, out_dtype)
    wide = x.to(compute_dtype)
    found = torch.linalg.vector_norm(wide, ord, dims, keepdim) if dims else wide.abs()
    return found.to(out_dtype or x.dtype)


def norms(xs: Sequence[Tensor], ord: float = 2.0) -> list[Tensor]:
    """Norms of whole tensors; see ``cute_kernels.reduction.norms``."""
    check_list(xs)
    return [norm(x, ord) for x in xs]


def var(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    correction: float = 1.0,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Variance; see ``cute_kernels.reduction.var``."""
    correction = as_float(correction)
    dims = check_variance("var", x, dim, correction, keepdim, out_dtype)
    return _variance(x.to(compute_dtype), dims, correction, keepdim).to(out_dtype or x.dtype)


def std(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    *,
    correction: float = 1.0,
    keepdim: bool = False,
    out_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard deviation; see ``cute_kernels.reduction.std``."""
    correction = as_float(correction)
    dims = check_variance("std", x, dim, correction, keepdim, out_dtype)
    return _variance(x.to(compute_dtype), dims, correction, keepdim).sqrt().to(out_dtype or x.dtype)


def _variance(x: Tensor, dims: tuple[int, ...], correction: float, keepdim: bool) -> Tensor:
    count = math.prod(x.shape[d] for d in dims)
    mean = x.mean(dims, keepdim=True) if dims else x
    distances = (x - mean).square()
    return (distances.sum(dims, keepdim=keepdim) if dims else distances) / max(count - correction, 0.0)
