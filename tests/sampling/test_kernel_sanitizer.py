"""compute-sanitizer finds no bad access and no race, in a CTA and in clusters."""

import pytest

from tests.sanitizer import assert_clean, needs_sanitizer

PROGRAM = """
import torch
from cute_kernels import sample
from tests.sampling.cases import Case, make_inputs

generator = torch.Generator("cuda").manual_seed(0)
for columns in (31, 5000, 80000):
    for options in ((), (("top_k", 5),), (("top_p", 0.9), ("min_p", 0.01))):
        tokens = sample(**make_inputs(Case(3, columns, options=options), generator))
        assert ((tokens >= 0) & (tokens < columns)).all()
print("done")
"""


@pytest.mark.slow
@needs_sanitizer
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool):
    assert_clean(tool, PROGRAM, "")
