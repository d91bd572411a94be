"""batch_invariant on a GPU: torch's attention runs ours, whichever fused operator torch picks."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from cute_kernels import UncoveredOperatorError, attention, batch_invariant, provenance
from tests.attention.cases import BF16, FP16, Case, make_inputs
from tests.runtime.bits import assert_same_bits

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def heads_first(inputs):
    return [t.transpose(1, 2) for t in inputs]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("backend", [None, *BACKENDS], ids=lambda b: "any" if b is None else b.name)
def test_scaled_dot_product_attention(backend, dtype, causal, generator):
    inputs = make_inputs(Case(3, 300, 300, 4, 2, 64, dtype=dtype), generator)
    if backend is SDPBackend.EFFICIENT_ATTENTION:  # which takes no groups
        inputs = [t.repeat_interleave(4 // t.shape[2], 2) for t in inputs]
    with batch_invariant() as uncovered, sdpa_kernel(backend or BACKENDS):
        out = F.scaled_dot_product_attention(*heads_first(inputs), is_causal=causal, enable_gqa=True, scale=0.2)
        alone = F.scaled_dot_product_attention(
            *(t[1:2] for t in heads_first(inputs)), is_causal=causal, enable_gqa=True, scale=0.2
        )
    assert not uncovered
    assert_same_bits(out.transpose(1, 2), attention(*inputs, causal=causal, scale=0.2))
    assert_same_bits(alone[0], out[1])


def test_a_mask_that_ends_at_the_last_key(generator):
    inputs = make_inputs(Case(2, 70, 300, 4, 4, 128), generator)
    bias = causal_lower_right(70, 300)
    with batch_invariant() as uncovered:
        out = F.scaled_dot_product_attention(*heads_first(inputs), attn_mask=bias)
    assert not uncovered
    assert_same_bits(out.transpose(1, 2), attention(*inputs, causal=True))


def test_packed_sequences(generator):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v = (t.flatten(0, 1) for t in make_inputs(Case(1, 400, 400, 4, 4, 64), generator))
    starts = torch.tensor([0, 100, 130, 400], dtype=torch.int32, device="cuda")
    with batch_invariant() as uncovered:
        out = varlen.varlen_attn(q, k, v, starts, starts, 270, 270, **causal_of(varlen))
    assert not uncovered
    for first, last in ((0, 100), (100, 130), (130, 400)):
        one = [t[first:last][None] for t in (q, k, v)]
        assert_same_bits(out[first:last], attention(*one, causal=True)[0])


def test_as_an_implementation_of_torchs(generator):
    """Outside of a block, until it is restored."""
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        pytest.skip("this torch has no list of implementations")
    inputs = [t.requires_grad_() for t in make_inputs(Case(2, 300, 300, 4, 4, 64), generator)]
    dout = torch.randn(2, 300, 4, 64, generator=generator, device="cuda").to(BF16)

    def call():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(*heads_first(inputs), is_causal=True).transpose(1, 2)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout)]

    torchs = call()
    torch.nn.attention.activate_flash_attention_impl("CUTE_KERNELS")
    try:
        found = call()
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    out = attention(*inputs, causal=True)
    for one, other in zip(found, [out.detach(), *torch.autograd.grad(out, inputs, dout)], strict=True):
        assert_same_bits(one, other)
    for one, other in zip(call(), torchs, strict=True):
        torch.testing.assert_close(one, other)
    assert not all(torch.equal(one, other) for one, other in zip(found, torchs, strict=True))


def causal_of(varlen) -> dict:
    """Older ones have is_causal."""
    import inspect

    new = "window_size" in inspect.signature(varlen.varlen_attn).parameters
    return {"window_size": (-1, 0)} if new else {"is_causal": True}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_gradients(backend, generator):
    """Those of ``attention``, whichever fused operator torch picks."""
    inputs = [t.requires_grad_() for t in make_inputs(Case(2, 200, 200, 4, 4, 64), generator)]
    dout = torch.randn(2, 200, 4, 64, generator=generator, device="cuda").to(BF16)
    with batch_invariant() as uncovered, sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*heads_first(inputs), is_causal=True).transpose(1, 2)
        found = torch.autograd.grad(out, inputs, dout)
    assert not uncovered
    ours = attention(*inputs, causal=True)
    assert_same_bits(out, ours)
    for a, b in zip(found, torch.autograd.grad(ours, inputs, dout), strict=True):
        assert_same_bits(a, b)


def test_masks_and_dropout_say_so(generator):
    q, k, v = heads_first(make_inputs(Case(1, 64, 64, 2, 2, 64), generator))
    mask = torch.zeros(64, 64, dtype=BF16, device="cuda")
    for options in ({"attn_mask": mask}, {"dropout_p": 0.5}):
        with batch_invariant(), pytest.raises(UncoveredOperatorError):
            F.scaled_dot_product_attention(q, k, v, **options)


def test_what_computed_it(generator):
    q, k, v = heads_first(make_inputs(Case(1, 64, 64, 2, 2, 64), generator))

    def run():
        with batch_invariant():
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

    (entry,) = provenance(run)
    assert entry.contract == "kv_grid (128, 2048)" and entry.kernel.startswith("attention_forward")
