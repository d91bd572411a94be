"""The residual after a sublayer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.mhc.checks import check_expand_combine, strict_tokens
from cute_kernels.mhc.reference.dropout import draw_seed, dropout_mask
from cute_kernels.mhc.reference.product import product
from cute_kernels.mhc.reference.streams import streams_of
from cute_kernels.runtime.autograd import widened
from cute_kernels.runtime.real import as_float


def expand_combine(
    f: Tensor,
    post: Tensor,
    x: Tensor,
    res: Tensor,
    *,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
    layout: str = "streams",
    res_orientation: str = "io",
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``out_o = dropout((f + bias) post_o) + sum_i R(i, o) x_i``: the sublayer's output added to the mixed streams.

    Args:
        f: (..., C) in x's dtype, the sublayer's output.
        post: (..., n) fp32.
        x: (..., n, C) for layout "streams", (..., C, n) for "channels"; bf16, fp16 or fp32.
        res: (..., n, n) fp32.
        bias: (C,) fp32 or bf16, the sublayer's; None: 0.
        dropout_p: in [0, 1); each of the K elements of a token has a mask of its own, ``dropout_mask``'s.
        seed: int64 tensor of one element on x's device, or an int; None: drawn from torch's generator
            where dropout_p > 0.
        res_orientation: "io": R(i, o) = res[i, o]; "oi": R(i, o) = res[o, i].

    Returns:
        Like x.

    Raises:
        TypeError, ValueError: naming argument, expected and got.
    """
    dropout_p = as_float(dropout_p)
    check_expand_combine(f, post, x, res, bias, dropout_p, seed, layout, res_orientation, compute_dtype=compute_dtype)
    k = x.shape[-2] * x.shape[-1]
    strict_tokens("expand_combine", f=(f, 1), post=(post, 1), x=(x, 2), res=(res, 2))
    update = f.to(compute_dtype)
    if bias is not None:
        update = update + widened("expand_combine", "bias", bias, compute_dtype)
    added = streams_of(post.to(compute_dtype)[..., None] * update[..., None, :], layout)
    if dropout_p > 0.0:
        tokens = math.prod(x.shape[:-2])
        seed = draw_seed(x.device) if seed is None else seed
        mask = dropout_mask(seed, tokens, k, dropout_p, x.device).view(x.shape)
        # As torch's dropout: NaN of infinities that are dropped
        added = added * (mask.to(compute_dtype) * (1.0 / (1.0 - dropout_p)))
    matrix = res.to(compute_dtype)
    if res_orientation == "io":
        matrix = matrix.transpose(-1, -2)
    mixed = streams_of(product(matrix, streams_of(x.to(compute_dtype), layout)), layout)
    return (added + mixed).to(x.dtype).contiguous()
