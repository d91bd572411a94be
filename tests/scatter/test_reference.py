"""The references are torch's own operators, and add in the promised order no worse than torch."""

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import scatter
from cute_kernels.scatter import reference
from tests.scatter.cases import FP32, Case, contract, make_inputs


def test_embedding_is_torchs_own(generator):
    dy, ids = make_inputs(Case(200, 20, 6, "zipf", FP32), generator)
    weight = torch.randn(20, 6, generator=generator).requires_grad_()
    for padding in (None, 3):
        y, wanted = scatter.embedding(ids, weight, padding_idx=padding), F.embedding(ids, weight, padding)
        assert torch.equal(y, wanted)
        (dw,), (of_torch,) = (torch.autograd.grad(t, weight, dy) for t in (y, wanted))
        assert torch.equal(dw, of_torch)
        found = scatter.embedding_backward(dy, ids, 20, padding_idx=padding)
        torch.testing.assert_close(found, of_torch)
    weight.main_grad = torch.ones(20, 6)
    scatter.embedding(ids, weight, padding_idx=3).backward(dy)
    torch.testing.assert_close(weight.main_grad, of_torch + 1)
    assert weight.grad is None


@pytest.mark.parametrize("dim", [0, 1])
def test_index_sum_is_torchs_own(dim, generator):
    x = torch.randn(4, 5, dtype=torch.float64, generator=generator).float()
    source = torch.randn(4, 5, generator=generator)
    index = torch.randint(4, (4, 5), generator=generator)
    assert torch.equal(scatter.index_sum(x, index, source, dim=dim), x.scatter_add(dim, index, source))
    rows = index.select(1 - dim, 0)
    assert torch.equal(scatter.index_sum(x, rows, source, dim=dim), x.index_add(dim, rows, source))


def test_the_contract_is_a_sum(generator):
    dy, ids = make_inputs(Case(3000, 20, 4, "blocks", FP32), generator)
    exact = reference.embedding_backward(dy, ids, 20, compute_dtype=torch.float64)
    torch.testing.assert_close(contract(dy, ids, 20), exact, atol=2e-4, rtol=1e-5)
