"""The builder of all matrix products ``d = act(a b^T + bias)``: one entry, the kernel by architecture and alignment."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.gemm.config import GemmConfig
from jit_cache import Program, compiled

Dtype = type[cutlass.Numeric]


@compiled
def gemm(
    arch: str,
    dtype: Dtype,
    out: Dtype,
    bias: Optional[Dtype],
    activation: Optional[str],
    keeps_z: bool,
    a_major: str,
    b_major: str,
    transposed: bool,
    accumulate: bool,
    counts_k: bool,
    tma_store: bool,
    config: Optional[GemmConfig],
) -> Program:
    """d (M, N) = act(a b^T + bias) from a (M, K) and b (N, K); M, N, K and the strides are run-time values.

    ``*_major``: the dimension whose elements are neighbours, "m", "n" or "k". It is the last one of what is given: of
    "m" (K, M), of "n" (K, N). ``transposed``: d and z are given as (N, M). The bias lies along the last dimension of
    what is given.
    ``keeps_z``: also store what the activation is applied to. ``accumulate``: the accumulators start from d (fp32).
    ``counts_k``: only as many k as a device int32 says are summed. ``config`` None: the kernel for operands of any
    stride and alignment.
    """
    m, n, k = cute.sym_int(), cute.sym_int(), cute.sym_int()
    aligned = config is not None
    if config is None:
        from cute_kernels.gemm.kernel_any import GemmAny

        kernel = GemmAny(activation, accumulate)
    elif arch.startswith("sm_9"):
        from cute_kernels.gemm.kernel_sm90 import GemmSm90

        kernel = GemmSm90(activation, a_major, b_major, transposed, accumulate, tma_store, config)
    else:
        from cute_kernels.gemm.kernel_sm100 import GemmSm100

        kernel = GemmSm100(activation, a_major, b_major, transposed, accumulate, tma_store, config)
    output = (n, m) if transposed else (m, n)
    return Program(
        kernel,
        symbolic_matrix(dtype, (m, k) if a_major == "k" else (k, m), aligned, any_stride=not aligned),
        symbolic_matrix(dtype, (n, k) if b_major == "k" else (k, n), aligned, any_stride=not aligned),
        symbolic_matrix(out, output, tma_store),
        symbolic_matrix(out, output, tma_store) if keeps_z else None,
        None
        if bias is None
        else cute.runtime.make_fake_compact_tensor(bias, output[1:], assumed_align=bias.width // 8),
        cute.runtime.make_fake_compact_tensor(Int32, (1,), assumed_align=4) if counts_k else None,
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def symbolic_matrix(dtype: Dtype, shape, aligned: bool, any_stride: bool = False):
    """A matrix as the compiler sees it, row-major; ``aligned``: its base and its rows start on 16 bytes."""
    itemsize = dtype.width // 8
    if any_stride:
        return cute.runtime.make_fake_tensor(dtype, shape, (cute.sym_int64(), cute.sym_int64()), assumed_align=itemsize)
    stride = cute.sym_int64(divisibility=16 // itemsize if aligned else 1)
    return cute.runtime.make_fake_tensor(dtype, shape, (stride, 1), assumed_align=16 if aligned else itemsize)
