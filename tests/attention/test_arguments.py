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
CU = torch.tensor([0, 2, 6], dtype=torch.int32)


def packed(**others):
    arguments = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 4, "max_seqlen_k": 4, **others}
    return attention(torch.cat([Q[0], Q[1, :2]]), K[0], V[0], **arguments)


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
    (lambda: attention(Q, K, V, cu_seqlens_q=CU), ValueError, r"attention: q must have shape \(all queries, heads"),
    (lambda: attention(Q, K, V, cu_seqlens_k=CU), ValueError, r"attention: k must have shape \(all keys, heads"),
    (lambda: attention(Q[0], K, V, cu_seqlens_q=CU), ValueError, "max_seqlen_q must be given with cu_seqlens_q"),
    (
        lambda: packed(cu_seqlens_q=CU.long()),
        TypeError,
        "attention: cu_seqlens_q must have dtype int32, got torch.int64",
    ),
    (lambda: packed(cu_seqlens_k=[0, 2, 6]), TypeError, "attention: cu_seqlens_k must be a torch.Tensor, got list"),
    (lambda: packed(cu_seqlens_k=CU[None]), ValueError, r"cu_seqlens_k must be a vector, got shape \(1, 3\)"),
    (lambda: packed(cu_seqlens_k=CU.repeat(2)[::2]), ValueError, "cu_seqlens_k must be contiguous, got stride 2"),
    (lambda: packed(cu_seqlens_k=CU.to("meta")), ValueError, "cu_seqlens_k must be on cpu, got meta"),
    (lambda: packed(cu_seqlens_k=CU[:2]), ValueError, "cu_seqlens_k must be of cu_seqlens_q's 2 sequences, got 1"),
    (lambda: packed(cu_seqlens_q=CU[:0]), ValueError, r"cu_seqlens_q must have shape \(batch \+ 1,\), got \(0,\)"),
    (lambda: packed(check=True, cu_seqlens_q=CU + 1), ValueError, "cu_seqlens_q must ascend from 0 to at most 6, got"),
    (
        lambda: packed(check=True, cu_seqlens_k=CU[[0, 2, 1]]),
        ValueError,
        "cu_seqlens_k must ascend from 0 to at most 6",
    ),
    (lambda: packed(check=True, max_seqlen_q=3), ValueError, "max_seqlen_q must be at least 4, of the longest of cu_s"),
    (
        lambda: packed(check=True, seqused_k=torch.tensor([2, 5], dtype=torch.int32)),
        ValueError,
        "seqused_k must be from 0 to 4 of sequence 1, got 5",
    ),
    (
        lambda: attention(Q, K, V, check=True, seqused_k=torch.tensor([-1, 6], dtype=torch.int32)),
        ValueError,
        "seqused_k must be from 0 to 6 of sequence 0, got -1",
    ),
    (lambda: packed(max_seqlen_k=None), ValueError, "max_seqlen_k must be given with cu_seqlens_k, got None"),
    (lambda: packed(max_seqlen_q=2.0), TypeError, "max_seqlen_q must be an int, got 2.0"),
    (lambda: packed(max_seqlen_q=-1), ValueError, "max_seqlen_q must be at least 0, got -1"),
    (lambda: packed(seqused_k=CU), ValueError, "seqused_k must be of cu_seqlens_q's 2 sequences, got 3"),
    (lambda: attention(Q, K, V, max_seqlen_q=4), ValueError, "max_seqlen_q must be None without cu_seqlens_q, got 4"),
    (lambda: attention(Q, K, V, seqused_k=CU), ValueError, "seqused_k must be of q's 2 sequences, got 3"),
    (lambda: attention(Q, K, V, seqused_k=Q), TypeError, "attention: seqused_k must have dtype int32"),
    (lambda: attention(Q, K, V, out=1), TypeError, "attention: out must be a torch.Tensor, got int"),
    (lambda: attention(Q, K, V, out=Q.half()), TypeError, "attention: out must have q's dtype torch.bfloat16"),
    (
        lambda: attention(Q, K, V, out=Q[0]),
        ValueError,
        r"attention: out must have shape \(2, 4, 4, 64\), got \(4, 4, 64\)",
    ),
    (lambda: attention(Q, K, V, out=Q.to("meta")), ValueError, "attention: out must be on cpu, got meta"),
    (lambda: attention(Q, K, V, out=Q.mT.contiguous().mT), ValueError, "out must have a contiguous last dimension"),
]
# Arguments that plain torch takes
OF_KERNELS = [
    (
        lambda: attention(*tensors(dtype=torch.float32)),
        TypeError,
        "attention: q must have dtype bfloat16, float16, got",
    ),
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
    (
        lambda: attention(Q, K, V, out=Q.new_zeros(2, 4, 4, 68)[..., :64]),
        ValueError,
        "attention: out must have strides of multiples of 16 bytes",
    ),
    (
        lambda: attention(Q.clone().requires_grad_(), K, V, out=torch.empty_like(Q)),
        ValueError,
        "attention: out must be None where a gradient is wanted, got a tensor",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_on_the_cpu(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_good_values_pass():
    with fake_kernels():
        assert torch.equal(packed(check=True, seqused_k=torch.tensor([0, 4], dtype=torch.int32)), torch.zeros(6, 4, 64))
        attention(Q, K, V, check=True)


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
