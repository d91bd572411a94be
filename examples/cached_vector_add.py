"""A CuTe kernel of your own, kept by jit_cache: the second run compiles nothing.

    python examples/cached_vector_add.py

Runs on a Hopper or newer GPU if there is one, else compiles for sm_90a. The key of the kernel is the arguments of its
builder, this file, the compiler's version and the architecture; edit the kernel and it is compiled again.
"""

import time

import cutlass
import cutlass.cute as cute
import torch

from jit_cache import Program, compiled, stats


class VectorAdd:
    """out = x + y, one element a thread."""

    def __init__(self, threads):
        self.threads = threads

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, stream):
        blocks = cute.ceil_div(x.shape[0], self.threads)
        self.kernel(x, y, out).launch(grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        i = block * self.threads + thread
        if i < x.shape[0]:
            out[i] = x[i] + y[i]


@compiled
def vector_add(arch: str, dtype, threads: int = 256) -> Program:
    """The builder: its arguments are the key. The length is symbolic, so any length uses the same kernel."""
    n = cute.sym_int()
    x, y, out = (cute.runtime.make_fake_compact_tensor(dtype, (n,), assumed_align=16) for _ in range(3))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)  # torch's current stream
    return Program(VectorAdd(threads), x, y, out, stream)


def main():
    start = time.perf_counter()
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if major >= 9:  # what has architecture-specific kernels
        add = vector_add(f"sm_{major}{minor}a", cutlass.Float32)
        x, y = (torch.randn(1_000_003, device="cuda") for _ in range(2))
        out = torch.empty_like(x)
        add(x, y, out)
        torch.testing.assert_close(out, x + y)
        print(f"ran on {torch.cuda.get_device_name()}: the sum is right")
    else:
        vector_add("sm_90a", cutlass.Float32)
        print("no GPU here, or an older one: compiled for sm_90a, not run")
    done = stats()
    how = "compiled" if done.compiles else "loaded from the cache"
    print(f"{how} in {time.perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
