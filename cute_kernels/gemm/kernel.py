"""The builder of all matrix products ``d = act(a b^T + bias)``: one entry, the kernel by architecture and alignment."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.gemm.config import BLOCK, GemmConfig
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
    batched: bool,
    tma_store: bool,
    in_blocks: bool,
    config: Optional[GemmConfig],
) -> Program:
    """d (M, N) = act(a b^T + bias) from a (M, K) and b (N, K); M, N, K and the strides are run-time values.

    ``*_major``: the dimension whose elements are neighbours, "m", "n" or "k". It is the last one of what is given: of
    "m" (K, M), of "n" (K, N). ``transposed``: d and z are given as (N, M). The bias lies along the last dimension of
    what is given.
    ``keeps_z``: also store what the activation is applied to. ``accumulate``: the accumulators start from d (fp32),
    which over no k stays as it is, the sign of zeros, too.
    ``counts_k``: only as many k as a device int32 says are summed. ``batched``: of batches (L, ...), entry by entry, a
    plain product alone; an operand of one entry is multiplied with every entry of the other. ``in_blocks``:
    SM90: one copy loads a tile of an operand along k, and K is a multiple of BLOCK. ``config`` None: the kernel for
    operands of any stride and alignment.
    """
    if batched and (bias is not None or activation is not None or keeps_z or accumulate or counts_k):
        raise ValueError("a batched product has no bias, activation or z, adds to nothing and counts no k")
    m, n, k = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=BLOCK if in_blocks else 1)
    # Of a, b and d, which need not be the same
    batches = [(cute.sym_int(),) if batched else () for _ in range(3)]
    aligned = config is not None
    if config is None:
        from cute_kernels.gemm.kernel_any import GemmAny

        kernel = GemmAny(activation, accumulate)
    elif arch.startswith("sm_9"):
        from cute_kernels.gemm.kernel_sm90 import GemmSm90

        kernel = GemmSm90(activation, a_major, b_major, transposed, accumulate, tma_store, config, in_blocks)
    else:
        from cute_kernels.gemm.kernel_sm100 import GemmSm100

        kernel = GemmSm100(activation, a_major, b_major, transposed, accumulate, tma_store, config)
    output = (n, m) if transposed else (m, n)
    a_shape = (*batches[0], m, k) if a_major == "k" else (*batches[0], k, m)
    b_shape = (*batches[1], n, k) if b_major == "k" else (*batches[1], k, n)
    d_shape = (*batches[2], *output)
    return Program(
        kernel,
        symbolic_matrix(dtype, a_shape, aligned, any_stride=not aligned),
        symbolic_matrix(dtype, b_shape, aligned, any_stride=not aligned),
        symbolic_matrix(out, d_shape, tma_store),
        symbolic_matrix(out, d_shape, tma_store) if keeps_z else None,
        None
        if bias is None
        else cute.runtime.make_fake_compact_tensor(bias, output[1:], assumed_align=bias.width // 8),
        cute.runtime.make_fake_compact_tensor(Int32, (1,), assumed_align=4) if counts_k else None,
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def symbolic_matrix(dtype: Dtype, shape, aligned: bool, any_stride: bool = False):
    """A matrix, or a batch of some, as the compiler sees it, row-major.

    ``aligned``: its base and its rows start on 16 bytes.
    """
    itemsize = dtype.width // 8
    divisor = 16 // itemsize if aligned else 1
    strides = [cute.sym_int64(divisibility=1 if any_stride else divisor) for _ in shape]
    if not any_stride:
        strides[-1] = 1
    return cute.runtime.make_fake_tensor(dtype, shape, tuple(strides), assumed_align=16 if aligned else itemsize)
