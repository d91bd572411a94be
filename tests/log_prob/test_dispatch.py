"""The kernels' path of linear_log_prob on the CPU, plain torch in place of the kernels; the tests are the GPU's own."""

import pytest
import torch

from cute_kernels import linear_log_prob
from tests.fakes import fake_kernels
from tests.log_prob.cases import Case, make_inputs, run
from tests.log_prob.test_kernel import (  # noqa: F401
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
    test_kept_logits,
    test_kept_logits_are_used_once,
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


@pytest.fixture(autouse=True)
def jobs():
    with fake_kernels() as jobs:
        yield jobs


def kernels_of(jobs, tokens):
    """Those of the family that so many tokens ask for, each number of them in turn."""
    jobs.clear()
    for m in tokens:
        case = Case(m, 264, 64)
        run(linear_log_prob, case, make_inputs(case, torch.Generator()))
    return {job for job in jobs if "log_prob" in job[0].__name__}


def test_another_number_of_tokens_compiles_nothing(jobs):
    """Once each kernel has been chosen."""
    first = kernels_of(jobs, (3, 70, 300))
    assert len(first) == 1 + 3 + 3
    assert kernels_of(jobs, (1, 20, 64, 65, 128, 129, 257, 500)) <= first
