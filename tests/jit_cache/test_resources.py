"""Registers, local memory and shared memory, against what ptxas says about the same cubin."""

import re
import shutil
import subprocess

import pytest

from jit_cache.resources import Launch, describe, launches

SOURCE = """
extern "C" __global__ void plain(float *x) { x[threadIdx.x] += 1.0f; }
extern "C" __global__ void shared(float *x) {
    __shared__ float tile[512];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[511 - threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float *x) {
    float values[128];
    for (int i = 0; i < 128; ++i) values[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 128; ++i) x[i * 1024 + threadIdx.x] = values[i] * values[(i * 7) % 128];
}
extern "C" __global__ void indexed(float *x, int *k) {
    float values[16];
    for (int i = 0; i < 16; ++i) values[i] = x[i];
    values[k[0] & 15] = 3.0f;
    for (int i = 0; i < 16; ++i) x[i] = values[k[i] & 15];
}
__device__ __noinline__ float helper(float x) { return x * x + 1.0f; }
extern "C" __global__ void calls(float *x) { x[0] = helper(x[0]) + helper(x[1]); }
"""


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_same_as_ptxas(tmp_path, arch):
    (tmp_path / "a.cu").write_text(SOURCE)
    command = ["nvcc", "-cubin", f"-arch={arch}", "-Xptxas", "-v", "-o", tmp_path / "a.cubin", tmp_path / "a.cu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = {}
    for part in done.stderr.split("Compiling entry function '")[1:]:
        name = part.partition("'")[0]
        stack = int(re.search(rf"Function properties for {name}\n\s+(\d+) bytes stack frame", part)[1])
        shared = re.search(r"(\d+) bytes smem", part)
        wanted[name] = int(re.search(r"Used (\d+) registers", part)[1]), stack, int(shared[1]) if shared else 0
    assert wanted.keys() == {"plain", "shared", "spills", "indexed", "calls"}
    assert wanted["shared"][2] == 2048 and wanted["spills"][1] > 0 and wanted["indexed"][1] == 64
    data = b"host code" + (tmp_path / "a.cubin").read_bytes() + b"\x7fELF and more"
    found = {k["name"]: (k["registers"], k["stack_bytes"], k["static_smem_bytes"]) for k in describe(data, [])}
    assert found == wanted


@pytest.mark.parametrize("rest", [bytes(200), b"\xff" * 200, bytes(range(200))])
def test_a_cubin_of_an_unknown_layout_is_left_out(rest):
    assert describe(b"\x7fELF" + bytes(14) + (190).to_bytes(2, "little") + rest, []) == []


def test_bytes_without_a_cubin_hold_no_kernels():
    assert describe(b"", []) == describe(b"\x7fELF", []) == describe(b"\x7fELF" + bytes(100), []) == []


CONFIG = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"


def config(name, threads, shared):
    return "\n".join(
        f"    %{name}{i} = llvm.getelementptr %{name}[0, {field}] : (!llvm.ptr) -> !llvm.ptr, {CONFIG}\n"
        f"    llvm.store %{value}, %{name}{i} : {kind}, !llvm.ptr"
        for i, (field, value, kind) in enumerate(
            [("1, 0", threads, "i32"), ("1, 1", "one", "i32"), ("1, 2", "one", "i32"), ("2", shared, "i64")]
        )
    )


def test_launches_of_one_function():
    text = f"""
  llvm.func @main(%arg0: !llvm.ptr) {{
    %one = llvm.mlir.constant(1 : i32) : i32
    %wide = llvm.mlir.constant(256 : i32) : i32
    %much = llvm.mlir.constant(40960 : i64) : i64
{config("a", "wide", "much")}
    %h = llvm.mlir.addressof @kernels_first : !llvm.ptr
    %r = llvm.call @_cudaLaunchKernelEx(%c, %k, %p) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
{config("b", "wide", "arg1")}
    %i = llvm.mlir.addressof @kernels_second : !llvm.ptr
    %s = llvm.call @_cudaLaunchKernelEx(%c, %k, %p) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
  }}
"""
    assert launches(text) == [Launch("first", 40960, 256), Launch("second", None, 256)]
    assert launches("") == []
