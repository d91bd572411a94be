"""The builder of all matrix products ``d = act(a b^T + bias)``: one entry, the kernel by architecture and alignment."""

from typing import Optional

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.gemm_config import BLOCK, GemmConfig
from cute_kernels.common.symbolic import symbolic_matrix
from cute_kernels.gemm.config import GemmSpec
from jit_cache import Program, compiled


@compiled
def gemm(arch: str, spec: GemmSpec, config: Optional[GemmConfig], transposed: bool, multi_block_tma: bool) -> Program:
    """d (M, N) = act(a b^T + bias) from a (M, K) and b (N, K); M, N, K and the strides are run-time values.

    An operand's neighbours lie along the last dimension of what is given: of one along m it is (K, M), along n (K, N).
    ``config`` None: the kernel for operands of any stride and alignment. ``transposed``: computes d^T; a and b, and
    their majors, are given in exchange, and d and z are (M, N) as ever. The bias lies along N.
    ``multi_block_tma``: SM90: one copy loads a tile of an operand along k, and K is a multiple of BLOCK.
    """
    plain = spec.bias is None and spec.activation is None and not spec.save_preact
    if spec.batched and not (plain and not spec.accumulate and not spec.has_valid_k):
        raise ValueError("a batched product has no bias, activation, saved z, accumulation or valid_k")
    m, n, k = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=BLOCK if multi_block_tma else 1)
    # The batch sizes of a, b and d, which need not be the same
    batches = [(cute.sym_int(),) if spec.batched else () for _ in range(3)]
    a_along_k, b_along_k = (major in ("k", None) for major in (spec.majors[::-1] if transposed else spec.majors))
    majors = "k" if a_along_k else "m", "k" if b_along_k else "n"  # as the kernel sees them
    aligned, tma_store = config is not None, spec.out_aligned
    if config is None:
        from cute_kernels.gemm.kernel_any import GemmAny

        kernel = GemmAny(spec.activation, spec.accumulate)
    elif arch.startswith("sm_9"):
        from cute_kernels.common.gemm_sm90 import GemmSm90

        kernel = GemmSm90(spec.activation, *majors, transposed, spec.accumulate, tma_store, config, multi_block_tma)
    else:
        from cute_kernels.common.gemm_sm100 import GemmSm100

        kernel = GemmSm100(spec.activation, *majors, transposed, spec.accumulate, tma_store, config)
    dtype, out, bias = (cutlass_dtype(d) for d in (spec.dtype, spec.out, spec.bias))
    output = (n, m) if transposed else (m, n)
    a_shape = (*batches[0], *((m, k) if a_along_k else (k, m)))
    b_shape = (*batches[1], *((n, k) if b_along_k else (k, n)))
    d_shape = (*batches[2], *output)
    return Program(
        kernel,
        symbolic_matrix(dtype, a_shape, aligned, any_stride=not aligned),
        symbolic_matrix(dtype, b_shape, aligned, any_stride=not aligned),
        symbolic_matrix(out, d_shape, tma_store),
        symbolic_matrix(out, d_shape, tma_store) if spec.save_preact else None,
        None
        if bias is None
        else cute.runtime.make_fake_compact_tensor(bias, output[1:], assumed_align=bias.width // 8),
        cute.runtime.make_fake_compact_tensor(Int32, (1,), assumed_align=4) if spec.has_valid_k else None,
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
