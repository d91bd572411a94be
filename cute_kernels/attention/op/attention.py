"""attention on torch tensors: the public function."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from cute_kernels.attention import reference
from cute_kernels.attention.checks import (
    DENSE,
    KERNEL_DTYPES,
    Lengths,
    Window,
    check_attention,
    check_layout,
    check_out,
    check_sizes,
    check_values,
)
from cute_kernels.attention.op.gradients import (
    CALLS,
    AttentionCall,
    check_differentiable,
    differentiable_attention,
    forward,
)
from cute_kernels.runtime.autograd import autocasts
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.guarded import guardable
from cute_kernels.runtime.operators import differentiates, uses_reference
from cute_kernels.runtime.real import as_float


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    check: bool = False,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(scale q k^T) v`` of each head, the bits of a row independent of all but its own keys and values.

    Differentiable in q, k, v and sinks, through lse, too; no second derivative.

    Args:
        q: (B, Lq, H, D) bf16 or fp16, with ``cu_seqlens_q`` (all queries, H, D); D a multiple of 8 up to 256 (64, 96,
            128, 192 and 256 are computed as they are, others as the next larger). Any strides that are multiples of 16
            bytes, the last dimension contiguous, the first element on 16 bytes.
        k: (B, Lk, Hkv, D) like q, with ``cu_seqlens_k`` (all keys, Hkv, D); Hkv divides H, and H / Hkv query heads in a
            row share a head of keys and values.
        v: (B, Lk, Hkv, Dv) like k; Dv a multiple of 8 up to 256.
        causal: a query sees no key behind its place. The last query has the place of the last key: query i sees keys
            j <= i + Lk - Lq.
        window: (left, right): a query at place p sees keys from p - left to p + right; None or -1: no bound.
        softcap: scores become softcap * tanh(score / softcap), in the hardware's tanh (a relative error of 2^-11); 0:
            they stay.
        sinks: (H,) one more logit of each head, without a value; of any float dtype.
        scale: what scores are multiplied with, positive; D ** -0.5 if None.
        cu_seqlens_q: (B + 1,) int32 on q's device: packed sequence i has queries cu_seqlens_q[i] to
            cu_seqlens_q[i + 1] - 1. Rows behind the last one: 0, lse -inf.
        cu_seqlens_k: (B + 1,) int32: the same of keys.
        max_seqlen_q: of at least the longest packed sequence of queries; needed with cu_seqlens_q.
        max_seqlen_k: of at least the longest packed sequence of keys; needed with cu_seqlens_k.
        seqused_k: (B,) int32: how many of a sequence's keys there are. Those behind them, NaN or not, change
            nothing.
        return_lse: also return the logarithm of each row's sum of exponentials.
        out: (like q, with v's head size) what to write to. It must not overlap k or v.
        check: also check values on the device: cu_seqlens, that no sequence is longer than max_seqlen, seqused_k. The
            host waits for it.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        ``out``, or (B, Lq, H, Dv) or (all queries, H, Dv) of q's dtype, contiguous; with ``return_lse`` also lse
        (B, H, Lq) or (H, all queries) fp32, in natural logarithms. A query that sees no key has 0 and -inf, or the
        sink's logit.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels: neither a Hopper nor a data-centre Blackwell.

    Numerics:
        The contract ``kv_grid``. Keys have places 0, 1, 2, ... in their sequence. Blocks of 128 keys, at multiples of
        128, are the steps of an online softmax: both products in the tensor core's steps of 16, ascending, in fp32; a
        row is rescaled where its maximum grows by more than 2^4. Splits of 2048 keys, at multiples of 2048, start from
        nothing and are merged in ascending order, in fp32. (D beyond 128: splits of 4096 keys; of these with Dv beyond
        128: blocks of 64.) The weights are rounded to q's dtype before they meet v. So a row of the result, and its
        lse, has the same bits whatever the batch, its place in it, the other rows, the number of queries beside it,
        causal keys behind it, packed or not, and the GPU's number of SMs. NaN or infinity in a row of v may reach rows
        of the same sequence and head that do not see it; other sequences and heads never.

        The backward computes the weights again, from lse, and rounds them and the scores' gradients to q's dtype. A row
        of q's gradient gets one sum of each block of 128 keys (D or Dv beyond 128: of 64), in fp32, added from its last
        visible block to the first under ``causal`` or a window, else from the first to the last: its bits depend on
        what a row of the output depends on, and on the row's own gradient. Gradients of k and v are summed over a query
        head's rows in ascending order, then over the heads that share them, in fp32: their bits depend on their
        sequence alone, and on no other one of the batch. Those of sinks are reproducible run to run. Workspace: 4 bytes
        for each element of q, and with shared heads 8 for each element of k, rows padded to 128, channels to 64, 128,
        192 or 256. An incoming gradient whose rows do not start on 16 bytes is copied. With cu_seqlens or
        seqused_k and a D or Dv that lacks 64 channels of these (32 of 192), q, k, v, the output and the gradients are
        copied, the missing channels filled.

        Under autocast q, k and v are cast to its dtype, as by torch's own attention.

    Source:
        Dao et al., FlashAttention, arXiv 2205.14135; Shah et al., FlashAttention-3, arXiv 2407.08608. Sinks: Xiao et
        al., arXiv 2309.17453.

    Example:
        >>> import torch
        >>> from cute_kernels import attention
        >>> q = torch.zeros(1, 2, 1, 64)
        >>> v = torch.arange(2.0).view(1, 2, 1, 1).repeat(1, 1, 1, 64)
        >>> attention(q, q, v, causal=True)[0, :, 0, 0]
        tensor([0.0000, 0.5000])
    """
    lengths = DENSE
    if (
        cu_seqlens_q is not None
        or cu_seqlens_k is not None
        or max_seqlen_q is not None
        or max_seqlen_k is not None
        or seqused_k is not None
    ):
        lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    may_be_cached = lengths is DENSE and _has_no_options(causal, window, softcap, sinks, scale, out, backend, check)
    if may_be_cached:
        call = CALLS.get((causal, scale), q, k, v)
        if call is not None:
            results = call.run(q, k, v)
            return results if return_lse else results[0]
    if isinstance(q, Tensor) and autocasts(q):
        q, k, v = _autocast(q, k, v)
        may_be_cached = False
    if uses_reference("attention", q, backend):
        return reference.attention(
            q,
            k,
            v,
            causal=causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            scale=scale,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            seqused_k=seqused_k,
            return_lse=return_lse,
            out=out,
            check=check,
        )
    softcap = as_float(softcap)
    if scale is not None:
        scale = as_float(scale)
    check_attention(q, k, v, causal, window, softcap, sinks, scale, KERNEL_DTYPES, lengths)
    if out is not None:
        check_out(out, q, v)
    check_sizes(q, k, lengths)
    if check:
        check_values(q, k, lengths)
    wants_gradient = differentiates(q, k, v, sinks)
    if may_be_cached and guardable(q, k, v):
        check_layout(q, k, v)
        call = AttentionCall.of(q, k, v, causal, scale, wants_gradient)
        if call is not None:
            results = call.run(q, k, v)
            CALLS.put((causal, scale), call, q, k, v)
            return results if return_lse else results[0]
    if wants_gradient:
        check_differentiable(out)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if sinks is not None:
        sinks = sinks.float()
    left, right = (-1 if distance is None else distance for distance in window or (-1, -1))
    options = causal, scale, left, right, softcap, sinks, *lengths
    results = differentiable_attention(q, k, v, *options) if wants_gradient else forward(q, k, v, out, *options)
    return results if return_lse else results[0]


def _has_no_options(
    causal: object, window: object, softcap: object, sinks: object, scale: object, out: object, backend: object,
    check: object,
) -> bool:  # fmt: skip
    """Whether ``causal`` and ``scale``, of the right types, are the only options of a call that is not traced."""
    return (
        not is_dynamo_compiling()
        and window is None
        and sinks is None
        and out is None
        and backend is None
        and not check
        and type(causal) is bool
        and (scale is None or type(scale) is float)
        and type(softcap) is float
        and not softcap
    )


def _autocast(*tensors: object) -> list:
    """Tensors of floats as autocast has them."""
    kind = tensors[0].device.type
    dtype = torch.get_autocast_dtype(kind)
    return [
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype is not torch.float64 else t
        for t in tensors
    ]
