"""The residual at the input of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc.checks import check_expand, strict_tokens
from cute_kernels.mhc.reference.streams import streams_of


def expand(h: Tensor, n: int, *, layout: str = "streams", compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """n equal streams ``x_i = h``. The gradient is their sum, in ``compute_dtype``.

    Args:
        h: (..., C) bf16, fp16 or fp32.
        n: 1, 2, 4 or 8.

    Returns:
        (..., n, C) for layout "streams", (..., C, n) for "channels"; in h's dtype.

    Raises:
        TypeError, ValueError: naming argument, expected and got.
    """
    check_expand(h, n, layout, compute_dtype=compute_dtype)
    strict_tokens("expand", h=(h, 1))
    streams = h.to(compute_dtype)[..., None, :].expand(*h.shape[:-1], n, h.shape[-1])
    return streams_of(streams, layout).to(h.dtype).clone(memory_format=torch.contiguous_format)
