"""audit on a GPU: kernels that no operator launches."""

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import audit

BF16 = torch.bfloat16


def test_a_layer_is_ours(device):
    """Linear, norm, softmax and attention, forward and backward: nothing of torch's sums."""
    linear = torch.nn.Linear(128, 384, device=device, dtype=BF16)
    norm = torch.nn.LayerNorm(128, device=device, dtype=BF16)
    x = torch.randn(2, 64, 128, device=device, dtype=BF16, requires_grad=True)

    def step():
        q, k, v = linear(norm(x)).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y.transpose(1, 2).flatten(2).softmax(-1).square().mean().backward()

    step()
    report = audit(step, profile=True)
    assert report, str(report)
    assert report.kernels == () and report.replaced


def test_a_hidden_launch(device):
    """Triton's, past all operators."""
    triton = pytest.importorskip("triton")
    import triton.language as tl

    @triton.jit
    def hidden_sum(x, y, n: tl.constexpr):
        tl.store(y, tl.sum(tl.load(x + tl.arange(0, n)), 0))

    x, y = torch.ones(128, device=device), torch.zeros(1, device=device)

    def function():
        hidden_sum[(1,)](x, y, 128)

    function()
    report = audit(function, profile=True)
    assert not report and report.kernels == ("hidden_sum",) and not report.foreign


def test_without_a_block_torch_is_caught(device):
    """The positive control: cuBLAS, called as an extension would, where the block is off."""
    from cute_kernels import batch_invariant

    a = torch.randn(64, 4096, device=device, dtype=BF16)

    def function():
        with batch_invariant("off"):
            return a @ a.T

    function()
    report = audit(function, profile=True)
    assert report.kernels
