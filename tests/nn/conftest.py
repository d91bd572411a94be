"""The kernels of the models are precompiled, in parallel; torch's own operators are deterministic."""

import pytest
import torch

from cute_kernels.runtime.targets import arch_of
from tests.nn.cases import BF16, FP32, kernels_of
from tests.nn.test_kernel_training import CONFIGS
from tests.precompiled import precompile


@pytest.fixture(scope="session", autouse=True)
def nns_precompiled(request):
    if torch.cuda.is_available():
        precompile(kernels_of(CONFIGS, arch_of(0), dtypes=(BF16, FP32)))


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
