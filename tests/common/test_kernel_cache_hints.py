"""The policies evict_first and evict_last are what the GPU itself makes of their names."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64

from cute_kernels.common.cache_hints import EVICT_FIRST, EVICT_LAST, EVICT_NORMAL, evict_first_if
from cute_kernels.runtime.targets import arch_of
from jit_cache import Program, compiled


class Policies:
    """Policies that createpolicy makes, and the choice between two of ours, to ``out`` (4,)."""

    @cute.jit
    def __call__(self, out: cute.Tensor, limit: Int32, stream):
        self.kernel(out, limit).launch(grid=[1, 1, 1], block=[1, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor, limit: Int32):
        for i in cutlass.range_constexpr(2):
            name = "evict_first" if i == 0 else "evict_last"
            instruction = f"createpolicy.fractional.L2::{name}.b64 {{$w0}}, 1.0;"
            out[i] = cute.arch.inline_ptx(instruction, write_only_types=[Int64], read_only_args=[])
            out[2 + i] = evict_first_if(i < limit)


@compiled
def policies(arch: str) -> Program:
    out = cute.runtime.make_fake_compact_tensor(Int64, (4,), assumed_align=8)
    return Program(Policies(), out, Int32(0), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))


def test_policies_are_those_of_the_gpu():
    out = torch.zeros(4, dtype=torch.int64, device="cuda")
    policies(arch_of(0))(out, 1)
    assert out.tolist() == [EVICT_FIRST, EVICT_LAST, EVICT_FIRST, EVICT_NORMAL]
