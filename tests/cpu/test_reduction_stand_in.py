"""The kernels' path of the reductions on the CPU, plain torch in place of the kernels; the tests are the GPU's own."""

import inspect
import types

import pytest
import torch

from cute_kernels import reduction
from cute_kernels.reduction import op
from tests.gpu.reduction.test_reduction import *  # noqa: F403
from tests.norm_cases import seeded_generator
from tests.reduction_cases import stand_in


@pytest.fixture(autouse=True)
def path_of_the_kernels():
    with stand_in() as jobs:
        yield jobs


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def compile_backend():
    return "aot_eager"


@pytest.fixture
def generator(request):
    return seeded_generator(request.node.nodeid, "cpu")


@pytest.fixture
def traced_reduction():
    """The functions as they go on for CUDA tensors: the compiler does not see that ``is_cuda`` was replaced."""
    source, condition = inspect.getsource(op), "not x.is_cuda"
    assert source.count(condition) == 2
    module = types.ModuleType("traced_reduction")
    exec(source.replace(condition, "False"), module.__dict__)
    return module


def test_another_number_of_rows_compiles_nothing(path_of_the_kernels):
    for rows in (1, 2, 100, 5000):
        reduction.softmax(torch.randn(rows, 64))
        reduction.sum(torch.randn(rows, 64), 1)
    assert len({repr(job) for job in path_of_the_kernels}) == 2
