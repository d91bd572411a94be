"""attention on torch tensors: the public function."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.attention import reference
from cute_kernels.attention.checks import (
    KERNEL_DTYPES,
    Window,
    check_absent,
    check_attention,
    check_layout,
    check_supported,
)
from cute_kernels.attention.launch import attention_forward
from cute_kernels.attention.op.gradients import differentiable_attention
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import differentiates, is_eager, uses_reference
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
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(scale q k^T) v`` of each head, the bits of a row independent of all but its own keys and values.

    Differentiable in q, k and v, through lse, too; no second derivative. The kernels compute dense batches so far. An
    argument that they have no code for raises NotImplementedError; each says so below.

    Args:
        q: (B, Lq, H, D) bf16 or fp16; D 64 or 128 (other sizes: not yet). Any strides that are multiples of 16 bytes,
            the last dimension contiguous, the first element on 16 bytes.
        k: (B, Lk, Hkv, D) like q; Hkv divides H, and H / Hkv query heads in a row share a head of keys and values.
        v: (B, Lk, Hkv, D) like k.
        causal: a query sees no key behind its place. The last query has the place of the last key: query i sees keys
            j <= i + Lk - Lq.
        window: (left, right): a query at place p sees keys from p - left to p + right; None or -1: no bound. Not yet
            in the kernels.
        softcap: scores become softcap * tanh(score / softcap); 0: they stay. Not yet in the kernels.
        sinks: (H,) one more logit of each head, without a value. Not yet in the kernels.
        scale: what scores are multiplied with, positive; D ** -0.5 if None.
        cu_seqlens_q: where packed sequences of queries begin; not yet.
        cu_seqlens_k: where packed sequences of keys begin; not yet.
        max_seqlen_q: the longest packed sequence of queries; not yet.
        max_seqlen_k: the longest packed sequence of keys; not yet.
        seqused_k: how many keys of each sequence there are; not yet.
        return_lse: also return the logarithm of each row's sum of exponentials.
        out: what to write to; not yet.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch, which also
            computes windows, softcaps, sinks and every head size.

    Returns:
        (B, Lq, H, D) of q's dtype, contiguous; with ``return_lse`` also lse (B, H, Lq) fp32, in natural logarithms. A
        query that sees no key has 0 and -inf.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        NotImplementedError: no kernel has this yet.
        UnsupportedDeviceError: a GPU without kernels: neither a Hopper.

    Numerics:
        The contract ``kv_grid``. Keys have places 0, 1, 2, ... in their sequence. Blocks of 128 keys, at multiples of
        128, are the steps of an online softmax: both products in the tensor core's steps of 16, ascending, in fp32; a
        row is rescaled where its maximum grows by more than 2^8. Splits of 2048 keys, at multiples of 2048, start from
        nothing and are merged in ascending order, in fp32. The weights are rounded to q's dtype before they meet v. So
        a row of the result, and its lse, has the same bits whatever the batch, its place in it, the other rows, the
        number of queries beside it, causal keys behind it, and the GPU's number of SMs. NaN or infinity in a row of v
        may reach rows of the same sequence and head that do not see it; other sequences and heads never.

        The backward computes the weights again, from lse, and rounds them and the scores' gradients to q's dtype. A row
        of q's gradient gets one sum of each block of 128 keys, in fp32, added from its last visible block to the first
        where ``causal``, else from the first to the last: its bits depend on what a row of the output depends on, and
        on the row's own gradient. Gradients of k and v are summed over a query head's rows in ascending order, then
        over the heads that share them, in fp32: their bits depend on their sequence alone, and on no other one of the
        batch. It takes 4 bytes of workspace an element of q, and with shared heads 8 an element of k, padded to 128
        rows. An incoming gradient whose rows do not start on 16 bytes is copied.

        Under autocast q, k and v are cast to its dtype, as by torch's own attention.

    Source:
        Dao et al., FlashAttention, arXiv 2205.14135; Shah et al., FlashAttention-3, arXiv 2407.08608.

    Example:
        >>> import torch
        >>> from cute_kernels import attention
        >>> q = torch.zeros(1, 2, 1, 64)
        >>> v = torch.arange(2.0).view(1, 2, 1, 1).repeat(1, 1, 1, 64)
        >>> attention(q, q, v, causal=True)[0, :, 0, 0]
        tensor([0.0000, 0.5000])
    """
    if isinstance(q, Tensor) and torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v)
    if cu_seqlens_q is not None or cu_seqlens_k is not None or seqused_k is not None or out is not None:
        check_absent(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, out=out)
    if max_seqlen_q is not None or max_seqlen_k is not None:
        check_absent(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    if uses_reference("attention", q, backend):
        options = {"causal": causal, "window": window, "softcap": softcap, "sinks": sinks, "scale": scale}
        return reference.attention(q, k, v, **options, return_lse=return_lse)
    softcap = as_float(softcap)
    if scale is not None:
        scale = as_float(scale)
    check_attention(q, k, v, causal, window, softcap, sinks, scale, KERNEL_DTYPES)
    check_supported(q, v, window, softcap, sinks)
    if is_eager(q, k, v):
        check_layout(q, k, v)
    run = differentiable_attention if differentiates(q, k, v) else attention_forward
    results = run(q, k, v, causal, q.shape[3] ** -0.5 if scale is None else scale)
    return results if return_lse else results[0]


def _autocast(*tensors: object) -> list:
    """Tensors of floats as autocast has them."""
    kind = tensors[0].device.type
    dtype = torch.get_autocast_dtype(kind)
    return [
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype is not torch.float64 else t
        for t in tensors
    ]
