"""From the residual to the output of a model, with learned weights."""

from __future__ import annotations

from torch import Tensor

from cute_kernels.mhc import reference
from cute_kernels.mhc.checks import Precision, check_head
from cute_kernels.mhc.op.composite import Options, connect
from cute_kernels.mhc.variants import Layout, Variant, variant_of
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import uses_reference

OP = "head"


def head(
    x: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_weight: Tensor | None = None,
    variant: str | Variant = "deepseek_v4",
    layout: Layout | None = None,
    precision: Precision = "tf32",
    backend: Backend | None = None,
) -> Tensor:
    """The streams' weighted sum at a model's end, with learned weights: ``sum_i pre_i x_i``.

    ``pre = sigmoid(scale * H / rms + base) + pre_eps``, H = x (fn * norm_weight)^T. rms = sqrt(mean_square + rms_eps),
    whatever the variant's rms_eps_placement: every system with such a head puts eps there.

    Args:
        x: (..., n, C) for layout "streams", (..., C, n) for "channels"; bf16, fp16 or fp32; n = 1, 2, 4 or 8, C from 8.
            A token is one piece of memory; the leading dimensions must collapse to tokens of one stride.
        fn: (n, K) fp32 or bf16, K = n * C in x's memory order.
        base: (n,) fp32 or bf16.
        scale: (1,) fp32 or bf16.
        norm_weight: (K,) fp32 or bf16, the weight of the RMS norm; None: 1.
        variant: a name of ``VARIANTS`` or a ``Variant``: its rms_eps and pre_eps count.
        layout: "streams": the residual is (..., n, C); "channels": (..., C, n). None: the variant's.
        precision: accuracy of the products on tensor cores, which add bf16 parts of the factors in fp32. "tf32": parts
            up to 2^-16 of the largest, no less than tf32; "fp32": up to 2^-24.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (..., C) in x's dtype.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        The bits of ``projection``, the sigmoid and ``aggregate`` one after the other, with gradients or without; a
        token's output and gradients have the same bits whatever the other tokens and their number. Two launches and one
        reading of x where clusters hold phi (see ``projection``), else three. The gradient of x is summed in fp32 and
        written once. Parameters' gradients are summed in a fixed order, without atomics; they go to their ``main_grad``
        where that exists. A tensor hook on such a parameter is an error in the backward.

    Source:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880.

    Example:
        >>> import torch
        >>> from cute_kernels import mhc
        >>> x = torch.ones(3, 2, 8)
        >>> y = mhc.head(x, torch.zeros(2, 16), torch.zeros(2), torch.ones(1), variant="liger")
        >>> y.shape, y[0, 0].item()  # sigmoid(0) of each of two streams
        (torch.Size([3, 8]), 1.0)
    """
    if uses_reference(OP, x, backend):
        return reference.head(
            x, fn, base, scale, norm_weight=norm_weight, variant=variant, layout=layout, precision=precision
        )
    variant = variant_of(OP, variant)
    layout = variant.layout if layout is None else layout
    check_head(x, fn, base, scale, norm_weight, layout, precision)
    return connect(x, fn, scale, base, norm_weight, Options(OP, variant.head_constants, layout, precision))[0]
