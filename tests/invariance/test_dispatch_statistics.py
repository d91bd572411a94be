"""Statistics and losses inside of batch_invariant on the CPU, plain torch in place of the kernels."""

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import batch_invariant
from tests.fakes import fake_gpu
from tests.invariance.test_kernel_statistics import *  # noqa: F403


@pytest.fixture(autouse=True)
def path_of_the_kernels():
    with fake_gpu() as jobs:
        yield jobs


@pytest.mark.parametrize("function", [torch.sum, torch.mean, torch.norm, lambda x: F.mse_loss(x, x.sin())])
def test_sums_of_examples_under_vmap(function, generator, path_of_the_kernels):
    """Each is a row's: it has the same bits whatever the batch."""
    x = torch.randn(7, 5, 64, generator=generator)
    with batch_invariant():
        found = torch.func.vmap(function)(x)
        assert torch.equal(torch.func.vmap(function)(x[2:4]), found[2:4])
    assert {builder.__name__ for builder, _ in path_of_the_kernels} == {"row_sums"}
