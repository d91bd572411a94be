"""From the residual to the output of a model, with learned weights."""

from __future__ import annotations

from torch import Tensor

from cute_kernels.mhc import reference
from cute_kernels.mhc.checks import check_head
from cute_kernels.mhc.op.common import checked, takes_reference
from cute_kernels.mhc.op.composite import compute
from cute_kernels.mhc.variants import Variant, variant_of

OP = "head"


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
    backend: str | None = None,
) -> Tensor:
    """``sum_i pre_i x_i``, ``pre = sigmoid(scale * H / rms + base) + pre_eps``, H = x (fn * norm_weight)^T.

    rms = sqrt(mean_square + rms_eps), whatever the variant's rms_eps_placement: that of every system with such a head.

    Args:
        x, backend: as in ``aggregate``.
        fn: (n, K) fp32 or bf16, K = n * C in x's memory order.
        base: (n,) fp32 or bf16.
        scale: (1,) fp32 or bf16.
        norm_weight: (K,) fp32 or bf16; None: 1.
        variant: its rms_eps and pre_eps.
        layout: the variant's if None.
        precision: as in ``projection``.

    Returns:
        (..., C) in x's dtype.

    Raises: as ``aggregate``.

    Numerics: as ``pre``.
    """
    if takes_reference(OP, x, backend):
        return reference.head(
            x, fn, base, scale, norm_weight=norm_weight, variant=variant, layout=layout, precision=precision
        )
    variant = variant_of(OP, variant)
    layout = variant.layout if layout is None else layout
    return compute(
        OP,
        lambda: checked(check_head, x, fn, base, scale, norm_weight, layout, precision),
        *(x, fn, scale, base, norm_weight),
        variant,
        layout,
        precision,
    )[0][0]
