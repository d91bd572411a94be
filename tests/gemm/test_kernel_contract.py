"""Only CUDA tensors show these: errors at the border of devices, no fallback, kernels compiled elsewhere.

The ten findings of the review of the origin, and what holds each off here:
1. a CPU call that silently ran another operator: CPU tensors run the reference by contract, and nothing but the
   reference (tests/gemm/test_reference.py); tests/gemm/test_arguments.py, test_no_fallback.
2. a benchmark that failed opaquely without the extension: there is no extension; bench refuses to start without a GPU.
3. no device guard, mixed devices accepted: test_operands_on_another_device; test_torch.py, test_second_device.
4. documents that described another kernel: `provenance` names contract and kernel of a call;
   tests/gemm/test_arguments.py, test_provenance_names_what_computed; test_cuda_tensors_never_take_a_fallback.
5. a functional entry that bypassed the checks: mm and linear are the only entries, and nn.Linear calls linear;
   test_errors_come_each_time_and_spoil_nothing.
6. gradients of weights that changed with padding and chunks: test_invariance.py, B0 to B3.
7. no check of K: test_errors_come_each_time_and_spoil_nothing.
8. conflicting compiler flags of two architectures: impossible, a kernel is compiled for one named architecture, which
   is part of its key (tests/gemm/test_compile.py).
9. tests that ran a backend that was not there: impossible, test_kernel*.py are skipped without a GPU that has kernels.
10. loose tolerances: gemm_cases.check and check_gates, which tests/gemm/test_reference.py holds to fail.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_kernels import linear, mm
from cute_kernels.gemm import reference
from cute_kernels.runtime.launches import observed
from tests.gemm.cases import BF16, FP16, FP32, Case, check, here, make_inputs, oracle, randn, run

pytestmark = pytest.mark.usefixtures("gemms_precompiled")

ROOT = Path(__file__).resolve().parents[2]


def test_operands_on_another_device():
    """CPU and CUDA mixed, in each position; nothing is moved."""
    a, b = torch.zeros(4, 64, dtype=BF16, device="cuda"), torch.zeros(64, 32, dtype=BF16, device="cuda")
    bias = torch.zeros(32, device="cuda")
    for call, message in (
        (lambda: mm(a, b.cpu()), "mm: b must be on cuda:0, got cpu"),
        (lambda: mm(a.cpu(), b), "mm: b must be on cpu, got cuda:0"),
        (lambda: mm(a, b, out=torch.zeros(4, 32, dtype=BF16)), "mm: out must be on cuda:0, got cpu"),
        (lambda: linear(a, b.t().cpu()), "linear: weight must be on cuda:0, got cpu"),
        (lambda: linear(a.cpu(), b.t()), "linear: weight must be on cpu, got cuda:0"),
        (lambda: linear(a, b.t(), bias.cpu()), "linear: bias must be on cuda:0, got cpu"),
        (lambda: linear(a.cpu(), b.t().cpu(), bias), "linear: bias must be on cpu, got cuda:0"),
        (
            lambda: linear(a, b.t().detach().requires_grad_(), num_valid_tokens=torch.zeros(1, dtype=torch.int32)),
            "linear: num_valid_tokens must be on cuda:0, got cpu",
        ),
    ):
        mm(a, b), linear(a, b.t(), bias)
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == message


def test_errors_come_each_time_and_spoil_nothing(generator):
    """A refused call leaves no plan behind, and a good call no licence for bad ones that look like it."""
    case = Case(65, 96, 64, bias=FP32)
    inputs = make_inputs(case, generator)
    x, weight, bias = (t.detach() for t in (inputs.x, inputs.weight, inputs.bias))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^mm: b must have 64 rows, as a has columns, got shape \(63, 96\)$"):
            mm(x, weight.t()[:63])
        with pytest.raises(TypeError, match=r"^mm: a must have dtype bfloat16, float16, got torch\.float32$"):
            mm(x.float(), weight.t().float())
        with pytest.raises(TypeError, match=r"^mm: b must have dtype torch\.bfloat16, got torch\.float16$"):
            mm(x, weight.t().to(FP16))
        with pytest.raises(ValueError, match=r"^mm: out must have shape \(65, 96\), got \(65, 95\)$"):
            mm(x, weight.t(), out=torch.zeros(65, 95, dtype=BF16, device="cuda"))
        with pytest.raises(ValueError, match=r"^linear: bias must have shape \(96,\), got \(95,\)$"):
            linear(x, weight, bias[:95])
        with pytest.raises(ValueError, match=r"^linear: weight must have 64 columns, as x has, got shape \(96, 63\)$"):
            linear(x, weight[:, :63])
        with pytest.raises(ValueError, match=r"^linear: activation must be one of"):
            linear(x, weight, bias, activation="tanh")
        check(run(linear, case, inputs), oracle(case, inputs))


def test_reference_backend_on_cuda(generator):
    case = Case(65, 96, 64, bias=FP32, activation="gelu")
    inputs = make_inputs(case, generator)
    check(run(linear, case, inputs, backend="reference"), oracle(case, inputs))


def test_cuda_tensors_never_take_a_fallback(generator, monkeypatch):
    """Aligned or not, forward and backward: neither the reference nor a product of torch runs, our kernels do."""
    products = {"aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear", "aten::baddbmm"}

    def refuse(*args, **kwargs):
        raise AssertionError("the reference ran")

    for name in ("mm", "linear"):
        monkeypatch.setattr(reference, name, refuse)
    for case in (Case(65, 96, 64, bias=FP32, activation="silu"), Case(9, 33, 17)):
        inputs = make_inputs(case, generator)
        exact = oracle(case, inputs)
        with torch.profiler.profile() as profile, observed() as launches:
            found = run(linear, case, inputs)
            mm(inputs.x.detach(), inputs.weight.detach().t())
        check(found, exact)
        ran = {event.name for event in profile.events()}
        assert not ran & products and any(name.startswith("aten::") for name in ran)
        assert len(launches) == 4 + (case.bias is not None)  # y, dx, dweight, perhaps dbias; mm


def test_a_kernel_compiled_without_a_gpu_runs(tmp_path):
    """One process that sees no GPU compiles, another that may not compile runs."""
    case = "Case(65, 104, 72, bias=FP16)"
    prelude = f"from tests.gemm.cases import *\nfrom tests.gemm.cases import Case, kernels_of\ncase = {case}\n"
    compile_it = f"""
