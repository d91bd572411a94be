"""From the residual to the output of a model, with learned weights."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc.checks import check_head, strict_tokens
from cute_kernels.mhc.reference.aggregate import aggregate
from cute_kernels.mhc.reference.coefficients import rms
from cute_kernels.mhc.reference.projection import projection
from cute_kernels.mhc.variants import Variant, variant_of
from cute_kernels.runtime.autograd import widened


def head(
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_weight: Tensor | None = None,
    variant: str | Variant = "deepseek_v4",
    layout: str | None = None,
    precision: str = "tf32",
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``sum_i pre_i x_i``, ``pre = sigmoid(scale * H / rms + base) + pre_eps``, H = x (fn * norm_weight)^T.

    rms = sqrt(mean_square + rms_eps), whatever the variant's rms_eps_placement: that of every system with such a head.

    Args:
        x: (..., n, C) for layout "streams", (..., C, n) for "channels"; bf16, fp16 or fp32.
        fn: (n, K) fp32 or bf16, K = n * C in x's memory order.
        base: (n,) fp32 or bf16.
        scale: (1,) fp32 or bf16.
        norm_weight: (K,) fp32 or bf16; None: 1.
        variant: its rms_eps and pre_eps.
        layout: the variant's if None.

    Returns:
        (..., C) in x's dtype.

    Raises:
        TypeError, ValueError: naming argument, expected and got.
    """
    variant = variant_of("head", variant)
    layout = variant.layout if layout is None else layout
    check_head(x, fn, base, scale, norm_weight, layout, precision, compute_dtype=compute_dtype)
    strict_tokens("head", x=(x, 2))
    wide = x.to(compute_dtype)
    fn = widened("head", "fn", fn, compute_dtype)
    norm_weight = None if norm_weight is None else widened("head", "norm_weight", norm_weight, compute_dtype)
    H, mean_square = projection(
        wide, fn, norm_weight=norm_weight, layout=layout, precision=precision, compute_dtype=compute_dtype
    )
    scale = widened("head", "scale", scale, compute_dtype)
    base = widened("head", "base", base, compute_dtype)
    pre = torch.sigmoid(scale * (H / rms(mean_square, variant.head_constants)[..., None]) + base) + variant.pre_eps
    return aggregate(wide, pre, layout=layout, compute_dtype=compute_dtype).to(x.dtype)
