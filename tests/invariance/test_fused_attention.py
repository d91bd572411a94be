"""batch_invariant and torch's fused attention on the CPU: what runs ``attention``, a fake kernel, and what does not."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from cute_kernels import UncoveredOperatorError, attention, attention_with_kv_cache, batch_invariant, provenance
from cute_kernels.invariance import aten, fused_attention
from cute_kernels.invariance.operators import treatment_of
from tests.attention.cases import BF16, FP16, FP32, Case, make_inputs, same_bits
from tests.fakes import fake_gpu

OPS = torch.ops.aten


@pytest.fixture(autouse=True)
def jobs():
    with fake_gpu() as jobs:
        yield jobs


def heads_first(case, generator):
    return [t.transpose(1, 2) for t in make_inputs(case, generator)]


def call(name, q, k, v, causal, **options):
    """(out, lse) of a fused operator of (B, H, L, D)."""
    if name == "flash":
        return OPS._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, **options)[:2]
    if name == "cudnn":
        out, lse = OPS._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, **options)[:2]
        return out, lse.squeeze(-1)
    out, lse = OPS._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, **options)[:2]
    assert lse.shape[2] % 32 == 0 and (lse[..., q.shape[2] :] == math.inf).all()
    return out, lse[..., : q.shape[2]]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_what_scaled_dot_product_attention_picks(dtype, name, causal, generator, jobs):
    q, k, v = heads_first(Case(2, 9, 9, 4, 2, 64, dtype=dtype), generator)
    with batch_invariant() as uncovered:
        out, lse = call(name, q, k, v, causal, scale=0.2)
    assert jobs and not uncovered
    wanted = attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal, scale=0.2, return_lse=True)
    assert same_bits(out.transpose(1, 2), wanted[0]) and same_bits(lse, wanted[1])


def test_of_rows_before_heads(generator, jobs):
    q, k, v = make_inputs(Case(2, 5, 9, 4, 4, 64), generator)
    wanted = attention(q, k, v, causal=True)
    with batch_invariant():
        found = [
            OPS._flash_attention_forward(q, k, v, None, None, 5, 9, 0.0, True, False)[0],
            OPS._efficient_attention_forward(q, k, v, None, None, None, None, None, 0.0, 2)[0],
        ]
    assert all(same_bits(out, wanted) for out in found)


def test_a_mask_that_ends_at_the_last_key(generator, monkeypatch):
    """causal_lower_right calls the flash operator itself, where a GPU has it."""
    monkeypatch.setattr("torch.nn.attention.bias.can_use_flash_attention", lambda parameters: True)
    q, k, v = heads_first(Case(2, 5, 9, 4, 4, 64), generator)
    bias = causal_lower_right(5, 9)  # torch makes no subclass of Tensor inside of a dispatch mode
    with batch_invariant() as uncovered:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert not uncovered
    assert same_bits(out.transpose(1, 2), attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=True))


@pytest.mark.parametrize("layout", ["odd stride", "odd address", "transposed"])
def test_layouts_that_no_kernel_reads(layout, generator):
    """They are copied, as torch's own operators take them."""
    inputs = make_inputs(Case(1, 5, 5, 2, 2, 64), generator)
    wanted = attention(*inputs, causal=True)
    if layout == "odd stride":
        inputs = [F.pad(t, (0, 3))[..., :64] for t in inputs]
    elif layout == "odd address":
        inputs = [F.pad(t.flatten(), (1, 0))[1:].view(t.shape) for t in inputs]
    else:
        inputs = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in inputs]
    with batch_invariant():
        out = call("flash", *(t.transpose(1, 2) for t in inputs), True)[0]
    assert same_bits(out.transpose(1, 2), wanted)


@pytest.mark.parametrize("head_size", [64, 192])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_gradients(name, causal, head_size, generator):
    """The forward has the bits of one without a graph, the backward those of ``attention``."""
    q, k, v = heads_first(Case(2, 9, 9, 4, 4, head_size), generator)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    dout = make_inputs(Case(2, 9, 9, 4, 4, head_size), generator).q.transpose(1, 2)
    with batch_invariant() as uncovered:
        out = call(name, *leaves, causal)[0]
        assert same_bits(out.detach(), call(name, q, k, v, causal)[0])
        found = torch.autograd.grad(out, leaves, dout)
    assert not uncovered
    rows = [t.transpose(1, 2) for t in leaves]
    wanted = torch.autograd.grad(attention(*rows, causal=causal), leaves, dout.transpose(1, 2))
    assert all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))


