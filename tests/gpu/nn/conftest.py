"""The kernels of the models are compiled beforehand, in parallel; torch's own operators are deterministic."""

import pytest
import torch

from cute_kernels.runtime.targets import arch_of
from tests.beforehand import compile_beforehand
from tests.gpu.nn.test_training import CONFIGS
from tests.nn_cases import BF16, FP32, kernels_of


@pytest.fixture(scope="session", autouse=True)
def nn_compiled_beforehand(request):
    here = any("gpu/nn" in item.path.as_posix() for item in request.session.items)
    if here and torch.cuda.is_available():
        compile_beforehand(kernels_of(CONFIGS, arch_of(0), dtypes=(BF16, FP32)))


@pytest.fixture(autouse=True)
def deterministic_torch():
    """The backward of torch's attention adds in any order otherwise."""
    torch.use_deterministic_algorithms(True)
    fills, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory,
        False,
    )
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills
