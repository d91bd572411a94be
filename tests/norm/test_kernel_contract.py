"""Only CUDA tensors show these: errors at the border of devices, other backends, kernels compiled elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_kernels import layer_norm, rms_norm
from cute_kernels.runtime.targets import arch_of
from tests.norm.cases import BF16, KINDS, OPS, Case, check, make_inputs, oracle

ROOT = Path(__file__).resolve().parents[2]


def test_parameters_on_another_device():
    x = torch.zeros(4, 1024, dtype=BF16, device="cuda")
    cpu = torch.ones(1024)
    with pytest.raises(ValueError, match=r"rms_norm: weight must be on cuda:0, got cpu"):
        rms_norm(x, cpu)
    with pytest.raises(ValueError, match=r"layer_norm: bias must be on cuda:0, got cpu"):
        layer_norm(x, cpu.cuda(), cpu)
    with pytest.raises(ValueError, match=r"rms_norm: residual must be on cuda:0, got cpu"):
        rms_norm(x, residual=x.cpu())
    with pytest.raises(ValueError, match=r"rms_norm: weight must be on cpu, got cuda:0"):
        rms_norm(x.cpu(), cpu.cuda())


@pytest.mark.parametrize("kind", KINDS)
def test_errors_come_each_time_and_spoil_nothing(kind, generator):
    """A refused call leaves no plan behind, and a good call no licence for bad ones that look like it."""
    norm = OPS[kind]
    case = Case(kind, 1024)
    inputs = make_inputs(case, generator, 5 * 1024)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"weight must have shape \(1024,\), as x has 1024 columns, got \(1023,\)"):
            norm(inputs.x, inputs.weight[:1023])
        check({"y": norm(inputs.x, inputs.weight, eps=1e-5).detach()}, oracle(case, inputs))
        with pytest.raises(ValueError, match="residual must have shape"):
            norm(inputs.x, inputs.weight, residual=inputs.x[:3])
        with pytest.raises(ValueError, match="eps must be a float, positive and finite in fp32, got 0.0"):
            norm(inputs.x, inputs.weight, eps=0.0)
        with pytest.raises(TypeError, match="x must have dtype"):
            norm(inputs.x.double(), inputs.weight)
        with pytest.raises(ValueError, match="leading dimensions that collapse to rows of one stride, got"):
            norm(torch.zeros(4, 6, 1024, device="cuda").transpose(0, 1), inputs.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_backend_on_cuda(kind, generator):
    case = Case(kind, 1024)
    inputs = make_inputs(case, generator, 65 * 1024)
    y = OPS[kind](inputs.x, inputs.weight, eps=1e-5, backend="reference")
    check({"y": y.detach()}, oracle(case, inputs))


def test_cuda_tensors_never_take_the_reference(monkeypatch):
    from cute_kernels.norm import reference

    def refuse(*args, **kwargs):
        raise AssertionError("the reference ran")

    monkeypatch.setattr(reference, "rms_norm", refuse)
    rms_norm(torch.zeros(4, 1024, dtype=BF16, device="cuda"))


def test_a_kernel_compiled_without_a_gpu_runs(tmp_path):
    """One process that sees no GPU compiles, another that may not compile runs."""
    case = 'Case("layer", 1040, bias=BF16)'
    prelude = "from tests.norm.cases import *\n"
    compile_it = f"""
assert not torch.cuda.is_available()
for builder, arguments in kernels_of([{case}], {arch_of(0)!r}):
    builder.obtain(*arguments)
"""
    run_it = f"""
from jit_cache import stats
case = {case}
inputs = make_inputs(case, seeded_generator("here", "cuda"), 65 * 1040)
check(call_and_differentiate(public_norm, case, inputs), oracle(case, inputs))
assert stats().compiles == 0 and stats().disk_loads == 2, stats()
"""
    for program, extra in ((compile_it, {"CUDA_VISIBLE_DEVICES": ""}), (run_it, {"JIT_CACHE_MODE": "off"})):
        python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        own = {"JIT_CACHE_DIR": str(tmp_path), "JIT_CACHE_BUNDLE": "", "PYTHONPATH": python_path}
        environment = {**os.environ, **own, **extra}
        done = subprocess.run(
            [sys.executable, "-c", prelude + program], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
