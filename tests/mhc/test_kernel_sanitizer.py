"""compute-sanitizer finds no bad access and no race in small calls of each kernel, forward and backward."""

import pytest

from cute_kernels.runtime.targets import arch_of
from tests.mhc.cases import BF16, FP16, FP32, Case
from tests.mhc.conftest import kernels_of
from tests.precompiled import precompile
from tests.sanitizer import assert_clean, needs_sanitizer

PARTS = ("projection", "coefficients", "sinkhorn", "aggregate", "expand_combine", "expand", "contract")
STREAMWISE = ("aggregate", "expand_combine")
PRODUCTS = ("projection", "head", "hyper_connection")
# Rows on and off 16 bytes, the last tile of tokens and of channels not whole, several chunks, parts of K
RUNS = {
    "streams": [(op, Case(4, 64, (67,), norm_weight=True, bias=True, dropout_p=0.3)) for op in PARTS],
    "channels": [(op, Case(4, 64, (67,), FP16, BF16, "transformer_engine", bias=True)) for op in PARTS],
    "unaligned": [(op, Case(4, 13, (35,), FP32, norm_weight=True, bias=True, dropout_p=0.3)) for op in PARTS]
    + [(op, Case(2, 13, (35,), BF16, layout="channels", bias=True)) for op in ("aggregate", *PRODUCTS)],
    "composites": [(op, Case(4, 136, (133,), norm_weight=True, bias=True)) for op in ("pre", *PRODUCTS)]
    + [(op, Case(4, 40, (133,), FP16, layout="channels")) for op in PRODUCTS],
    "eight_streams": [
        (op, Case(8, 40, (35,), norm_weight=True, bias=True)) for op in dict.fromkeys((*PARTS, *PRODUCTS))
    ],
    "one_stream": [(op, Case(1, 72, (35,), norm_weight=True, bias=True)) for op in dict.fromkeys((*PARTS, *PRODUCTS))],
    "wide": [(op, Case(4, 2048, (3,), bias=True, layout=a)) for op in STREAMWISE for a in ("streams", "channels")]
    + [(op, Case(8, 1024, (3,))) for op in STREAMWISE],
    "clusters": [("pre", Case(4, 4096, (130,), norm_weight=True))],
    "rings": [(op, Case(4, 5120, (150,))) for op in ("projection", "pre")],  # the only cluster has ten blocks
    "chunks": [("hyper_connection", Case(2, 2056, (520,), norm_weight=True, bias=True))],
    "pairs": [  # of CTAs, by warpgroups: one pair has all tiles of two slices or more
        ("pre", Case(8, 40, (330,))),
        ("hyper_connection", Case(8, 40, (330,), norm_weight=True)),
        ("hyper_connection", Case(8, 40, (330,), layout="channels", res_orientation="oi")),
    ],
    "groups": [("hyper_connection", Case(4, 64, (2000,))), ("projection", Case(4, 64, (2000,), layout="channels"))],
}
PROGRAM = """
import sys
import torch
from cute_kernels import mhc
from cute_kernels.runtime import launches
from cute_kernels.runtime.targets import Target, arch_of
from tests.mhc.test_kernel_sanitizer import RUNS, precision_of_run
from tests.mhc.cases import differentiate, make_inputs, make_upstream, seeded_generator

if sys.argv[1] in ("groups", "pairs", "rings"):
    # One CTA, pair or cluster has all chunks; a CTA takes them by groups
    launches.target_of = lambda index: Target(arch_of(index), 1)
for op, case in RUNS[sys.argv[1]]:
    generator = seeded_generator(str(case), "cpu")  # the sanitizer makes each kernel slow
    tensors = {name: t.detach().cuda().requires_grad_() for name, t in make_inputs(case, generator).items()}
    upstream = {name: t.cuda() for name, t in make_upstream(op, case, generator).items()}
    for precision in precision_of_run(op):
        found = differentiate(mhc, op, case, tensors, upstream, **precision)
        torch.cuda.synchronize()
        assert all(result.isfinite().all() for result in found.values())
print("done")
"""


def precision_of_run(op: str) -> list[dict]:
    return [{"precision": name} for name in ("tf32", "fp32")] if op == "projection" else [{}]


@pytest.fixture(scope="module")
def compiled_for_the_sanitizer():
    calls = [
        (op, case, options.get("precision", "tf32"), True)
        for runs in RUNS.values()
        for op, case in runs
        for options in precision_of_run(op)
    ]
    precompile(kernels_of(calls, arch_of(0)))


def test_the_runs_are_not_twice_the_same():
    for runs in RUNS.values():
        assert len(set(runs)) == len(runs)
    assert {case.dtype for runs in RUNS.values() for _, case in runs} == {BF16, FP16, FP32}


@pytest.mark.slow
@needs_sanitizer
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool, name, compiled_for_the_sanitizer):
    assert_clean(tool, PROGRAM, name)
