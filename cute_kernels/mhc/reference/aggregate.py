"""The input of a sublayer."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc.checks import check_aggregate, strict_tokens
from cute_kernels.mhc.reference.streams import streams_of


def aggregate(x: Tensor, pre: Tensor, *, layout: str = "streams", compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """``sum_i pre_i x_i``: the sum of the streams that a sublayer gets.

    Args:
        x: (..., n, C) for layout "streams", (..., C, n) for "channels"; bf16, fp16 or fp32.
        pre: (..., n) fp32.

    Returns:
        (..., C) in x's dtype.

    Raises:
        TypeError, ValueError: naming argument, expected and got.
    """
    check_aggregate(x, pre, layout, compute_dtype=compute_dtype)
    strict_tokens("aggregate", x=(x, 2), pre=(pre, 1))
    streams = streams_of(x.to(compute_dtype), layout)
    return (pre.to(compute_dtype)[..., None] * streams).sum(-2).to(x.dtype)
