"""Statistics and losses inside of batch_invariant on the CPU, plain torch in place of the kernels."""

import pytest

from tests.fakes import fake_gpu
from tests.invariance.test_kernel_statistics import *  # noqa: F403


@pytest.fixture(autouse=True)
def path_of_the_kernels():
    with fake_gpu() as jobs:
        yield jobs
