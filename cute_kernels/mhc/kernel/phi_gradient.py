"""The gradients of phi and of the norm's weight from the partial sums of ``projection_backward``.

    dphi[j, k] = norm_weight[k] sum over chunks of partials[chunk, j, k],  dnorm_weight[k] = sum_j phi[j, k] sum(j, k)

A warp adds the chunks of 32 columns of one row, in ascending order; the rows' contributions to the weight's gradient
meet in shared memory and are added in ascending order, too.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.rows import symbolic_vector
from cute_kernels.mhc.kernel.streams import WARP_SIZE
from jit_cache import Program, compiled

Dtype = type[cutlass.Numeric]
MAX_WARPS = 24
BATCH = 8  # loads in flight a thread


class PhiGradient:
    """See the module; ``accumulate``: whether dphi and dnorm_weight are added to what their outputs hold."""

    def __init__(self, columns: int, k: int, accumulate: tuple[bool, bool]):
        self.columns = columns
        self.k = k
        self.accumulate = accumulate
        self.warps = min(columns, MAX_WARPS)

    @cute.jit
    def __call__(
        self,
        partials: cute.Tensor,
        phi: cute.Tensor,
        norm_weight: Optional[cute.Tensor],
        dphi: Optional[cute.Tensor],
        dweight: Optional[cute.Tensor],
        stream,
    ):
        self.kernel(partials, phi, norm_weight, dphi, dweight).launch(
            grid=[cute.ceil_div(self.k, WARP_SIZE), 1, 1], block=[self.warps * WARP_SIZE, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        partials: cute.Tensor,
        phi: cute.Tensor,
        norm_weight: Optional[cute.Tensor],
        dphi: Optional[cute.Tensor],
        dweight: Optional[cute.Tensor],
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        lane, first = tidx % WARP_SIZE, cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        k = bidx * WARP_SIZE + lane
        smem = SmemAllocator()
        products = smem.allocate_tensor(Float32, cute.make_layout((WARP_SIZE, self.columns)), byte_alignment=16)
        if k < self.k:
            weight = Float32(1.0)
            if const_expr(norm_weight is not None):
                weight = norm_weight[k].to(Float32)
            for j in cutlass.range(first, self.columns, self.warps):
                total = sum_chunks(partials, j, k)
                if const_expr(dphi is not None):
                    gradient = total * weight
                    if const_expr(self.accumulate[0]):
                        gradient = gradient + dphi[j, k]
                    dphi[j, k] = gradient.to(dphi.element_type)
                if const_expr(dweight is not None):
                    products[lane, j] = total * phi[j, k].to(Float32)
        if const_expr(dweight is not None):
            cute.arch.barrier()
            if tidx < WARP_SIZE and k < self.k:
                total = Float32(0.0)
                for j in cutlass.range(self.columns):
                    total = total + products[lane, j]
                if const_expr(self.accumulate[1]):
                    total = total + dweight[k]
                dweight[k] = total.to(dweight.element_type)


@cute.jit
def sum_chunks(partials: cute.Tensor, j: Int32, k: Int32):
    """The sum over all chunks, in ascending order."""
    total = Float32(0.0)
    chunks = partials.shape[0]
    for begin in cutlass.range(0, chunks, BATCH):
        batch = cute.make_rmem_tensor((BATCH,), Float32)
        batch.fill(0.0)
        for b in cutlass.range_constexpr(BATCH):
            if begin + b < chunks:
                batch[b] = partials[begin + b, j, k]
        for b in cutlass.range_constexpr(BATCH):
            total = total + batch[b]
    return total


@compiled
def phi_gradient(
    arch: str,
    phi: Dtype,
    norm_weight: Optional[Dtype],
    dphi: Optional[Dtype],
    dweight: Optional[Dtype],
    accumulate: tuple[bool, bool],
    columns: int,
    k: int,
) -> Program:
    """dphi (N, K) and dnorm_weight (K,) from partials (chunks, N, K), phi (N, K) and norm_weight (K,)."""
    chunks = cute.sym_int()

    def matrix(dtype: Optional[Dtype], *shape):
        if dtype is None:
            return None
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=dtype.width // 8)

    return Program(
        PhiGradient(columns, k, accumulate),
        matrix(Float32, chunks, columns, k),
        matrix(phi, columns, k),
        symbolic_vector(norm_weight, k),
        matrix(dphi, columns, k),
        symbolic_vector(dweight, k),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
