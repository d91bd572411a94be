"""torch's flash attention by ours, on the CPU: fake kernels under its operators, as its user activates them."""

import pytest
import torch
from torch.nn import attention as torchs

from cute_kernels import attention
from cute_kernels.invariance import flash_attention
from tests.attention.cases import BF16, FP32, Case, make_inputs, same_bits
from tests.fakes import fake_gpu

OPS = torch.ops.aten


@pytest.fixture
def active():
    with fake_gpu() as jobs:
        ours = flash_attention.Active("CPU")
        yield jobs
        ours.remove()


def heads_first(tensors):
    return [t.transpose(1, 2) for t in tensors]


def test_import_registers_and_activates_nothing():
    if not hasattr(torchs, "list_flash_attention_impls"):
        pytest.skip("this torch has no list of implementations")
    assert flash_attention.NAME in torchs.list_flash_attention_impls()
    assert torchs.current_flash_attention_impl() is None


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_forward_and_backward(causal, active, generator):
    inputs = make_inputs(Case(2, 40, 40, 4, 2, 64), generator)
    dout = torch.randn(2, 40, 4, 64, generator=generator).to(BF16)
    out, lse, _, _, _, _, *random_state, _ = OPS._scaled_dot_product_flash_attention(
        *heads_first(inputs), 0.0, causal, scale=0.2
    )
    saved = dout, *inputs, out.transpose(1, 2)
    found = OPS._scaled_dot_product_flash_attention_backward(
        *heads_first(saved), lse, None, None, 40, 40, 0.0, causal, *random_state, scale=0.2
    )
    assert active
    leaves = [t.clone().requires_grad_() for t in inputs]
    wanted = attention(*leaves, causal=causal, scale=0.2)
    assert same_bits(out.transpose(1, 2), wanted)
    for gradient, other in zip(found, torch.autograd.grad(wanted, leaves, dout), strict=True):
        assert same_bits(gradient.transpose(1, 2), other)


def test_packed_sequences_with_a_window(active, generator):
    q, k, v = (t[0] for t in make_inputs(Case(1, 30, 30, 2, 2, 64), generator))
    starts = torch.tensor([0, 12, 30], dtype=torch.int32)
    out = OPS._flash_attention_forward(q, k, v, starts, starts, 18, 18, 0.0, True, False, window_size_left=5)[0]
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 18, "max_seqlen_k": 18}
    assert same_bits(out, attention(q, k, v, causal=True, window=(5, None), **options))


@pytest.mark.parametrize(("dtype", "dropout"), [(FP32, 0.0), (BF16, 0.5)], ids=["fp32", "dropout"])
def test_no_other_algorithm(dtype, dropout, active, generator):
    q, k, v = heads_first(make_inputs(Case(1, 9, 9, 2, 2, 64, dtype=dtype), generator))
    with pytest.raises(NotImplementedError, match=r"expected bf16 or.* no dropout.* got torch\.\w+ \(1, 2, 9, 64\)"):
        OPS._scaled_dot_product_flash_attention(q, k, v, dropout)


def test_remove_restores(generator):
    name, dump = "aten::_scaled_dot_product_flash_attention", torch._C._dispatch_dump
    before = dump(name)
    ours = flash_attention.Active("CPU")
    assert dump(name) != before
    ours.remove()
    assert dump(name) == before
