"""The kernels' path of mm and linear on the CPU: plans, layouts, allocation, autograd and the torch bridge.

``serial_k16`` in plain torch takes the place of the compiled kernels; all above them is what runs on a GPU. The tests
are the GPU's own, where their sizes allow it.
"""

import inspect

import pytest

from cute_kernels.gemm import op
from cute_kernels.gemm.config import candidates
from tests.gemm_cases import kernels, seeded_generator, stand_in
from tests.gpu.gemm.test_autograd import *  # noqa: F403
from tests.gpu.gemm.test_invariance import (  # noqa: F401
    test_controls,
    test_layouts_change_no_bit_of_the_sums,
    test_tokens_beyond_the_valid_ones,
    test_valid_tokens_change_neither_y_nor_dx,
)
from tests.gpu.gemm.test_numerics import (  # noqa: F401
    test_dimensions_of_x,
    test_empty,
    test_inputs_are_left_alone,
    test_linear,
    test_mm,
    test_out,
    test_special_values,
    test_strided_views,
)
from tests.gpu.gemm.test_torch import (  # noqa: F401
    test_another_number_of_tokens_compiles_nothing,
    test_autocast_changes_nothing,
    test_compile,
    test_compile_without_gradients,
    test_fake_tensors,
    test_opcheck,
    test_the_schemas_name_what_is_written,
)


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
def traced_linear():
    """``linear`` as it goes on for CUDA tensors: the compiler does not see that ``is_cuda`` was replaced."""
    source = inspect.getsource(op.linear)
    assert source.count("not x.is_cuda") == 1
    namespace = dict(vars(op))
    exec(source.replace("not x.is_cuda", "False"), namespace)
    return namespace["linear"]


@pytest.fixture
def generator(request):
    return seeded_generator(request.node.nodeid, "cpu")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_candidate_is_chosen(arch):
    """No kernel that no call gets, none that a call gets and the invariance tests do not know."""
    assert {config for config, _ in kernels(arch)} == set(candidates(arch))
