"""A sublayer with its hyper-connection."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cute_kernels._real import as_float
from cute_kernels.mhc import reference
from cute_kernels.mhc.checks import check_pre, check_sublayer
from cute_kernels.mhc.op.common import checked, takes_reference
from cute_kernels.mhc.op.composite import compute
from cute_kernels.mhc.op.expand_combine import combine
from cute_kernels.mhc.variants import Variant, variant_of

OP = "hyper_connection"


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
    backend: str | None = None,
) -> Tensor:
    """``expand_combine(sublayer(layer_input), post, x, res)`` with what ``pre`` makes of x.

    Args:
        x, phi, alpha, beta, norm_weight, variant, precision: as in ``pre``.
        sublayer: maps (..., C) to (..., C), in x's dtype.
        bias, dropout_p, seed: as in ``expand_combine``.
        layout, res_orientation: the variant's if None.
        backend: as in ``aggregate``.

    Returns:
        Like x, contiguous.

    Raises: as ``aggregate``.

    Numerics: the bits of ``pre`` and ``expand_combine``; their contracts. The two ways of a gradient to x meet in fp32:
    x's gradient is written, and rounded, once.

    Source: Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880.
    """
    if takes_reference(OP, x, backend):
        return reference.hyper_connection(
            x,
            sublayer,
            phi,
            alpha,
            beta,
            norm_weight=norm_weight,
            bias=bias,
            dropout_p=dropout_p,
            seed=seed,
            variant=variant,
            layout=layout,
            res_orientation=res_orientation,
            precision=precision,
        )
    variant, dropout_p = variant_of(OP, variant), as_float(dropout_p)
    layout = variant.layout if layout is None else layout
    orientation = variant.res_orientation if res_orientation is None else res_orientation
    tensors = x, phi, alpha, beta, norm_weight
    checked(check_pre, *tensors, layout, precision, op=OP)
    check_sublayer(sublayer, x, bias, dropout_p, seed, layout, orientation)
    (layer_input, post, res, *residual), owns = compute(OP, None, *tensors, variant, layout, precision, orientation)
    f = sublayer(layer_input)
    return combine(OP, f, post, *(residual or (x,)), res, bias, dropout_p, seed, layout, orientation, owns)
