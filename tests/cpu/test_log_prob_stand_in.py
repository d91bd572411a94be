"""The kernels' path of linear_log_prob on the CPU, plain torch in place of the kernels; the tests are the GPU's own."""

import inspect

import pytest

from cute_kernels.gemm import op_log_prob
from tests.gpu.gemm.test_log_prob import (  # noqa: F401
    test_a_gradient_that_is_negated_lazily,
    test_a_row_has_no_stride,
    test_a_token_does_not_know_its_batch,
    test_a_token_that_is_sure,
    test_against_fp64,
    test_checkpoint,
    test_compile,
    test_dimensions,
    test_every_kernel_has_the_same_bits,
    test_frozen,
    test_micro_batches_add_up_in_main_grad,
    test_no_k,
    test_one_result_alone,
    test_opcheck,
    test_parts_change_no_bit,
    test_provenance,
    test_results_may_be_written_over,
    test_second_derivatives_are_refused,
    test_targets_that_are_no_column,
    test_what_no_target_of_32_bits_is,
)
from tests.log_prob_cases import log_prob_stand_in


@pytest.fixture(autouse=True)
def path_of_the_kernels():
    with log_prob_stand_in() as jobs:
        yield jobs


@pytest.fixture
def traced_log_prob():
    """The function as it goes on for CUDA tensors: the compiler does not see that ``is_cuda`` was replaced."""
    source, condition = inspect.getsource(op_log_prob.linear_log_prob), "not x.is_cuda"
    assert source.count(condition) == 1
    namespace = dict(vars(op_log_prob))
    exec(source.replace(condition, "False"), namespace)
    return namespace["linear_log_prob"]
