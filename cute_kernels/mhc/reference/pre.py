"""All that comes before a sublayer."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc.checks import check_pre, sizes, strict_tokens
from cute_kernels.mhc.reference.aggregate import aggregate
from cute_kernels.mhc.reference.coefficients import coefficients
from cute_kernels.mhc.reference.projection import projection
from cute_kernels.mhc.reference.sinkhorn import sinkhorn
from cute_kernels.mhc.variants import Variant, variant_of
from cute_kernels.runtime.autograd import widened


def pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    beta: Tensor,
    *,
    norm_weight: Tensor | None = None,
    variant: str | Variant = "deepseek_v4",
    layout: str | None = None,
    precision: str = "tf32",
    compute_dtype: torch.dtype = torch.float32,
    op: str = "pre",
) -> tuple[Tensor, Tensor, Tensor]:
    """``projection``, ``coefficients``, ``sinkhorn`` and ``aggregate``: a sublayer's input and what follows it.

    Args:
        x: (..., n, C) for layout "streams", (..., C, n) for "channels"; bf16, fp16 or fp32.
        phi: (n * n + 2 * n, K) fp32 or bf16, K = n * C in x's memory order.
        alpha: (3,) fp32 or bf16: of pre, of post, of res.
        beta: (n * n + 2 * n,) fp32 or bf16.
        norm_weight: (K,) fp32 or bf16; None: 1.
        variant: a name of ``VARIANTS`` or a Variant.
        layout: the variant's if None.
        op: what errors name.

    Returns:
        layer_input (..., C) in x's dtype; post (..., n) and res (..., n, n), in ``compute_dtype``, for
        ``expand_combine`` with the variant's res_orientation.

    Raises:
        TypeError, ValueError: naming argument, expected and got.
    """
    variant = variant_of(op, variant)
    layout = variant.layout if layout is None else layout
    check_pre(x, phi, alpha, beta, norm_weight, layout, precision, op=op, compute_dtype=compute_dtype)
    strict_tokens(op, x=(x, 2))
    n, _ = sizes(x, layout)
    phi, alpha, beta = (
        widened(op, name, t, compute_dtype) for name, t in (("phi", phi), ("alpha", alpha), ("beta", beta))
    )
    norm_weight = None if norm_weight is None else widened(op, "norm_weight", norm_weight, compute_dtype)
    wide = x.to(compute_dtype)  # once: its gradients are added in compute_dtype
    H, mean_square = projection(
        wide, phi, norm_weight=norm_weight, layout=layout, precision=precision, compute_dtype=compute_dtype
    )
    weights, post, logits = coefficients(H, mean_square, alpha, beta, n, variant=variant, compute_dtype=compute_dtype)
    res = sinkhorn(
        logits,
        iterations=variant.iterations,
        variant=variant.sinkhorn,
        eps=float(variant.sinkhorn_eps),
        compute_dtype=compute_dtype,
    )
    layer_input = aggregate(wide, weights, layout=layout, compute_dtype=compute_dtype)
    return layer_input.to(x.dtype), post, res
