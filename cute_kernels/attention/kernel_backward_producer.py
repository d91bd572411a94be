"""The producer of attention's backward for SM90: a warp that loads k and v of a block, q and dout of its tiles."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.attention.kernel_backward_blocks import Block
from cute_kernels.attention.kernel_matrices import partition


class BackwardProducer:
    """The part of ``BackwardSm90`` that the warp that loads runs."""

    @cute.jit
    def load(self, atoms: tuple, matrices: tuple, row_lse: cute.Tensor, delta: cute.Tensor):
        """k and v of each block, q and dout of its tiles. Rows that do not exist are 0."""
        rows, rows_v = const_expr((self.tile_rows, self.head_size)), const_expr((self.tile_rows, self.head_size_v))
        keys, keys_v = const_expr((self.block, self.head_size)), const_expr((self.block, self.head_size_v))
        tma_q, tma_k, tma_v, tma_dout, _, _ = atoms
        mQ, mK, mV, mDout, _, _ = matrices
        count, blocks, turn = Int32(0), Int32(0), Int32(0)
        ticket = self.take_ticket(turn)
        while ticket < self.tickets:
            block = Block(*self.block_of(ticket))
            if block.exists:
                first, end = block.first, block.end
                q, dout = (self.queries_of(t, block) for t in (mQ, mDout))
                k, v = (self.keys_of(t, block) for t in (mK, mV))
                tQsQ, tQgQ = partition(tma_q, self.sQ, q, rows)
                tOsO, tOgO = partition(tma_dout, self.sDout, dout, rows_v)
                tKsK, tKgK = partition(tma_k, self.sK, k, keys)
                tVsV, tVgV = partition(tma_v, self.sV, v, keys_v)
                line = Int64(block.head) * delta.shape[1]
                line += self.queries.first_tile(block.sequence, self.padded_rows) * self.padded_rows
                of_q = (
                    tma_q, tQgQ[None, None, 0], tQsQ, row_lse.iterator + line, self.sLse, self.q_full, self.q_empty,
                    self.head_size, self.stages,
                )  # fmt: skip
                of_dout = (
                    tma_dout, tOgO[None, None, 0], tOsO, delta.iterator + line, self.sDelta, self.dout_full,
                    self.dout_empty, self.head_size_v, self.dout_stages,
                )  # fmt: skip

                if first < end:
                    self.load_tile(*of_q, first, count)
                cute.arch.mbarrier_wait(self.kv_empty, blocks % 2 ^ 1)
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(self.k_full, 2 * self.block * self.head_size)
                cute.copy(tma_k, tKgK[None, block.n, 0], tKsK, tma_bar_ptr=self.k_full)
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(self.v_full, 2 * self.block * self.head_size_v)
                cute.copy(tma_v, tVgV[None, block.n, 0], tVsV, tma_bar_ptr=self.v_full)
                if first < end:
                    self.load_tile(*of_dout, first, count)
                for m in cutlass.range(first + 1, end, unroll=1):
                    self.load_tile(*of_q, m, count + m - first)
                    self.load_tile(*of_dout, m, count + m - first)
                count += end - first
                blocks += 1
            turn += 1
            ticket = self.take_ticket(turn)

    @cute.jit
    def load_tile(
        self, atom: cute.CopyAtom, source: cute.Tensor, ring: cute.Tensor, values: cute.Pointer, sValues: cute.Tensor,
        full, empty, channels: cutlass.Constexpr[int], stages: cutlass.Constexpr[int], m: Int32, count: Int32,
    ):  # fmt: skip
        """Rows of queries, and a value of each, into the slot of the ``count``-th tile, once that is empty."""
        slot, phase = self.place_in_ring(count, stages)
        cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, self.tile_rows * (2 * channels + 4))
            of_rows = cute.make_layout(self.tile_rows)
            cute.copy(
                cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32),
                cute.make_tensor((values + m * self.tile_rows).align(16), of_rows),
                cute.make_tensor(sValues[None, 0, 0, slot].iterator.align(16), of_rows),
                mbar_ptr=full + slot,
            )
        cute.copy(atom, source[None, m], ring[None, slot], tma_bar_ptr=full + slot)

    def place_in_ring(self, count: Int32, stages: int) -> tuple:
        """(slot, phase)"""
        return count % stages, count // stages % 2
