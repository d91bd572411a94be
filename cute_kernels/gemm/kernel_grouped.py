"""The builder of grouped products: one entry, the kernel by architecture, what is ragged, and alignment."""

from typing import Optional

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.gemm_config import BLOCK, GemmConfig
from cute_kernels.common.symbolic import symbolic_matrix
from cute_kernels.gemm.config_grouped import GroupedSpec, begins_anywhere
from jit_cache import Program, compiled


@compiled
def grouped(
    arch: str, spec: GroupedSpec, config: Optional[GemmConfig], transposed: bool, multi_block_tma: bool
) -> Program:
    """Products of groups whose inclusive ends are ``offs`` (E,) int32; sizes and strides are run-time values.

    "rows": d (R, N) from a (R, K) and b (E, N, K). "sums": d (E, M, N) from a (M, R) and b (N, R). An operand's
    neighbours lie along the last dimension of what is given: of one along m it is (..., K, M), along n (..., K, N).
    ``config`` None: the kernel for operands of any stride and alignment. ``transposed``: of rows; computes d^T; a and
    b, and their majors, are given in exchange, and d is (R, N) as ever. ``multi_block_tma``: one copy loads a tile of
    an operand along k, and K is a multiple of BLOCK.
    """
    is_rows = spec.ragged == "rows"
    if spec.accumulate and is_rows:
        raise ValueError("rows are not accumulated into")
    if config is not None and not begins_anywhere(spec.ragged, *spec.majors):
        raise ValueError(f"groups begin at any row of rows of tokens alone, got operands along {spec.majors}")
    m, n, groups = cute.sym_int(), cute.sym_int(), cute.sym_int()
    k = cute.sym_int(divisibility=BLOCK if multi_block_tma else 1)
    a_along_k, b_along_k = (major in ("k", None) for major in spec.majors)
    a_shape = (m, k) if a_along_k else (k, m)
    b_shape = (n, k) if b_along_k else (k, n)
    if is_rows:
        b_shape = groups, *b_shape
    d_shape = (m, n) if is_rows else (groups, m, n)
    if transposed:
        a_shape, b_shape, a_along_k, b_along_k = b_shape, a_shape, b_along_k, a_along_k
    majors = "k" if a_along_k else "m", "k" if b_along_k else "n"  # as the kernel sees them
    aligned = config is not None
    if config is None:
        from cute_kernels.gemm.kernel_grouped_any import GroupedAny

        kernel = GroupedAny(spec.ragged, spec.accumulate)
    elif arch.startswith("sm_9"):
        from cute_kernels.gemm.kernel_grouped_sm90 import GroupedRowsSm90, GroupedSumsSm90

        if is_rows:
            kernel = GroupedRowsSm90(*majors, transposed, config, multi_block_tma)
        else:
            kernel = GroupedSumsSm90(spec.accumulate, config)
    else:
        from cute_kernels.gemm.kernel_grouped_sm100 import GroupedRowsSm100, GroupedSumsSm100

        if is_rows:
            kernel = GroupedRowsSm100(*majors, transposed, config)
        else:
            kernel = GroupedSumsSm100(spec.accumulate, config)
    dtype, out = cutlass_dtype(spec.dtype), cutlass_dtype(spec.out)
    return Program(
        kernel,
        symbolic_matrix(dtype, a_shape, aligned, any_stride=not aligned),
        symbolic_matrix(dtype, b_shape, aligned, any_stride=not aligned),
        symbolic_matrix(out, d_shape, aligned),
        cute.runtime.make_fake_compact_tensor(Int32, (groups,), assumed_align=4),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
