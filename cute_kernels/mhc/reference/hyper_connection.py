"""A sublayer with its hyper-connection."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.mhc.checks import check_expand_combine, check_pre, check_sublayer, result_of, strict_tokens
from cute_kernels.mhc.reference.expand_combine import expand_combine
from cute_kernels.mhc.reference.pre import pre
from cute_kernels.mhc.variants import Variant, variant_of
from cute_kernels.runtime.real import as_float


def hyper_connection(
    x: Tensor,
    sublayer: Callable[[Tensor], Tensor],
    phi: Tensor,
    alpha: Tensor,
    beta: Tensor,
    *,
    norm_weight: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
    variant: str | Variant = "deepseek_v4",
    layout: str | None = None,
    res_orientation: str | None = None,
    precision: str = "tf32",
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``expand_combine(sublayer(layer_input), post, x, res)`` with what ``pre`` makes of x.

    Arguments as of ``pre`` and ``expand_combine``; ``layout`` and ``res_orientation`` are the variant's if None.
    ``sublayer`` maps (..., C) to (..., C), in x's dtype. x's gradient is summed in ``compute_dtype`` and rounded once.

    Returns:
        Like x.

    Raises:
        TypeError, ValueError: naming argument, expected and got.
    """
    op = "hyper_connection"
    variant, dropout_p = variant_of(op, variant), as_float(dropout_p)
    layout = variant.layout if layout is None else layout
    res_orientation = variant.res_orientation if res_orientation is None else res_orientation
    check_pre(x, phi, alpha, beta, norm_weight, layout, precision, op=op, compute_dtype=compute_dtype)
    strict_tokens(op, x=(x, 2))
    check_sublayer(sublayer, x, bias, dropout_p, seed, layout, res_orientation, compute_dtype=compute_dtype)
    wide = x.to(compute_dtype)
    options = {"layout": layout, "compute_dtype": compute_dtype}
    layer_input, post, res = pre(
        wide, phi, alpha, beta, norm_weight=norm_weight, variant=variant, precision=precision, op=op, **options
    )
    f = sublayer(layer_input.to(x.dtype))
    check_expand_combine(
        f, post, x, res, bias, dropout_p, seed, layout, res_orientation, op=op, compute_dtype=compute_dtype
    )
    strict_tokens(op, **{result_of(op): (f, 1)})
    out = expand_combine(
        f.to(compute_dtype),
        post,
        wide,
        res,
        bias=bias,
        dropout_p=dropout_p,
        seed=seed,
        res_orientation=res_orientation,
        **options,
    )
    return out.to(x.dtype)
