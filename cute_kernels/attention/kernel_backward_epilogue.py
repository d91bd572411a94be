"""The end of a block of keys in attention's backward for SM90: dk and dv leave the registers."""

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from cute_kernels.attention.kernel_backward_tiles import WARP_SIZE
from cute_kernels.attention.kernel_matrices import partition
from cute_kernels.attention.kernel_row_backward import scaled
from cute_kernels.attention.kernel_threads import opaque


class BackwardEpilogue:
    """The part of ``BackwardSm90`` that ends a block."""

    @cute.jit
    def finish(
        self,
        tensors: tuple,
        atoms: tuple,
        matrices: tuple,
        dkv_sums: cute.Tensor,
        block: tuple,
    ):
        """dk and dv of a block, rounded, on their way; of a group into its sums, which ``finish_dkv`` rounds.

        (With both the sums and the rounding here ptxas finds too few registers, and has every product waited for.)
        """
        dk, dv, *_ = tensors
        group = self.group()
        pair, member = block.head // group, block.head % group
        self.meet()  # both have read k and v
        if const_expr(self.spec.grouped):
            line = (self.keys.first_tile(block.sequence, self.block) + block.n) * self.pairs + pair
            self.add_head(dk, dv, dkv_sums, line, member)
        else:
            *_, tma_dk, tma_dv = atoms
            *_, mDk, mDv = matrices
            for i in cutlass.range_constexpr(cute.size(dk)):
                dk[i] = scaled(dk[i], self.scale)
            for total, shared, copy in ((dv, self.sV, self.store_dv), (dk, self.sK, self.store_dk)):
                rounded = cute.make_rmem_tensor(total.shape, self.dtype)
                rounded.store(total.load().to(self.dtype))
                cute.copy(copy, copy.retile(rounded), copy.get_slice(opaque(self.tidx)).partition_D(shared))
            cute.arch.fence_proxy("async.shared", space="cta")
            self.meet()
            if self.tidx < WARP_SIZE:
                for atom, shared, matrix, channels in (
                    (tma_dv, self.sV, mDv, self.head_size_v),
                    (tma_dk, self.sK, mDk, self.head_size),
                ):
                    keys = const_expr((self.block, channels))
                    source, target = partition(atom, shared, self.keys_of(matrix, block), keys)
                    cute.copy(atom, source, target[None, block.n, 0])
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
            if self.tidx == 0:
                cute.arch.mbarrier_arrive(self.kv_empty)
