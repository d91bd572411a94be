"""The kernel of bench_host.py's floor: launched through the entry that ours have, it does nothing."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from jit_cache import Program, compiled


class Empty:
    """A kernel that takes what an op's takes and does nothing."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor | None,
        y: cute.Tensor,
        statistics: cute.Tensor | None,
        number: Float32,
        count: Int32,
        stream,
    ):
        self.kernel().launch(grid=[count, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self):
        pass


@compiled
def empty(arch: str, op: str, keeps_statistics: bool) -> Program:
    """The kernel that ``launch_floor`` launches for an op."""

    def matrix(dtype: type[cutlass.Numeric] = BFloat16) -> cute.Tensor:
        return cute.runtime.make_fake_tensor(dtype, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1))

    vector = cute.runtime.make_fake_compact_tensor(BFloat16, (cute.sym_int(),))
    return Program(
        Empty(),
        matrix(),
        matrix() if op in ("mm", "linear") else vector,
        vector if op == "layer_norm" else None,
        matrix(),
        matrix(Float32) if keeps_statistics else None,
        Float32(0.0),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
