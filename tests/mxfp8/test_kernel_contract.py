"""Only CUDA tensors show these: errors at the border of devices, other backends, kernels compiled elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cute_kernels
from cute_kernels import dequantize, quantize_3d_colwise, quantize_rowwise
from cute_kernels.mxfp8 import reference
from cute_kernels.runtime.targets import arch_of
from tests.mxfp8.cases import BF16, FP32, Case, assert_same, call, every_variant, make_input

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (2, 96, 160)


def test_scales_on_another_device():
    q, s = quantize_rowwise(torch.zeros(64, 96, dtype=BF16, device="cuda"))
    with pytest.raises(ValueError, match=r"^dequantize: scale must be on cuda:0, got cpu$"):
        dequantize(q, s.cpu())
    with pytest.raises(ValueError, match=r"^dequantize: scale must be on cpu, got cuda:0$"):
        dequantize(q.cpu(), s)


@pytest.mark.parametrize("case", every_variant(SHAPE), ids=str)
def test_errors_come_each_time_and_spoil_nothing(case, generator):
    """A bad call raises the same error after a good one, and the good one gives the same bytes after it."""
    x = make_input(case, generator)
    wanted = call(case, x, reference)
    function = getattr(cute_kernels, case.name)
    memory = torch.zeros(x.numel() + 8, dtype=BF16, device="cuda")
    for _ in range(2):
        with pytest.raises(ValueError, match="mode must be one of"):
            function(x, **(case.options | {"mode": "RCEIL"}))
        with pytest.raises(ValueError, match="scale_layout must be one of"):
            function(x, **(case.options | {"scale_layout": "swizzled"}))
        with pytest.raises(TypeError, match="dtype must have dtype float8_e4m3fn, float8_e5m2"):
            function(x, **(case.options | {"dtype": BF16}))
        with pytest.raises(TypeError, match="must have dtype bfloat16, float16, float32, got torch.float64"):
            function(x.double(), **case.options)
        with pytest.raises(ValueError, match="last dimensions that are multiples of 32"):
            function(x[..., :48], **case.options)
        with pytest.raises(ValueError, match="must start on 16 bytes"):
            function(memory[1 : 1 + x.numel()].view(x.shape), **case.options)
        assert_same(call(case, x), wanted)


@pytest.mark.parametrize("case", every_variant(SHAPE), ids=str)
def test_errors_in_a_graph(case):
    """Tracing does not see the address: the error names function and argument as in an eager call."""
    torch._dynamo.reset()
    memory = torch.zeros(torch.Size(case.shape).numel() + 1, dtype=BF16, device="cuda")
    compiled = torch.compile(lambda x: call(case, x), fullgraph=True, backend="aot_eager")
    name = "w" if len(case.shape) == 3 else "x"
    with pytest.raises(ValueError, match=f"^{case.name}: {name} must start on 16 bytes"):
        compiled(memory[1:].view(case.shape))


@pytest.mark.parametrize("case", every_variant(SHAPE), ids=str)
def test_reference_backend_on_cuda(case, generator):
    x = make_input(case, generator)
    found = list(getattr(cute_kernels, case.name)(x, **case.options, backend="reference"))
    assert_same(found, call(case, x))
    y, z = (dequantize(found[0], found[1], backend=backend) for backend in (None, "reference"))
    assert torch.equal(y.nan_to_num(7.0), z.nan_to_num(7.0))


def test_cuda_tensors_never_take_the_reference(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the reference ran")

    for name in ("along_k", "along_n", "dequantize", *dict.fromkeys(case.name for case in every_variant(SHAPE))):
        monkeypatch.setattr(reference, name, refuse)
    for case in every_variant(SHAPE):
        found = call(case, torch.zeros(case.shape, dtype=BF16, device="cuda"))
        dequantize(found[0], found[1], dtype=FP32)


def test_no_host_synchronisation():
    w = torch.randn(4, 1408, 2048, device="cuda").to(BF16)
    quantize_3d_colwise(w)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layout in ("plain", "blocked"):
            q, s = quantize_3d_colwise(w, scale_layout=layout)
            dequantize(q, s)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_kernel_compiled_without_a_gpu_runs(tmp_path):
    """One process that sees no GPU compiles, another that may not compile runs."""
    prelude = """
from tests.mxfp8.cases import *
case = Case("3d_dual_square", (3, 96, 416), FP16, mode="even")
"""
    compile_it = f"""
assert not torch.cuda.is_available()
for builder, arguments in kernels_of([case], {arch_of(0)!r}):
    builder.obtain(*arguments)
"""
    run_it = """
from jit_cache import stats
x = make_input(case, seeded_generator("here", "cuda"))
found = call(case, x)
assert_same(found, call(case, x, reference))
cute_kernels.dequantize(found[0], found[1])
cute_kernels.dequantize(found[2], found[3])
assert stats().compiles == 0 and stats().disk_loads == 3, stats()
"""
    for program, extra in ((compile_it, {"CUDA_VISIBLE_DEVICES": ""}), (run_it, {"JIT_CACHE_MODE": "off"})):
        python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        own = {"JIT_CACHE_DIR": str(tmp_path), "JIT_CACHE_BUNDLE": "", "PYTHONPATH": python_path}
        environment = {**os.environ, **own, **extra}
        done = subprocess.run(
            [sys.executable, "-c", prelude + program], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", [Case("rowwise", (64, 64)), Case("3d_dual", (2, 64, 64))], ids=str)
def test_nothing_but_bytes_decides(case, generator):
    """The same call with the input at other addresses of the same alignment."""
    x = make_input(case, generator)
    wanted = call(case, x)
    for offset in (8, 64, 72):
        memory = torch.empty(x.numel() + offset, dtype=BF16, device="cuda")
        moved = memory[offset:].view(x.shape).copy_(x)
        assert_same(call(case, moved), wanted)
