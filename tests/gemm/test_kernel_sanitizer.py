"""compute-sanitizer finds no bad access and no race in small products of each kernel, forward and backward."""

from dataclasses import dataclass

import pytest
import torch

from cute_kernels import grouped_mm, linear
from cute_kernels.gemm.config import (
    DECODE_16,
    DECODE_32,
    DECODE_32_PAIR,
    DECODE_64,
    DECODE_128_PAIR,
    FEW_WEIGHTS,
    FEW_WEIGHTS_DEEP,
    PING_PONG,
    PREFILL,
)
from cute_kernels.gemm.config_grouped import candidates
from tests.fakes import fake_kernels
from tests.gemm.cases import FP32, Case, here, make_inputs, only_kernel, seeded_generator
from tests.gemm.grouped_cases import Grouped, make_grouped, only_grouped
from tests.precompiled import precompile
from tests.sanitizer import assert_clean, needs_sanitizer


@dataclass(frozen=True)
class Run:
    """A layer and its gradients on one kernel, (config, transposed); what that cannot read goes to the one that can."""

    case: Case
    kernel: tuple
    main_grad: bool = False
    valid: int | None = None  # num_valid_tokens
    num_sms: int = 132  # 2: one cluster computes all tiles


ANY = (None, False)
WIDE, WIDE_N = (PREFILL[0], False), (PREFILL[3], False)  # clusters along M, along N
# Some rows, columns and k beyond a tile, or fewer than one has
RUNS = {
    "prefill": [Run(Case(136, 264, 72), WIDE)],
    "decode": [
        Run(Case(13, 136, 264), (DECODE_16, True)),
        Run(Case(40, 72, 136), (DECODE_32, False)),
        Run(Case(40, 136, 136), (DECODE_64, True)),
    ],
    "clusters": [
        Run(Case(136, 264, 72), WIDE_N),
        Run(Case(72, 72, 136), (DECODE_32_PAIR, True)),
    ],
    "ping-pong": [
        Run(Case(264, 520, 72, bias=FP32), (PING_PONG[0], False), main_grad=True, num_sms=2),
        Run(Case(520, 264, 72, bias=FP32, activation="gelu"), (PING_PONG[1], False), valid=67, num_sms=2),
        Run(Case(136, 393, 200, out=FP32), (PING_PONG[2], False), num_sms=2),
    ],
    "few weights": [  # K in blocks, a ring that all tiles share, its slots used again and again
        Run(Case(13, 136, 576), (FEW_WEIGHTS[8], True), num_sms=2),
        Run(Case(13, 136, 576), (FEW_WEIGHTS_DEEP, True), num_sms=2),
        Run(Case(40, 136, 576), (FEW_WEIGHTS[64], True), num_sms=2),
    ],
    "unaligned": [
        Run(Case(65, 33, 17, bias=FP32, activation="silu"), ANY),
        Run(Case(136, 265, 72, bias=FP32, activation="gelu"), WIDE),  # the forward's result alone
    ],
    "accumulate": [
        Run(Case(136, 264, 72, bias=FP32), WIDE, main_grad=True),
        Run(Case(136, 265, 72, bias=FP32), WIDE, main_grad=True),
        Run(Case(72, 72, 136, bias=FP32), (DECODE_32_PAIR, True), main_grad=True),
    ],
    "valid_tokens": [
        Run(Case(136, 264, 72, bias=FP32), WIDE, main_grad=True, valid=67),
        Run(Case(72, 72, 136, bias=FP32), (DECODE_32_PAIR, True), valid=67),
        Run(Case(65, 33, 17, bias=FP32), ANY, valid=35),
    ],
    "epilogue": [
        Run(Case(136, 264, 72, bias=FP32, activation="gelu"), WIDE),
        Run(Case(136, 264, 72, bias=FP32, activation="gelu", out=FP32), WIDE_N),
        Run(Case(72, 136, 72, bias=FP32, activation="gelu"), (DECODE_128_PAIR, True)),
    ],
}
GROUPED = {f"grouped {ragged}": candidates(here(), ragged) for ragged in ("rows", "sums")}
if here() != "sm_90a":  # the only one that has these kernels
    del RUNS["ping-pong"], RUNS["few weights"]
PROGRAM = """
import sys
import torch
from tests.gemm.test_kernel_sanitizer import RUNS, grouped_results, results

name = sys.argv[1]
for run in RUNS.get(name) or [None]:
    found = grouped_results(name, "cuda") if run is None else results(run, "cuda")
    torch.cuda.synchronize()
    assert all(result.isfinite().all() for result in found)
print("done")
"""


def results(run: Run, device: str) -> list[torch.Tensor]:
    """y and all gradients; the inputs are made on the CPU: the sanitizer makes each kernel slow."""
    inputs = make_inputs(run.case, seeded_generator(str(run), "cpu"))
    leaves = [t.detach().to(device).requires_grad_() for t in inputs.leaves.values()]
    x, *parameters = leaves
    for parameter in parameters if run.main_grad else ():
        parameter.main_grad = torch.zeros_like(parameter, dtype=FP32)
    count = None if run.valid is None else torch.tensor([run.valid], dtype=torch.int32).to(device)
    with only_kernel(*run.kernel, run.num_sms):
        y = linear(*leaves, num_valid_tokens=count, **run.case.options)
        y.backward(inputs.dy.to(device))
    return [y.detach(), x.grad, *(p.main_grad if run.main_grad else p.grad for p in parameters)]


def grouped_results(name: str, device: str) -> list[torch.Tensor]:
    """Products of groups that end anywhere, with rows behind them, on each kernel; few CTAs compute all tiles."""
    tensors = make_grouped(Grouped("few", 136, 72, rest=8), seeded_generator(name, "cpu"))
    a, b, offs = (t.to(device) for t in tensors)
    found = []
    for kernel in GROUPED[name]:
        with only_grouped(*kernel, num_sms=16):
            if name == "grouped rows":
                found += [grouped_mm(a, b, offs), grouped_mm(a, b, offs, out_dtype=FP32)]
            else:
                into = torch.zeros(len(offs), 72, 136, device=device)
                dout = a[:, :1].expand(-1, 136).contiguous()
                found += [grouped_mm(a.t(), dout, offs), grouped_mm(a.t(), dout, offs, accumulate_into=into)]
    return found


@pytest.fixture(scope="module")
def compiled_for_the_sanitizer():
    with fake_kernels(here(), computes=False) as jobs:
        for name in GROUPED:
            grouped_results(name, "cpu")
        for runs in RUNS.values():
            for run in runs:
                results(run, "cpu")
    precompile(jobs)


@pytest.mark.slow
@needs_sanitizer
@pytest.mark.parametrize("name", [*RUNS, *GROUPED])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool, name, compiled_for_the_sanitizer):
    assert_clean(tool, PROGRAM, name)