import torch
assert not torch.cuda.is_available()
jobs = dict.fromkeys(kernels_of([case], {here()!r}))
for builder, arguments in jobs:
    builder.obtain(*arguments)
print(len(jobs))
"""
    run_it = """
from cute_kernels import linear
from jit_cache import stats
from tests.gemm.cases import check, make_inputs, oracle, run
inputs = make_inputs(case, seeded_generator("here", "cuda"))
check(run(linear, case, inputs), oracle(case, inputs))
assert stats().compiles == 0, stats()
print(stats().disk_loads)
"""
    printed = []
    for program, extra in ((compile_it, {"CUDA_VISIBLE_DEVICES": ""}), (run_it, {"JIT_CACHE_MODE": "off"})):
        python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        own = {"JIT_CACHE_DIR": str(tmp_path), "JIT_CACHE_BUNDLE": "", "PYTHONPATH": python_path}
        environment = {**os.environ, **own, **extra}
        done = subprocess.run(
            [sys.executable, "-c", prelude + program], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1] and int(printed[0]) >= 4  # forward, dx, dweight, dbias


def test_results_do_not_depend_on_what_memory_held(generator):
    """Outputs are allocated, not cleared: every element is written."""
    for m, n, k in ((300, 264, 200), (5, 97, 64), (65, 33, 17)):
        a, b = randn(m, k, generator=generator).to(BF16), randn(k, n, generator=generator).to(BF16)
        for value in (float("nan"), 1.0):
            dirty = torch.full((m, n), value, dtype=FP32, device=a.device)
            del dirty
            y = mm(a, b, out_dtype=FP32)
            assert y.isfinite().all() and torch.equal(y, mm(a, b, out_dtype=FP32))
