"""From the projection of a token to what it is mixed with."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc.checks import check_coefficients, strict_tokens
from cute_kernels.mhc.variants import Variant, variant_of
from cute_kernels.runtime.autograd import widened


def coefficients(
    H: Tensor,
    mean_square: Tensor,
    alpha: Tensor,
    beta: Tensor,
    n: int,
    *,
    variant: str | Variant,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """``h = alpha * H / rms + beta``; ``pre = sigmoid(h) + pre_eps``, ``post = post_mult * sigmoid(h)``, res logits h.

    Equations 16 to 18. rms = sqrt(mean_square + rms_eps), or sqrt(mean_square) + rms_eps, as the variant says.

    Args:
        H: (..., N) fp32, N = n * n + 2 * n: columns [pre n | post n | res n * n].
        mean_square: (...,) fp32.
        alpha: (3,) fp32 or bf16: of pre, of post, of res.
        beta: (N,) fp32 or bf16.
        n: number of streams, 1, 2, 4 or 8.

    Returns:
        pre (..., n), post (..., n), res_logits (..., n, n) in ``compute_dtype``, contiguous.

    Raises:
        TypeError, ValueError: naming argument, expected and got.

    A token of zeros has no gradient of its mean square where eps is outside the root, as of a norm at 0.
    """
    variant = variant_of("coefficients", variant)
    check_coefficients(H, mean_square, alpha, beta, n, compute_dtype=compute_dtype)
    strict_tokens("coefficients", H=(H, 1))
    alpha = widened("coefficients", "alpha", alpha, compute_dtype)
    beta = widened("coefficients", "beta", beta, compute_dtype)
    normalised = H.to(compute_dtype) / rms(mean_square.to(compute_dtype), variant)[..., None]
    widths = (n, n, n * n)
    groups = zip(alpha, normalised.split(widths, -1), beta.split(widths), strict=True)
    pre, post, res = ((scale * part + shift).contiguous() for scale, part, shift in groups)
    return (
        torch.sigmoid(pre) + variant.pre_eps,
        variant.post_mult * torch.sigmoid(post),
        res.unflatten(-1, (n, n)),
    )


def rms(mean_square: Tensor, variant: Variant) -> Tensor:
    """The root mean square of a token with the variant's eps."""
    if variant.rms_eps_placement == "inside":
        return torch.sqrt(mean_square + variant.rms_eps)
    positive = ~(mean_square <= 0)  # NaN, too
    root = torch.sqrt(torch.where(positive, mean_square, 1.0))
    return torch.where(positive, root, 0.0) + variant.rms_eps
