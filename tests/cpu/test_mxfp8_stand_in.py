"""The kernels' path of the quantizers on the CPU: checks, plans, allocation, launch arguments.

Plain torch takes the place of the compiled kernels; all above them is what runs on a GPU. The tests are the GPU's own.
"""

import pytest

from tests.gpu.mxfp8.test_bits import *  # noqa: F403
from tests.mxfp8_cases import stand_in


@pytest.fixture(autouse=True)
def path_of_the_kernels():
    with stand_in() as jobs:
        yield jobs
