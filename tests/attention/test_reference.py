"""The specification of attention, and the contract in torch."""

import math

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import attention
from cute_kernels.attention import reference
from tests.attention.cases import BF16, FP16, FP32, SPLIT, Case, exact, make_inputs, rms


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_is_torchs_own(causal, dtype, generator):
    case = Case(2, 40, 40, 4, 2, 64, causal, dtype)
    q, k, v = (t.transpose(1, 2) for t in make_inputs(case, generator))
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal, enable_gqa=True)
    found = attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)
    assert found.dtype is dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), wanted.transpose(1, 2), atol=1e-5, rtol=torch.finfo(dtype).eps)


def test_causal_is_bottom_right(generator):
    case = Case(1, 5, 9, 2, 2, 64)
    inputs = make_inputs(case, generator)
    out, lse = exact(case, inputs)
    for i in range(5):
        seen = [inputs.q[:, i : i + 1], inputs.k[:, : i + 5], inputs.v[:, : i + 5]]
        one, of_one = reference.attention(*(t.double() for t in seen), return_lse=True)
        torch.testing.assert_close(out[:, i : i + 1], one)
        torch.testing.assert_close(lse[..., i : i + 1], of_one)


def test_rows_without_keys_are_zero(generator):
    out, lse = exact(Case(1, 7, 3, 2, 1, 64), make_inputs(Case(1, 7, 3, 2, 1, 64), generator))
    assert (out[:, :4] == 0).all() and (lse[..., :4] == -math.inf).all() and lse[..., 4:].isfinite().all()
    out, lse = exact(Case(1, 7, 0, 2, 1, 64, False), make_inputs(Case(1, 7, 0, 2, 1, 64), generator))
    assert (out == 0).all() and (lse == -math.inf).all()


def test_window_softcap_and_sinks(generator):
    case = Case(1, 6, 6, 2, 2, 64, False)
    inputs = make_inputs(case, generator)
    wide, _ = exact(case, inputs)
    assert torch.equal(exact(case, inputs, window=(-1, None))[0], wide)
    assert torch.equal(exact(case, inputs, window=(None, 0))[0], exact(Case(1, 6, 6, 2, 2, 64), inputs)[0])
    near, _ = exact(case, inputs, window=(0, 0))
    torch.testing.assert_close(near, inputs.v.double())
    sinks = torch.full((2,), -math.inf, dtype=torch.float64)
    torch.testing.assert_close(exact(case, inputs, sinks=sinks)[0], wide)
    out, lse = exact(case, inputs, sinks=torch.full((2,), 100.0))
    assert out.abs().max() < 1e-20 and (lse - 100).abs().max() < 1e-6
    capped, _ = exact(case, inputs, softcap=1e6)
    torch.testing.assert_close(capped, wide, atol=1e-6, rtol=1e-6)


def packed(lengths, heads, d, generator):
    total = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return torch.randn(total + 2, heads, d, generator=generator, dtype=torch.float64), cu_seqlens


def test_packed_sequences_are_dense_ones(generator):
    """Sequences of any length, none among them; fewer keys than there are; rows that are no sequence's."""
    lengths_q, lengths_k, used = (3, 0, 1, 5), (3, 4, 0, 7), (2, 4, 0, 7)
    (q, cu_q), (k, cu_k) = packed(lengths_q, 2, 8, generator), packed(lengths_k, 1, 8, generator)
    v = torch.randn(16, 1, 16, generator=generator, dtype=torch.float64)
    options = {"causal": True, "window": (2, None), "softcap": 3.0, "sinks": torch.randn(2, generator=generator)}
    maxima = {"max_seqlen_q": 5, "max_seqlen_k": 7}
    seqused_k = torch.tensor(used, dtype=torch.int32)
    out, lse = reference.attention(
        q, k, v, **options, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **maxima, seqused_k=seqused_k, return_lse=True
    )
    assert out.shape == (11, 2, 16) and lse.shape == (2, 11)
    assert (out[9:] == 0).all() and (lse[:, 9:] == -math.inf).all()
    for i, (n, m) in enumerate(zip(lengths_q, used, strict=True)):
        rows, keys = slice(cu_q[i], cu_q[i] + n), slice(cu_k[i], cu_k[i] + m)
        one, of_one = reference.attention(q[None, rows], k[None, keys], v[None, keys], **options, return_lse=True)
        assert torch.equal(out[rows], one[0]) and torch.equal(lse[:, rows], of_one[0])
    padded = torch.zeros(4, 7, 1, 8, dtype=torch.float64), torch.zeros(4, 7, 1, 16, dtype=torch.float64)
    for i, n in enumerate(lengths_k):
        for target, source in zip(padded, (k, v), strict=True):
            target[i, :n] = source[cu_k[i] : cu_k[i] + n]
    again, of_again = reference.attention(
        q, *padded, **options, cu_seqlens_q=cu_q, max_seqlen_q=5, seqused_k=seqused_k, return_lse=True
    )
    assert torch.equal(again, out) and torch.equal(of_again, lse)
    target = torch.empty_like(out)
    assert reference.attention(q, *padded, cu_seqlens_q=cu_q, max_seqlen_q=5, out=target) is target


