"""The kernels of the models are compiled beforehand, in parallel; torch's own operators are deterministic."""

import pytest
import torch

from cute_kernels.runtime.targets import arch_of
from tests.nn.cases import BF16, FP32, kernels_of
from tests.nn.test_kernel_training import CONFIGS
from tests.precompiled import compile_beforehand


@pytest.fixture(scope="session", autouse=True)
def nn_compiled_beforehand(request):
    if torch.cuda.is_available():
        compile_beforehand(kernels_of(CONFIGS, arch_of(0), dtypes=(BF16, FP32)))


@pytest.fixture(autouse=True)
def deterministic_torch(request):
    """The backward of torch's attention adds in any order otherwise."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    torch.use_deterministic_algorithms(True)
    fills, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory,
        False,
    )
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills
