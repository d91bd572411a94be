"""compute-sanitizer finds no bad access and no race."""

import pytest

from tests.sanitizer import assert_clean, needs_sanitizer

PROGRAM = """
import torch
from cute_kernels import scatter
from tests.scatter.cases import Case, make_inputs

generator = torch.Generator("cuda").manual_seed(0)
for case in (Case(1300, 40, 17, "zipf"), Case(900, 5, 64, "blocks"), Case(1, 3, 8)):
    dy, ids = make_inputs(case, generator)
    assert scatter.embedding_backward(dy, ids, case.rows).isfinite().all()
    x = torch.zeros(case.rows, case.columns, device="cuda")
    assert scatter.index_sum(x, ids, dy).isfinite().all()
x = torch.zeros(33, 21, device="cuda")
index = torch.randint(21, (33, 9), device="cuda")
assert scatter.index_sum(x, index, torch.ones(33, 9, device="cuda"), dim=1).isfinite().all()
print("done")
"""


@pytest.mark.slow
@needs_sanitizer
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    assert_clean(tool, PROGRAM, "")