def test_gradients_of_packed_sequences(generator):
    (q, cu_q), (k, cu_k) = packed((2, 3), 2, 8, generator), packed((4, 1), 1, 8, generator)
    tensors = [t.requires_grad_() for t in (q, k, torch.randn_like(k), torch.randn(2, dtype=torch.float64))]

    def call(q, k, v, sinks):
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 3, "max_seqlen_k": 4}
        out, lse = reference.attention(q, k, v, causal=True, sinks=sinks, **lengths, return_lse=True)
        return out, lse[:, :5]  # of rows that are no sequence's: -inf

    assert torch.autograd.gradcheck(call, tensors)


def test_gradients():
    tensors = [torch.randn(1, n, h, 8, dtype=torch.float64, requires_grad=True) for n, h in ((3, 2), (5, 1), (5, 1))]
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, sinks):
        return reference.attention(q, k, v, causal=True, sinks=sinks, softcap=3.0, window=(2, None), return_lse=True)

    assert torch.autograd.gradcheck(call, (*tensors, sinks))


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case(2, 100, 100, 4, 2, 64), {}),
        (Case(1, 65, SPLIT + 130, 2, 1, 128), {}),
        (Case(1, 9, 2 * SPLIT + 1, 2, 2, 64, False, FP16), {}),
        (Case(1, 12, 5, 2, 1, 64), {}),
        (Case(1, 65, SPLIT + 130, 2, 1, 64), {"window": (100, None)}),
        (Case(1, 65, 300, 2, 1, 64, False), {"window": (None, 3), "softcap": 5.0}),
        (Case(1, 20, 10, 4, 1, 64), {"sinks": torch.tensor([-math.inf, 0.0, 3.0, 200.0])}),
        (Case(1, 3, 4096 + 10, 1, 1, 256, False), {}),
    ],
    ids=str,
)
def test_the_contract_is_attention(case, options, generator):
    """It is what rounding makes of it: of the weights, once to their dtype, and of the result."""
    inputs = make_inputs(case, generator)
    wanted, of_rows = exact(case, inputs, **options)
    found = reference.kv_grid(*inputs, causal=case.causal, **options)
    rounded = wanted.to(case.dtype).double()
    assert rms(found.out.double() - wanted) <= 2.5 * rms(rounded - wanted) + 1e-12
    empty = of_rows == -math.inf
    assert torch.equal(found.lse == -math.inf, empty)
    torch.testing.assert_close(found.lse[~empty].double(), of_rows[~empty], atol=1e-5, rtol=1e-5)


def test_the_contract_without_options_is_that_with_options_that_do_nothing(generator):
    case = Case(1, 40, 300, 2, 1, 64)
    inputs = make_inputs(case, generator)
    wanted = reference.kv_grid(*inputs, causal=True)
    for options in ({"window": (300, 5)}, {"sinks": torch.full((2,), -math.inf)}, {"softcap": 0.0}):
        for a, b in zip(reference.kv_grid(*inputs, causal=True, **options), wanted, strict=True):
            assert torch.equal(a, b)


def test_the_contract_rescales_where_a_maximum_grows_by_more_than_16():
    """Keys of rising scores, a step of 5 or 3 powers of two from block to block."""
    log2_step = {5.0: True, 3.0: False}
    for step, moves in log2_step.items():
        q = torch.zeros(1, 1, 1, 64)
        q[..., 0] = 1.0
        k = torch.zeros(1, 512, 1, 64)
        k[0, :, 0, 0] = torch.arange(4).repeat_interleave(128) * step / reference.LOG2E
        found = reference.kv_grid(q, k, k, scale=1.0).moved[0, 0, 0].tolist()
        assert found == ([True] * 4 if moves else [True, False, True, False])
