"""The kernel of bench_host.py's floor: launched through the entry that ours have, it does nothing."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from jit_cache import Program, compiled

# Dimensions of x, weight and bias, or of q, k and v, or of a, b and groups' ends; 0: there is none
DIMENSIONS = {
    "rms_norm": (2, 1, 0),
    "layer_norm": (2, 1, 1),
    "mm": (2, 2, 0),
    "linear": (2, 2, 0),
    "grouped_mm": (2, 3, 1),
    "attention": (4, 4, 4),
}


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

    def tensor(dimensions: int, dtype: type[cutlass.Numeric] = BFloat16) -> cute.Tensor:
        shape = tuple(cute.sym_int() for _ in range(dimensions))
        return cute.runtime.make_fake_tensor(dtype, shape, (*(cute.sym_int64() for _ in shape[1:]), 1))

    x, weight, bias = DIMENSIONS[op]
    return Program(
        Empty(),
        tensor(x),
        tensor(weight),
        tensor(bias, Int32 if op == "grouped_mm" else BFloat16) if bias else None,
        tensor(x),
        tensor(2, Float32) if keeps_statistics else None,
        Float32(0.0),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
