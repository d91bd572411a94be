"""compute-sanitizer finds no bad access and no race in a small and in a clustered shape, forward and backward."""

import pytest

from tests.norm.cases import BF16, FP32, Case
from tests.sanitizer import assert_clean, needs_sanitizer

CASES = {
    "small": [Case("rms", 64, rows=1024)],
    "cluster": [Case("layer", 32768, weight=FP32, bias=FP32, rows=16)],
    "off_16_bytes": [Case("layer", 769, rows=65, residual=BF16, dh=True), Case("rms", 5, rows=3)],
    "staged": [
        Case("layer", 10007, rows=70, residual=BF16, dh=True),
        # racecheck takes no account of barrier 0 where a team of several warps has fewer rows than another
        Case("rms", 50257, rows=18),
        Case("layer", 61229, rows=40),
        Case("rms", 151643, rows=28),
        Case("rms", 1001, rows=65),
    ],
    "few_wide": [Case("layer", 98312, weight=FP32, bias=FP32, rows=3)],
}
PROGRAM = """
import sys
import torch
from tests.norm.test_kernel_sanitizer import CASES
from tests.norm.cases import call_and_differentiate, make_inputs, public_norm, seeded_generator

for case in CASES[sys.argv[1]]:
    inputs = make_inputs(case, seeded_generator(str(case), "cpu"))
    for name in ("x", "residual", "weight", "bias", "dy", "dh"):
        if getattr(inputs, name) is not None:
            setattr(inputs, name, getattr(inputs, name).detach().cuda().requires_grad_(name not in ("dy", "dh")))
    results = call_and_differentiate(public_norm, case, inputs)
    torch.cuda.synchronize()
    assert all(result.isfinite().all() for result in results.values())
print("done")
"""


@pytest.mark.slow
@needs_sanitizer
@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ("memcheck", "small"),
        ("memcheck", "cluster"),
        ("memcheck", "off_16_bytes"),
        ("memcheck", "staged"),
        ("memcheck", "few_wide"),
        ("racecheck", "small"),
        ("racecheck", "cluster"),
        ("racecheck", "off_16_bytes"),
        ("racecheck", "staged"),
        ("racecheck", "few_wide"),
    ],
)
@pytest.mark.parametrize("cases", [sum(CASES.values(), [])], ids=[""])  # so that their kernels are precompiled
def test_sanitizer(tool, name, cases):
    assert_clean(tool, PROGRAM, name)
