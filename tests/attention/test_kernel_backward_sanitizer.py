"""compute-sanitizer finds no bad access and no wrong barrier in small cases of attention's backward.

racecheck and initcheck are not run. A warp's lanes read lse and delta, meet, and one of them tells that the slot is
empty; racecheck takes the other lanes' reads and the next copy for a race (LDS and UBLKCP of the SASS, H200). initcheck
sees no write of TMA, so that what the forward wrote counts as unwritten.
"""

from dataclasses import dataclass, field

import pytest
import torch

from cute_kernels import attention
from cute_kernels.attention.config import BACKWARD_CONFIGS
from tests.attention.cases import BF16, Case, gradients_of, make_inputs, make_packed
from tests.attention.on_gpu import HOPPER
from tests.fakes import fake_kernels
from tests.gemm.cases import seeded_generator
from tests.precompiled import precompile
from tests.sanitizer import assert_clean, needs_sanitizer

pytestmark = HOPPER


@dataclass(frozen=True)
class Run:
    """Gradients through ``attention``; of packed sequences of these lengths."""

    sizes: tuple[int, int]
    pairs: int
    options: dict = field(default_factory=dict, hash=False)
    lengths: tuple[int, ...] = ()


RUNS = {
    str(sizes): [
        Run(sizes, 2, {"causal": True}),
        Run(sizes, 1),
        Run(sizes, 1, {"window": (70, 0)}, (150, 0, 7, 65)),
        Run(sizes, 1, {"causal": True, "softcap": 3.0}),
    ]
    for sizes in BACKWARD_CONFIGS
}
PROGRAM = """
import sys
import torch
from tests.attention.test_kernel_backward_sanitizer import RUNS, results

for run in RUNS[sys.argv[1]]:
    found = results(run, "cuda")
    torch.cuda.synchronize()
    assert all(result.isfinite().all() for result in found)
print("done")
"""


def results(run: Run, device: str) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv; the inputs are made on the CPU: the sanitizer makes each kernel slow."""
    (d, dv), generator = run.sizes, seeded_generator(str(run), "cpu")
    case, places = Case(1, 150, 200, 2, run.pairs, d, True, BF16, dv), {}
    if run.lengths:
        inputs, places = make_packed(case, run.lengths, run.lengths, generator)
    else:
        inputs = make_inputs(case, generator)
    places = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in places.items()}
    dout = torch.randn(*inputs.q.shape[:-1], dv, generator=generator).to(BF16)
    inputs = [t.to(device) for t in inputs]
    return gradients_of(lambda q, k, v: attention(q, k, v, **run.options, **places), inputs, dout.to(device))


@pytest.fixture(scope="module")
def compiled_for_the_sanitizer():
    with fake_kernels("sm_90a", computes=False) as jobs:
        for runs in RUNS.values():
            for run in runs:
                results(run, "cpu")
    precompile(jobs)


@pytest.mark.slow
@needs_sanitizer
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_sanitizer(tool, name, compiled_for_the_sanitizer):
    assert_clean(tool, PROGRAM, name)
