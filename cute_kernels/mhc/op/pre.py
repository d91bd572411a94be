"""All that comes before a sublayer."""

from __future__ import annotations

from torch import Tensor

from cute_kernels.mhc import reference
from cute_kernels.mhc.checks import Precision, check_pre
from cute_kernels.mhc.op.composite import Options, connect
from cute_kernels.mhc.variants import Layout, Variant, variant_of
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import uses_reference

OP = "pre"


def pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    beta: Tensor,
    *,
    norm_weight: Tensor | None = None,
    variant: str | Variant = "deepseek_v4",
    layout: Layout | None = None,
    precision: Precision = "tf32",
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A sublayer's input from the streams: ``projection``, ``coefficients``, ``sinkhorn`` and ``aggregate`` in one.

    Args:
        x: (..., n, C) for layout "streams", (..., C, n) for "channels"; bf16, fp16 or fp32; n = 1, 2, 4 or 8, C from 8.
            A token is one piece of memory; the leading dimensions must collapse to tokens of one stride.
        phi: (n * n + 2 * n, K) fp32 or bf16, K = n * C in x's memory order.
        alpha: (3,) fp32 or bf16: the factors of pre, of post, of res.
        beta: (n * n + 2 * n,) fp32 or bf16.
        norm_weight: (K,) fp32 or bf16, the weight of the RMS norm; None: 1.
        variant: a name of ``VARIANTS`` or a ``Variant``.
        layout: "streams": the residual is (..., n, C); "channels": (..., C, n). None: the variant's.
        precision: accuracy of the products on tensor cores, which add bf16 parts of the factors in fp32. "tf32": parts
            up to 2^-16 of the largest, no less than tf32; "fp32": up to 2^-24.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        layer_input (..., C) in x's dtype; post (..., n) and res (..., n, n), fp32, for ``expand_combine`` with the
        variant's res_orientation.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        The bits of ``projection``, ``coefficients``, ``sinkhorn`` and ``aggregate`` one after the other, with gradients
        or without; a token's results and gradients have the same bits whatever the other tokens and their number. Two
        launches and one reading of x where clusters hold phi (see ``projection``), else three. The gradient of x is
        summed in fp32 and written once. Parameters' gradients are summed in a fixed order, without atomics; they go to
        their ``main_grad`` where that exists. A tensor hook on such a parameter is an error in the backward.

    Source:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880, equations 14 to 19.

    Example:
        >>> import torch
        >>> from cute_kernels import mhc
        >>> x, phi = torch.ones(3, 2, 8), torch.zeros(8, 16)
        >>> layer_input, post, res = mhc.pre(x, phi, torch.ones(3), torch.zeros(8), variant="liger")
        >>> layer_input.shape, post[0], res.sum(-1).allclose(torch.ones(3, 2))
        (torch.Size([3, 8]), tensor([1., 1.]), True)
    """
    if uses_reference(OP, x, backend):
        return reference.pre(
            x, phi, alpha, beta, norm_weight=norm_weight, variant=variant, layout=layout, precision=precision
        )
    variant = variant_of(OP, variant)
    layout = variant.layout if layout is None else layout
    check_pre(x, phi, alpha, beta, norm_weight, layout, precision)
    return connect(x, phi, alpha, beta, norm_weight, Options(OP, variant.constants, layout, precision))[:3]
