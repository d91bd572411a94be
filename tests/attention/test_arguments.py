"""Bad arguments of attention raise the same, on the CPU, cold, and after a good call."""

import pytest
import torch

from cute_kernels import attention
from tests.fakes import fake_kernels

BF16 = torch.bfloat16


def tensors(batch=2, len_q=4, len_k=6, heads=4, pairs=2, d=64, dtype=BF16):
    return (
        torch.zeros(batch, len_q, heads, d, dtype=dtype),
        torch.zeros(batch, len_k, pairs, d, dtype=dtype),
        torch.zeros(batch, len_k, pairs, d, dtype=dtype),
    )


Q, K, V = tensors()
BAD = [
    (lambda: attention([1.0], K, V), TypeError, "attention: q must be a torch.Tensor, got list"),
    (lambda: attention(Q, None, V), TypeError, "attention: k must be a torch.Tensor, got NoneType"),
    (lambda: attention(Q, K, 1), TypeError, "attention: v must be a torch.Tensor, got int"),
    (lambda: attention(Q.long(), K, V), TypeError, "attention: q must have dtype bfloat16, float16"),
    (
        lambda: attention(Q, K.half(), V),
        TypeError,
        "attention: k must have q's dtype torch.bfloat16, got torch.float16",
    ),
    (lambda: attention(Q, K, V.float()), TypeError, "attention: v must have q's dtype torch.bfloat16"),
    (lambda: attention(Q[0], K, V), ValueError, r"attention: q must have shape \(batch, queries, heads, head size\)"),
    (lambda: attention(Q, K[0], V), ValueError, r"attention: k must have shape \(batch, keys, heads, head size\)"),
    (lambda: attention(Q, K, V[0]), ValueError, r"attention: v must have shape \(batch, keys, heads, head size\)"),
    (lambda: attention(Q, K[:1], V[:1]), ValueError, r"attention: k must have shape \(2, keys, heads, 64\)"),
    (lambda: attention(Q, K[..., :32], V), ValueError, r"attention: k must have shape \(2, keys, heads, 64\)"),
    (lambda: attention(Q, K, V[:, :5]), ValueError, r"attention: v must have shape \(2, 6, 2, head size\)"),
    (lambda: attention(Q[:, :, :3], K, V), ValueError, "attention: k must have heads that divide q's 3, got 2"),
    (lambda: attention(*tensors(d=60)), ValueError, "attention: q must have a head size that is a multiple of 8"),
    (lambda: attention(*tensors(d=264)), ValueError, "a multiple of 8 up to 256, got 264"),
    (lambda: attention(Q.mT.contiguous().mT, K, V), ValueError, "attention: q must have a contiguous last dimension"),
    (lambda: attention(Q, K, V.mT.contiguous().mT), ValueError, "attention: v must have a contiguous last dimension"),
    (lambda: attention(Q, K, V, causal=1), TypeError, "attention: causal must be a bool, got 1"),
    (lambda: attention(Q, K, V, scale=0), ValueError, "attention: scale must be None or a positive, finite number"),
    (lambda: attention(Q, K, V, scale=float("inf")), ValueError, "attention: scale must be None or a positive"),
    (lambda: attention(Q, K, V, scale="1"), TypeError, "attention: scale must be None or a positive"),
    (lambda: attention(Q, K, V, softcap=-1), ValueError, "attention: softcap must be 0, for none, or a positive"),
    (lambda: attention(Q, K, V, softcap=None), TypeError, "attention: softcap must be 0, for none, or a positive"),
    (lambda: attention(Q, K, V, window=3), TypeError, r"attention: window must be None or a pair \(left, right\)"),
    (lambda: attention(Q, K, V, window=(1.5, 0)), TypeError, "attention: window must hold ints or None"),
    (lambda: attention(Q, K, V, window=(-2, 0)), ValueError, "attention: window must hold distances of at least 0"),
    (
        lambda: attention(Q, K, V, sinks=torch.zeros(3)),
        ValueError,
        r"attention: sinks must have shape \(4,\), got \(3,\)",
    ),
    (lambda: attention(Q, K, V, backend="cuda"), ValueError, "attention: backend must be None or 'reference'"),
    (lambda: attention(Q, K, V, cu_seqlens_q=Q), NotImplementedError, "attention: has no kernel yet for cu_seqlens_q"),
    (lambda: attention(Q, K, V, cu_seqlens_k=Q), NotImplementedError, "for cu_seqlens_k"),
    (lambda: attention(Q, K, V, max_seqlen_q=4), NotImplementedError, "for max_seqlen_q"),
    (lambda: attention(Q, K, V, max_seqlen_k=4), NotImplementedError, "for max_seqlen_k"),
    (lambda: attention(Q, K, V, seqused_k=Q), NotImplementedError, "for seqused_k"),
    (lambda: attention(Q, K, V, out=Q), NotImplementedError, "for out"),
]
# What plain torch takes
OF_KERNELS = [
    (
        lambda: attention(*tensors(dtype=torch.float32)),
        TypeError,
        "attention: q must have dtype bfloat16, float16, got",
    ),
    (
        lambda: attention(*tensors(d=96)),
        NotImplementedError,
        "for head sizes other than 64, 128, got 96 of q and 96 of v",
    ),
    (lambda: attention(Q, K, V.repeat(1, 1, 1, 2)), NotImplementedError, "got 64 of q and 128 of v"),
    (lambda: attention(Q, K, V, window=(1, 0)), NotImplementedError, r"for window, got \(1, 0\)"),
    (lambda: attention(Q, K, V, softcap=2), NotImplementedError, "for softcap, got 2.0"),
    (lambda: attention(Q, K, V, sinks=torch.zeros(4)), NotImplementedError, "for sinks"),
    (
        lambda: attention(Q.new_zeros(Q.numel() + 1)[1:].view(Q.shape), K, V),
        ValueError,
        "attention: q must start on 16 bytes",
    ),
    (
        lambda: attention(Q, K.new_zeros(2, 6, 2, 68)[..., :64], V),
        ValueError,
        "attention: k must have strides of multiples of 16 bytes",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_on_the_cpu(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(("call", "error", "message"), [case for case in (*BAD, *OF_KERNELS)])
def test_in_the_kernels_path(call, error, message, warm):
    with fake_kernels():
        if warm:
            attention(Q, K, V)
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(("call", "error", "message"), OF_KERNELS)
def test_plain_torch_takes_what_the_kernels_do_not(call, error, message):
    call()


def test_strict_layout(monkeypatch):
    from cute_kernels.runtime import strict

    monkeypatch.setattr(strict, "_STRICT", True)
    with pytest.raises(ValueError, match="attention: k must have strides of multiples of 16 bytes"):
        attention(Q, K.new_zeros(2, 6, 2, 68)[..., :64], V)
