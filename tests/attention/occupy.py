"""A kernel that keeps SMs busy: a CTA on each, with so much shared memory that no other one fits beside it."""

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from jit_cache import Program, compiled

SHARED_MEMORY = 200 << 10


class Occupy:
    """A CTA for each element of ``done``, which becomes 1 after ``nanoseconds``."""

    @cute.jit
    def __call__(self, done: cute.Tensor, nanoseconds: Int64, stream):
        self.kernel(done, nanoseconds).launch(grid=[done.shape[0], 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, done: cute.Tensor, nanoseconds: Int64):
        SmemAllocator().allocate(SHARED_MEMORY, 128)
        start = cute.arch.globaltimer()
        now = start
        while now - start < nanoseconds:
            now = cute.arch.globaltimer()
        bidx, _, _ = cute.arch.block_idx()
        done[bidx] = Int32(1)


@compiled
def occupy(arch: str) -> Program:
    """Keep SMs busy for some time; ``done`` (CTAs,) int32."""
    done = cute.runtime.make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4)
    return Program(Occupy(), done, Int64(1), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))
