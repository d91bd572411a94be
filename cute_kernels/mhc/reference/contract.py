"""From the residual to the output of a model, without parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc.checks import check_contract, strict_tokens
from cute_kernels.mhc.reference.streams import streams_of


def contract(x: Tensor, *, layout: str = "streams", compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """The mean of the streams.

    Args:
        x: (..., n, C) for layout "streams", (..., C, n) for "channels"; bf16, fp16 or fp32.

    Returns:
        (..., C) in x's dtype.

    Raises:
        TypeError, ValueError: naming argument, expected and got.
    """
    check_contract(x, layout, compute_dtype=compute_dtype)
    strict_tokens("contract", x=(x, 2))
    return streams_of(x.to(compute_dtype), layout).mean(-2).to(x.dtype)
