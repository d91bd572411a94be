"""The same over fake kernels: what torch.compile makes of an op's forward and backward, on a machine without a GPU."""

import pytest

from tests.fakes import fake_kernels
from tests.runtime.test_kernel_compile import *  # noqa: F403

pytestmark = pytest.mark.exhaustive  # two minutes of torch's tracing


@pytest.fixture(autouse=True)
def kernels():
    with fake_kernels():
        yield
