"""All that comes before a sublayer."""

from __future__ import annotations

from torch import Tensor

from cute_kernels.mhc import reference
from cute_kernels.mhc.checks import check_pre
from cute_kernels.mhc.op.common import checked, takes_reference
from cute_kernels.mhc.op.composite import compute
from cute_kernels.mhc.variants import Variant, variant_of

OP = "pre"


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
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``projection``, ``coefficients``, ``sinkhorn`` and ``aggregate``: a sublayer's input and what follows it.

    Args:
        x, backend: as in ``aggregate``.
        phi: (n * n + 2 * n, K) fp32 or bf16, K = n * C in x's memory order.
        alpha: (3,) fp32 or bf16: of pre, of post, of res.
        beta: (n * n + 2 * n,) fp32 or bf16.
        norm_weight: (K,) fp32 or bf16; None: 1.
        variant: a name of ``VARIANTS`` or a Variant.
        layout: the variant's if None.
        precision: as in ``projection``.

    Returns:
        layer_input (..., C) in x's dtype; post (..., n) and res (..., n, n), fp32, for ``expand_combine`` with the
        variant's res_orientation.

    Raises: as ``aggregate``.

    Numerics: the bits of the four operators one after the other, with gradients or without; their contracts. Two
    launches and one reading of x where clusters hold phi (see ``projection``), else three. The gradient of x is summed
    in fp32 and written once. Parameters' gradients go to their ``main_grad`` where that exists; a
    tensor hook on such a parameter is an error in the backward.

    Source: Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880, equations 14 to 19.
    """
    if takes_reference(OP, x, backend):
        return reference.pre(
            x, phi, alpha, beta, norm_weight=norm_weight, variant=variant, layout=layout, precision=precision
        )
    variant = variant_of(OP, variant)
    layout = variant.layout if layout is None else layout
    tensors = x, phi, alpha, beta, norm_weight
    return compute(OP, lambda: checked(check_pre, *tensors, layout, precision), *tensors, variant, layout, precision)[0]
