"""The public path of layer_norm and rms_norm on the CPU: checks, launches, allocation, autograd and the torch bridge.

Plain torch takes the place of the compiled kernels; all above them is what runs on a GPU. The tests are the GPU's own.
"""

import pytest

from tests.fakes import fake_kernels
from tests.norm.cases import FP32, Case, call_and_differentiate, make_inputs
from tests.norm.test_kernel_autograd import *  # noqa: F403
from tests.norm.test_kernel_numerics import *  # noqa: F403
from tests.norm.test_kernel_torch import (  # noqa: F401
    test_a_compiled_backward_adds_to_every_main_grad,
    test_a_residual_that_is_x,
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


@pytest.mark.parametrize("case", [Case("rms", 1024), Case("layer", 1024, weight=FP32, bias=FP32)], ids=str)
def test_another_number_of_rows_asks_for_no_kernel(case, norm, generator, kernels):
    call_and_differentiate(norm, case, make_inputs(case, generator, 64 * 1024))
    known = set(kernels)
    assert len(known) == 2
    for rows in (1, 2, 33, 100, 1001):
        call_and_differentiate(norm, case, make_inputs(case, generator, rows * 1024))
    assert set(kernels) == known
