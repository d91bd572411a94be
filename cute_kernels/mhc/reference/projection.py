"""The products of a token with phi, and its mean square."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.mhc.checks import check_projection, strict_tokens
from cute_kernels.mhc.reference.product import product
from cute_kernels.runtime.autograd import widened


def projection(
    x: Tensor,
    phi: Tensor,
    *,
    norm_weight: Tensor | None = None,
    layout: str = "streams",
    precision: str = "tf32",
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """``H = x (phi * norm_weight)^T`` and ``mean_square = mean(x^2)``: equations 14 and 15, H not divided by the rms.

    Args:
        x: (..., n, C) for layout "streams", (..., C, n) for "channels"; bf16, fp16 or fp32.
        phi: (N, K) fp32 or bf16, K = n * C in x's memory order; N = n * n + 2 * n, or n for a head.
        norm_weight: (K,) fp32 or bf16, the weight of the RMS norm; None: 1.

    Returns:
        H (..., N) and mean_square (...,) in ``compute_dtype``.

    Raises:
        TypeError, ValueError: naming argument, expected and got.
    """
    check_projection(x, phi, norm_weight, layout, precision, compute_dtype=compute_dtype)
    strict_tokens("projection", x=(x, 2))
    rows = x.flatten(-2).to(compute_dtype)
    weight = widened("projection", "phi", phi, compute_dtype)
    if norm_weight is not None:
        weight = weight * widened("projection", "norm_weight", norm_weight, compute_dtype)
    H = product(rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1]), weight.t())
    return H.view(*rows.shape[:-1], H.shape[-1]), rows.square().mean(-1)
