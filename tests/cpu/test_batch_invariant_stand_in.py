"""batch_invariant on the CPU, plain torch in place of the kernels; the tests are the GPU's own."""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from cute_kernels import batch_invariant
from tests import gemm_cases, norm_cases, reduction_cases
from tests.gpu.test_batch_invariant import *  # noqa: F403


@pytest.fixture(autouse=True)
def path_of_the_kernels():
    with reduction_cases.stand_in(), norm_cases.stand_in(), gemm_cases.stand_in():
        yield


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def generator(request):
    return norm_cases.seeded_generator(request.node.nodeid, "cpu")


def test_tensors_that_wrap_others():
    """What is inside of them comes by itself."""
    a, b = torch.randn(2, 8, 8, dtype=torch.bfloat16)
    with batch_invariant() as uncovered:
        product = TwoTensor(a.clone(), a.clone()) @ TwoTensor(b.clone(), b.clone())
        assert isinstance(product, TwoTensor) and torch.equal(product.a, a @ b)
    assert not uncovered
