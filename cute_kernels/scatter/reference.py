"""embedding, embedding_backward and index_sum in plain torch: the specification, and what runs without a supported GPU.

All in ``compute_dtype``, rounded once at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_kernels.runtime.autograd import widened
from cute_kernels.scatter.checks import check_embedding, check_embedding_backward, check_index_sum


def embedding(ids: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """Rows of a table; see ``cute_kernels.scatter.embedding``."""
    check_embedding("embedding", ids, weight, padding_idx)
    return F.embedding(ids, widened("embedding", "weight", weight, weight.dtype), padding_idx)


def embedding_backward(
    dy: Tensor,
    ids: Tensor,
    num_rows: int,
    *,
    padding_idx: int | None = None,
    out_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gradient of the table; see ``cute_kernels.scatter.embedding_backward``."""
    check_embedding_backward("embedding_backward", dy, ids, num_rows, padding_idx, out_dtype)
    total = torch.zeros(num_rows, dy.shape[-1], dtype=compute_dtype, device=dy.device)
    total.index_add_(0, ids.reshape(-1), dy.reshape(ids.numel(), dy.shape[-1]).to(compute_dtype))
    if padding_idx is not None:
        total[padding_idx] = 0
    return total.to(out_dtype or dy.dtype)


def index_sum(
    x: Tensor, index: Tensor, source: Tensor, *, dim: int = 0, compute_dtype: torch.dtype = torch.float32
) -> Tensor:
    """x and what an index sends to its rows or elements; see ``cute_kernels.scatter.index_sum``."""
    elements = check_index_sum("index_sum", x, index, source, dim)
    total, source = x.to(compute_dtype), source.to(compute_dtype)
    if elements:
        return total.scatter_add(dim, index.long(), source).to(x.dtype)
    return total.index_add(dim, index, source).to(x.dtype)
