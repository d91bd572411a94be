"""A sublayer with its hyper-connection."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cute_kernels.mhc import reference
from cute_kernels.mhc.checks import Precision, check_pre, check_result, check_sublayer
from cute_kernels.mhc.op.composite import Options, connect
from cute_kernels.mhc.op.expand_combine import combine
from cute_kernels.mhc.variants import Layout, ResOrientation, Variant, variant_of
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import uses_reference
from cute_kernels.runtime.real import as_float

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
    layout: Layout | None = None,
    res_orientation: ResOrientation | None = None,
    precision: Precision = "tf32",
    backend: Backend | None = None,
) -> Tensor:
    """A sublayer with its hyper-connection: ``expand_combine(sublayer(layer_input), post, x, res)``.

    layer_input, post and res are the results of ``pre`` for x.

    Args:
        x: (..., n, C) for layout "streams", (..., C, n) for "channels"; bf16, fp16 or fp32; n = 1, 2, 4 or 8, C from 8.
            A token is one piece of memory; the leading dimensions must collapse to tokens of one stride.
        sublayer: maps (..., C) to (..., C), in x's dtype.
        phi: (n * n + 2 * n, K) fp32 or bf16, K = n * C in x's memory order.
        alpha: (3,) fp32 or bf16: the factors of pre, of post, of res.
        beta: (n * n + 2 * n,) fp32 or bf16.
        norm_weight: (K,) fp32 or bf16, the weight of the RMS norm; None: 1.
        bias: (C,) fp32 or bf16, added to the sublayer's output; None: 0.
        dropout_p: in [0, 1); each of the K = n * C elements of a token has a mask of its own, ``dropout_mask``'s.
        seed: int64 tensor of one element on x's device, or an int; None: drawn on the device from torch's generator
            where dropout_p > 0. It is not read on the host, and its mask is made again in the backward.
        variant: a name of ``VARIANTS`` or a ``Variant``.
        layout: "streams": the residual is (..., n, C); "channels": (..., C, n). None: the variant's.
        res_orientation: how the residual matrix is applied: "io": out_o = sum_i res[i, o] x_i; "oi": res[o, i]. None:
            the variant's.
        precision: accuracy of the products on tensor cores, which add bf16 parts of the factors in fp32. "tf32": parts
            up to 2^-16 of the largest, no less than tf32; "fp32": up to 2^-24.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        The new residual, of x's shape and dtype, contiguous.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels.

    Numerics:
        The bits of ``pre`` and ``expand_combine``: fp32, and a token's results and gradients have the same bits
        whatever the other tokens, but for its dropout mask, which depends on its place. The two ways of a gradient to x
        meet in fp32: x's gradient is written, and rounded, once. Parameters' gradients are summed in a fixed order,
        without atomics; they go to their ``main_grad`` where that exists. A tensor hook on such a parameter is an error
        in the backward.

    Source:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880.

    Example:
        >>> import torch
        >>> from cute_kernels import mhc
        >>> x = torch.ones(3, 2, 8)
        >>> phi, alpha, beta = torch.zeros(8, 16), torch.ones(3), torch.zeros(8)
        >>> mhc.hyper_connection(x, torch.zeros_like, phi, alpha, beta).sum(1)[0, 0].round(decimals=3)
        tensor(2.)
    """
    if uses_reference(OP, x, backend):
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
    check_pre(x, phi, alpha, beta, norm_weight, layout, precision, op=OP)
    check_sublayer(sublayer, x, bias, dropout_p, seed, layout, orientation)
    options = Options(OP, variant.constants, layout, precision, orientation)
    layer_input, post, res, residual, is_alias = connect(x, phi, alpha, beta, norm_weight, options)
    f = sublayer(layer_input)
    check_result(OP, f, x, layout)
    return combine(OP, f, post, residual, res, bias, dropout_p, seed, layout, orientation, is_alias)
