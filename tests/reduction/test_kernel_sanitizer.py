"""compute-sanitizer finds no bad access and no race, forward and backward."""

import pytest

from tests.reduction.cases import SoftmaxCase
from tests.sanitizer import assert_clean, needs_sanitizer

CASES = [SoftmaxCase("softmax", 64), SoftmaxCase("log_softmax", 769), SoftmaxCase("softmax", 32000)]
CASES += [SoftmaxCase("softmax", 10007), SoftmaxCase("log_softmax", 50257)]  # written through shared memory
PROGRAM = """
import torch
from cute_kernels import reduction
from tests.reduction.test_kernel import call
from tests.reduction.test_kernel_sanitizer import CASES
from tests.reduction.cases import make_inputs

for case in CASES:
    x, dy = make_inputs(case, 33, torch.Generator())
    results = call(case, x.detach().cuda().requires_grad_(), dy.cuda())
    torch.cuda.synchronize()
    assert all(result.isfinite().all() for result in results.values())
x = torch.randn(3, 600, 21, device="cuda")
for rows, n in ((140, 50257), (900, 10007)):  # several rows a team
    assert reduction.logsumexp(torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)).isfinite().all()
for part in (x, x[..., :19], x[..., 2:]):  # accesses of one element, and of one beside others
    for dim in (0, 1, 2, (0, 2), None):
        assert reduction.sum(part, dim).isfinite().all()
print("done")
"""


@pytest.mark.slow
@needs_sanitizer
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("cases", [CASES], ids=[""])  # so that their kernels are precompiled
def test_sanitizer(tool, cases):
    assert_clean(tool, PROGRAM, "")