def refused(q, k, v):
    """Calls that ``attention`` does not take."""
    efficient, cudnn = OPS._scaled_dot_product_efficient_attention, OPS._scaled_dot_product_cudnn_attention
    mask = torch.zeros(2, 4, 5, 9, dtype=BF16)
    yield lambda: OPS._scaled_dot_product_flash_attention(q, k, v, 0.1)
    yield lambda: OPS._scaled_dot_product_flash_attention(q, k, v, scale=-1.0)
    yield lambda: OPS._scaled_dot_product_flash_attention(q, k, v, 0.0, False, True)
    yield lambda: efficient(q, k, v, mask, False)
    yield lambda: efficient(q, k, v, None, False, 0.0, True)  # begins at the first key
    yield lambda: efficient(q.float(), k.float(), v.float(), None, False)
    yield lambda: cudnn(q, k, v, mask, False)
    yield lambda: cudnn(q, k, v, None, False, 0.0, True)
    yield lambda: OPS._efficient_attention_forward(
        *(t.transpose(1, 2) for t in (q, k, v)), None, None, None, None, None, 0.0, 1
    )
    slopes = torch.ones(4)
    yield lambda: OPS._flash_attention_forward(
        *(t.transpose(1, 2) for t in (q, k, v)), None, None, 5, 9, 0.0, False, False, alibi_slopes=slopes
    )


@pytest.mark.parametrize("index", range(10))
def test_what_is_not_taken_says_so(index, generator, jobs):
    q, k, v = heads_first(Case(2, 5, 9, 4, 4, 64), generator)
    function = list(refused(q, k, v))[index]
    with batch_invariant(), pytest.raises(UncoveredOperatorError, match=r"aten\._.*attention.* is not covered"):
        function()
    assert not jobs


def test_a_head_size_without_a_kernel(generator):
    q, k, v = heads_first(Case(2, 5, 5, 4, 4, 64), generator)
    q, k, v = (t.repeat(1, 1, 1, 5) for t in (q, k, v))
    with batch_invariant(), pytest.raises(UncoveredOperatorError, match="_scaled_dot_product_flash_attention"):
        call("flash", q, k, v, True)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)], ids=str)
def test_packed_sequences(window, generator):
    """varlen_attn, and the flash operator that it is made of."""
    lengths = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    q, k, v = (t.flatten(0, 1) for t in make_inputs(Case(1, 12, 12, 4, 2, 64), generator))
    options = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": 7, "max_seqlen_k": 7}
    wanted = attention(q, k, v, causal=window == (-1, 0), window=window, return_lse=True, **options)
    with batch_invariant() as uncovered:
        found = varlen_attn(
            q,
            k,
            v,
            lengths,
            lengths,
            7,
            7,
            window_size=window,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        left, right = window
        window_size = {"window_size_left": left, "window_size_right": right}
        causal = window == (-1, 0)
        flash = OPS._flash_attention_forward(q, k, v, lengths, lengths, 7, 7, 0.0, causal, False, **window_size)
    assert not uncovered
    for out, lse in (found, flash[:2]):
        assert same_bits(out, wanted[0]) and same_bits(lse, wanted[1])


def test_used_keys(generator):
    q, k, v = make_inputs(Case(2, 1, 9, 4, 2, 64), generator)
    used = torch.tensor([4, 9], dtype=torch.int32)
    with batch_invariant():
        out = OPS._flash_attention_forward(q, k, v, None, None, 1, 9, 0.0, True, False, seqused_k=used)[0]
    assert same_bits(out, attention(q, k, v, causal=True, seqused_k=used))


def test_provenance(generator):
    """Contract, grid, kernel and sizes of each launch."""
    q, k, v = make_inputs(Case(2, 5, 9, 4, 2, 64), generator)
    used = torch.tensor([4, 9], dtype=torch.int32)
    forward, decode = provenance(
        lambda: (attention(q, k, v), attention_with_kv_cache(q[:, :1], k, v, cache_seqlens=used))
    )
    assert forward.contract == decode.contract == "kv_grid (128, 2048)"
    assert forward.kernel.startswith("attention_forward (tile rows") and forward.shape == (2, 4, 5, 9, 64)
    assert decode.kernel.startswith("attention_decode (") and decode.shape == (2, 4, 1, 9, 64)
    packed = torch.tensor([0, 5], dtype=torch.int32)
    lengths = {"cu_seqlens_q": packed, "cu_seqlens_k": packed, "max_seqlen_q": 5, "max_seqlen_k": 5}
    q = torch.cat([q[0]] * 3, -1)
    (entry,) = provenance(lambda: attention(q, q, q, **lengths))
    assert entry.contract == "kv_grid (64, 4096)" and entry.shape == (1, 4, 5, 5, 192)


def test_names_of_operators():
    """A name that is misspelt would replace nothing."""
    assert fused_attention.REPLACEMENTS.keys() <= aten.REPLACEMENTS.keys()
    for name in fused_attention.OTHERS:
        namespace, _, overload = name.partition("::")
        operator = getattr(getattr(torch.ops, namespace), overload.removesuffix(".default")).default
        assert treatment_of(operator).function is fused_attention.OTHERS[name]


def test_outside_of_a_block(generator, jobs):
    q, k, v = heads_first(Case(1, 5, 5, 2, 2, 64, dtype=FP32), generator)
    F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert not jobs
