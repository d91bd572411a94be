"""The public path of layer_norm and rms_norm on the CPU: checks, launches, allocation, autograd and the torch bridge.

Plain torch takes the place of the compiled kernels; all above them is what runs on a GPU. The tests are the GPU's own.
"""

import pytest

from tests.fakes import fake_kernels
from tests.norm.test_kernel_autograd import *  # noqa: F403
from tests.norm.test_kernel_numerics import *  # noqa: F403
from tests.norm.test_kernel_torch import (  # noqa: F401
    test_a_compiled_backward_adds_to_every_main_grad,
    test_a_residual_that_is_x,
    test_another_number_of_rows_compiles_nothing,
    test_autocast_changes_nothing,
    test_compile,
    test_compile_in_a_model,
    test_opcheck,
)


@pytest.fixture(autouse=True)
def kernels():
    with fake_kernels() as jobs:
        yield jobs


@pytest.fixture
def elements():
    return 2**13
