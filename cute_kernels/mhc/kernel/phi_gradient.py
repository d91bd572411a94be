"""The gradients of phi and of the norm's weight from the partial sums of ``projection_backward``.

    dphi[j, k] = norm_weight[k] sum over items of partials[item, j, k],  dnorm_weight[k] = sum_j phi[j, k] sum(j, k)

A warp adds the items of neighbouring columns of one row in ascending order, a group of ``per_group`` by itself: so the
bits are the same where that kernel has added up the group. For the weight's gradient a CTA has all rows: their
contributions meet in shared memory and are added in ascending order, too.

Beside it the sums that ``coefficients_backward`` has left, of dbeta and dalpha, are added up: behind that kernel they
would keep the backward of the projection waiting. They were there before this kernel began, and need not wait for it.
"""

import math
from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.common.column_sums import SumRows
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.row_layout import SUM_COLUMNS
from cute_kernels.common.rows import symbolic_vector
from cute_kernels.mhc.config import PhiGradientSpec
from cute_kernels.mhc.kernel.streams import WARP_SIZE
from jit_cache import Program, compiled

Dtype = type[cutlass.Numeric]
MAX_WARPS = 24
WARPS = 4  # of a CTA that needs no other rows
DEPTH = 16  # loads in flight a thread


class PhiGradient:
    """See the module; ``accumulate``: whether dphi, dnorm_weight, dbeta and dalpha are added to their outputs."""

    def __init__(self, columns: int, k: int, accumulate: tuple[bool, bool, bool, bool]):
        self.columns = columns
        self.k = k
        self.accumulate = accumulate[:2]
        self.sum_rows = SumRows(accumulate[2:], overlaps=True)

    @cute.jit
    def __call__(
        self,
        partials: cute.Tensor,
        phi: cute.Tensor,
        norm_weight: Optional[cute.Tensor],
        dphi: Optional[cute.Tensor],
        dweight: Optional[cute.Tensor],
        sums: Optional[cute.Tensor],
        dbeta: Optional[cute.Tensor],
        dalpha: Optional[cute.Tensor],
        per_group: Int32,
        stream,
    ):
        # Rows of a CTA, its warps, and columns of a thread: one where all rows of few columns fill the GPU better
        self.rows = const_expr(WARPS if dweight is None else self.columns)
        self.warps = const_expr(min(self.rows, MAX_WARPS))
        self.vec = const_expr(math.gcd(4, self.k) if dweight is None else 1)
        self.kernel(partials, phi, norm_weight, dphi, dweight, per_group).launch(
            grid=[cute.ceil_div(self.k, WARP_SIZE * self.vec), cute.ceil_div(self.columns, self.rows), 1],
            block=[self.warps * WARP_SIZE, 1, 1],
            stream=stream,
            use_pdl=True,
        )
        if const_expr(sums is not None):
            self.sum_rows.launch(sums, dbeta, dalpha, sums.shape[1], stream)

    @cute.kernel
    def kernel(
        self,
        partials: cute.Tensor,
        phi: cute.Tensor,
        norm_weight: Optional[cute.Tensor],
        dphi: Optional[cute.Tensor],
        dweight: Optional[cute.Tensor],
        per_group: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, block, _ = cute.arch.block_idx()
        lane, warp = tidx % WARP_SIZE, cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        k = (bidx * WARP_SIZE + lane) * self.vec
        last = cutlass.min((block + 1) * self.rows, self.columns)
        smem = SmemAllocator()
        products = smem.allocate_tensor(Float32, cute.make_layout((WARP_SIZE, self.columns)), byte_alignment=16)
        shape = const_expr((self.vec, DEPTH, self.warps * WARP_SIZE))
        layout = cute.make_layout(shape, stride=(1, shape[0] * shape[2], shape[0]))
        ring = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if k < self.k:
            for j in cutlass.range(block * self.rows + warp, last, self.warps):
                total = self.sum_items(partials, ring[None, None, tidx], j, k, per_group)
                if const_expr(dphi is not None):
                    for v in cutlass.range_constexpr(self.vec):
                        gradient = total[v]
                        if const_expr(norm_weight is not None):
                            gradient = gradient * norm_weight[k + v].to(Float32)
                        if const_expr(self.accumulate[0]):
                            gradient = gradient + dphi[j, k + v]
                        dphi[j, k + v] = gradient.to(dphi.element_type)
                if const_expr(dweight is not None):
                    products[lane, j] = total[0] * phi[j, k].to(Float32)
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
    def sum_items(self, partials: cute.Tensor, ring: cute.Tensor, j: Int32, k: Int32, per_group: Int32):
        """The sums over all items, of neighbouring columns.

        What a thread adds comes through its own part of ``ring``: loads to registers the compiler lets wait in turn.
        """
        total, group = (cute.make_rmem_tensor((self.vec,), Float32) for _ in range(2))
        total.fill(0.0)
        group.fill(0.0)
        items, left = partials.shape[0], per_group
        source = partials.iterator + (Int64(j) * self.k + k)
        for item in cutlass.range_constexpr(DEPTH - 1):
            self.ask(source, item, items, ring)
        for item in cutlass.range(items):
            self.ask(source, item + (DEPTH - 1), items, ring)
            cute.arch.cp_async_wait_group(DEPTH - 1)
            group.store(group.load() + ring[None, item % DEPTH].load())
            left -= 1
            if left == 0 or item + 1 == items:
                total.store(total.load() + group.load())
                group.fill(0.0)
                left = per_group
        return total

    @cute.jit
    def ask(self, source: cute.Pointer, item: Int32, items: Int32, ring: cute.Tensor):
        """An item's columns to the ring, if there is one."""
        if item < items:
            columns = (source + Int64(item) * (self.columns * self.k)).align(4 * self.vec)
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32 * self.vec)
            cute.copy(atom, cute.make_tensor(columns, cute.make_layout(self.vec)), ring[None, item % DEPTH])
        cute.arch.cp_async_commit_group()


@compiled
def phi_gradient(arch: str, spec: PhiGradientSpec) -> Program:
    """dphi (N, K) and dnorm_weight (K,) from partials (items, N, K), phi (N, K) and norm_weight (K,).

    dbeta (N,) and dalpha from the sums that ``coefficients_backward`` leaves.
    """
    items, token_chunks, columns, k = cute.sym_int(), cute.sym_int(), spec.columns, spec.k
    padded = -(-columns // SUM_COLUMNS) * SUM_COLUMNS
    dbeta, dalpha = cutlass_dtype(spec.dbeta), cutlass_dtype(spec.dalpha)
    has_sums = dbeta is not None or dalpha is not None
    accumulate = spec.accumulate_phi, spec.accumulate_norm_weight, spec.accumulate_beta, spec.accumulate_alpha

    def matrix(dtype: Optional[Dtype], *shape, align: int = 0):
        if dtype is None:
            return None
        order, align = tuple(reversed(range(len(shape)))), align or dtype.width // 8
        return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    return Program(
        PhiGradient(columns, k, accumulate),
        matrix(Float32, items, columns, k, align=16),
        matrix(cutlass_dtype(spec.phi), columns, k),
        symbolic_vector(cutlass_dtype(spec.norm_weight), k),
        matrix(cutlass_dtype(spec.dphi), columns, k),
        symbolic_vector(cutlass_dtype(spec.dnorm_weight), k),
        matrix(Float32 if has_sums else None, 2, token_chunks, padded, align=16),
        symbolic_vector(dbeta, columns),
        symbolic_vector(dalpha, spec.alphas),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
