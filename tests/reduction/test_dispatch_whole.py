"""The kernels' path of sums of whole tensors on the CPU; the tests are the GPU's own."""

import pytest
import torch

from cute_kernels import reduction
from cute_kernels.reduction import reference
from cute_kernels.runtime import launches
from tests.fakes import fake_kernels
from tests.reduction.cases import BF16
from tests.reduction.test_kernel_whole import *  # noqa: F403


@pytest.fixture(autouse=True)
def jobs():
    with fake_kernels() as jobs:
        yield jobs


def test_dimensions_by_number_are_rows(jobs):
    """An element of a batch and the batch have one order, whatever the number of dimensions: all of a row are a row."""
    x = torch.randn(40, 50)
    for dim, builder in ((None, "whole_sums"), (1, "row_sums"), ((0, 1), "row_sums"), (0, "column_sums")):
        jobs.clear()
        reduction.sum(x, dim)
        assert builder in [job[0].build.__name__ for job in jobs]
    jobs.clear()
    launches.forget()
    reduction.sum(x[0], 0)
    assert [job[1][1].n for job in jobs] == [50]


def test_the_reference_is_a_sum(generator):
    for n in (1, 2049, 70_000):
        x = torch.randn(n, generator=generator).to(BF16)
        torch.testing.assert_close(reference.whole_sum(x).double(), x.double().sum(), rtol=1e-5, atol=1e-4)
        wanted = x.double().square().sum()
        torch.testing.assert_close(reference.whole_sum(x, squares=True).double(), wanted, rtol=1e-6, atol=0)
