"""FlopCounterMode counts this library's products as torch's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = Sequence[int]


def register_formulas() -> None:
    """Register the formulas with torch; a counter copies them when it is made."""
    for name, formula in FORMULAS.items():
        register_flop_formula(getattr(torch.ops.cute_kernels, name))(formula)


# The arguments are those of the operators, shapes in place of tensors; what a formula does not need is in ``_``


def _gemm(
    a: Shape,
    b: Shape,
    d: Shape,
    z=None,
    bias=None,
    valid_k=None,
    activation=None,
    accumulate=False,
    trans_a=False,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * math.prod(d) * a[-2 if trans_a else -1]


def _log_prob(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def _log_prob_backward(
    dlog_prob, dentropy, x: Shape, weight: Shape, target, statistics, logits, dx, dweight, *_, **__
) -> int:
    """The logits are computed again unless kept, as the scores of torch's fused attention, which it counts, too."""
    return _log_prob(x, weight) * ((logits is None) + (dx is not None) + (dweight is not None))


def _projection(x: Shape, phi: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * phi[0]


def _projection_backward(
    x: Shape,
    phi: Shape,
    norm_weight,
    dH,
    dmean_square,
    dout,
    res,
    dlayer,
    pre,
    dx,
    dphi,
    dnorm_weight,
    n: int,
    *_,
    **__,
) -> int:
    """With a gradient of the residual also its product with res."""
    products = (dx is not None) + (dphi is not None or dnorm_weight is not None)
    return _projection(x, phi) * products + (0 if dout is None else 2 * math.prod(x) * n)


def _expand_combine(f, bias, post: Shape, x: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * post[-1]


def _expand_combine_backward(dout, f, bias, post: Shape, x: Shape, res, seed, dx, df, dpost, dres, *_, **__) -> int:
    return _expand_combine(f, bias, post, x) * ((dx is not None) + (dres is not None))


def _attention(
    q: Shape,
    k: Shape,
    v: Shape,
    causal=None,
    scale=None,
    left=None,
    right=None,
    softcap=None,
    sinks=None,
    cu_seqlens_q: Shape | None = None,
    cu_seqlens_k: Shape | None = None,
    *_: Any,
    **__: Any,
) -> int:
    """Both products of all queries and keys, as torch counts its own, causal or not.

    Packed sequences count as of the mean length: where they begin is not a shape.
    """
    return 2 * _scores(q, k, cu_seqlens_k) * (q[-1] + v[-1])


def _scores(q: Shape, k: Shape, cu_seqlens_k: Shape | None) -> int:
    keys = k[1] if cu_seqlens_k is None else k[0] // max(cu_seqlens_k[0] - 1, 1)
    return math.prod(q[:-1]) * keys


def _attention_backward(
    dout,
    q: Shape,
    k: Shape,
    v: Shape,
    out,
    lse,
    dlse=None,
    causal=None,
    scale=None,
    left=None,
    right=None,
    softcap=None,
    sinks=None,
    cu_seqlens_q: Shape | None = None,
    cu_seqlens_k: Shape | None = None,
    *_: Any,
    **__: Any,
) -> int:
    """Scores and the gradients of q and k are products over the head size of q, the two others over that of v."""
    return 2 * _scores(q, k, cu_seqlens_k) * (3 * q[-1] + 2 * v[-1])


def _attention_decode(
    q: Shape,
    k_cache: Shape,
    v_cache: Shape,
    cache_seqlens,
    page_table,
    cu_seqlens_q,
    sinks,
    out,
    lse,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *_: Any,
    **__: Any,
) -> int:
    """Both products of all queries with as many keys as the longest sequence may have: lengths are on the device."""
    return 2 * math.prod(q[:-1]) * max_seqlen_k * (q[-1] + v_cache[-1])


def _grouped(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    """The operations of all rows, those beyond the last group, too: their number is on the device."""
    return 2 * math.prod(a) * b[-1]


FORMULAS = {
    "attention_backward": _attention_backward,
    "attention_decode": _attention_decode,
    "attention_forward": _attention,
    "gemm": _gemm,
    "grouped_rows": _grouped,
    "grouped_rows_mxfp8": _grouped,
    "grouped_sums": _grouped,
    "grouped_sums_into": _grouped,
    "log_prob_forward": _log_prob,
    "log_prob_backward": _log_prob_backward,
    "mhc_projection_forward": _projection,
    "mhc_projection_backward": _projection_backward,
    "mhc_pre_forward": _projection,
    "mhc_expand_combine_forward": _expand_combine,
    "mhc_expand_combine_backward": _expand_combine_backward,
}
