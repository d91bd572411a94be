"""A kernel that keeps SMs busy: a CTA on each, with so much shared memory that no other one fits beside it."""

from collections.abc import Callable, Iterator
from typing import Any

import cutlass.cute as cute
import torch
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


def beside_other_work(call: Callable[[int], Any], runs: int = 200) -> Iterator[Any]:
    """The results of ``call`` in each run, on two streams in turn, while CTAs come and go on more or fewer SMs."""
    busy, side, other = occupy("sm_90a"), torch.cuda.Stream(), torch.cuda.Stream()
    places = torch.zeros(132, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    for i in range(runs):
        with torch.cuda.stream(side):
            busy(places[: 37 * i % 131 + 1], 50_000)
        with torch.cuda.stream(other if i % 2 else torch.cuda.current_stream()):
            found = call(i)
        torch.cuda.synchronize()
        yield found
