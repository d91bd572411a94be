"""Elements beyond the 2^31st of a tensor, on a GPU: the bits of the same rows nearby."""

import pytest
import torch
from torch import Tensor

from cute_kernels import attention, attention_with_kv_cache
from tests.attention.cases import Case, gradients_of, make_inputs, same_bits
from tests.attention.on_gpu import HOPPER, assert_same, run

pytestmark = [*HOPPER, pytest.mark.slow]
FAR = 2**31


def far(t: Tensor) -> Tensor:
    """The same batch of two, whose second matrix begins behind the 2^31st element; NaN before it."""
    first, second = t
    memory = t.new_full((FAR + first.numel(),), float("nan"))
    found = memory.as_strided(t.shape, (FAR, *first.stride()))
    found[0], found[1] = first, second
    return found


def test_batches(generator):
    """q, k, v and out."""
    inputs = make_inputs(Case(2, 300, 300, 4, 2, 128), generator)
    wanted = run(inputs, True)
    out = far(torch.zeros_like(wanted[0]))
    assert_same(run([far(t) for t in inputs], True, out=out), wanted)


def test_packed_sequences(generator):
    """All queries, and all rows of out, are more than 2^31 elements."""
    length, heads = 512, 16
    number = FAR // (length * heads * 128) + 3
    tensors = [t[0] for t in make_inputs(Case(1, number * length, number * length, heads, 1, 128), generator)]
    starts = torch.arange(0, number + 1, device="cuda", dtype=torch.int32) * length
    places = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
    out, lse = attention(*tensors, causal=True, return_lse=True, **places)
    assert out.numel() > FAR
    for i in (0, number // 2, number - 1):
        rows = slice(i * length, (i + 1) * length)
        alone, of_rows = run([t[None, rows] for t in tensors], True)
        assert_same((out[rows], lse[:, rows]), (alone[0], of_rows[0]))


def test_contiguous_caches(generator):
    """Those of the second sequence are far, as are its queries and its new keys."""
    inputs = make_inputs(Case(2, 300, 300, 4, 2, 128), generator)
    seqlens = torch.tensor([0, 0], dtype=torch.int32, device="cuda")
    q, new = inputs.q, inputs[1:]
    caches = [torch.zeros_like(t) for t in new]
    wanted = attention_with_kv_cache(q, *caches, cache_seqlens=seqlens, k=new[0], v=new[1], return_lse=True)
    distant = [far(torch.zeros_like(t)) for t in new]
    k, v = map(far, new)
    found = attention_with_kv_cache(far(q), *distant, cache_seqlens=seqlens, k=k, v=v, return_lse=True)
    assert_same(found, wanted)
    assert all(torch.equal(a, b) for a, b in zip(distant, caches, strict=True))


def test_gradients_of_batches(generator):
    """q, k, v and the incoming gradient."""
    inputs = make_inputs(Case(2, 300, 300, 4, 2, 128), generator)
    dout = torch.randn(inputs.q.shape, generator=generator, device="cuda").to(inputs.q.dtype)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True)

    wanted = gradients_of(call, inputs, dout)
    for a, b in zip(gradients_of(call, [far(t) for t in inputs], far(dout)), wanted, strict=True):
        assert same_bits(a, b)


def test_gradients_of_packed_sequences(generator):
    """All queries, and so the sums of dq, are more than 2^31 elements. It takes 30 GB."""
    length, heads = 512, 16
    number = FAR // (length * heads * 128) + 3
    tensors = [t[0] for t in make_inputs(Case(1, number * length, number * length, heads, 1, 128), generator)]
    starts = torch.arange(0, number + 1, device="cuda", dtype=torch.int32) * length
    places = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
    dout = torch.ones_like(tensors[0])
    found = gradients_of(lambda q, k, v: attention(q, k, v, causal=True, **places), tensors, dout)
    assert found[0].numel() > FAR
    for i in (0, number // 2, number - 1):
        rows = slice(i * length, (i + 1) * length)
        one = [t[None, rows] for t in (*tensors, dout)]
        alone = gradients_of(lambda q, k, v: attention(q, k, v, causal=True), one[:3], one[3])
        for a, b in zip(found, alone, strict=True):
            assert same_bits(a[None, rows], b)
