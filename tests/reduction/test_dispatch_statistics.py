"""The kernels' path of logsumexp, cumsum, norms and variances on the CPU; the tests are the GPU's own."""

import pytest
import torch

from cute_kernels import reduction
from tests.fakes import fake_kernels
from tests.reduction.test_kernel_statistics import *  # noqa: F403


@pytest.fixture(autouse=True)
def jobs():
    with fake_kernels() as jobs:
        yield jobs


def test_another_number_of_rows_compiles_nothing(jobs):
    for rows in (1, 2, 100, 5000):
        x = torch.randn(rows, 64)
        reduction.logsumexp(x)
        reduction.cumsum(x)
        reduction.norm(x, dim=1)
        reduction.var(x, 1)
    assert len({repr(job) for job in jobs}) == 4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: reduction.logsumexp(x.double()), TypeError, "logsumexp: x must have dtype bfloat16"),
        (lambda x: reduction.logsumexp(x, 2), ValueError, "logsumexp: dim must be of 2 dimensions, got 2"),
        (lambda x: reduction.cumsum(x, None), TypeError, "cumsum: dim must be an int"),
        (lambda x: reduction.cumsum(x, 2), ValueError, "cumsum: dim must be of 2 dimensions, got 2"),
        (lambda x: reduction.cumsum(x[0, 0]), ValueError, "cumsum: dim must be of 0 dimensions"),
        (lambda x: reduction.cumsum(x, out_dtype=torch.int64), TypeError, "cumsum: out_dtype must have dtype"),
        (lambda x: reduction.norm(x, 3), ValueError, "norm: ord must be 1, 2 or inf, got 3.0"),
        (lambda x: reduction.norm(x, "fro"), TypeError, "norm: ord must be 1, 2 or inf, got 'fro'"),
        (lambda x: reduction.norms(x), TypeError, "norms: xs must be a list of tensors, got Tensor"),
        (lambda x: reduction.norms([x, 1]), TypeError, "norm: x must be a torch.Tensor, got int"),
        (lambda x: reduction.var(x, correction=None), TypeError, "var: correction must be a finite number, got None"),
        (lambda x: reduction.std(x, keepdim=1), TypeError, "std: keepdim must be a bool"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.zeros(4, 6))
