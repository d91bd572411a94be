"""The warp of the SM90 forward that loads: queries of its tiles, blocks of keys and values."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.attention.config import WARPGROUP_ROWS, panel_columns
from cute_kernels.attention.kernel_forward_tiles import Blocks, ForwardTiles
from cute_kernels.attention.kernel_matrices import partition
from cute_kernels.attention.kernel_pages import Pages
from cute_kernels.attention.kernel_threads import WARP_SIZE


class ForwardProducer(ForwardTiles, Pages):
    """A part of the kernel, which has the shared memory and the barriers that are named here."""

    @cute.jit
    def load(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
    ):
        """q and the blocks of k and v of each tile; k one block ahead, as it is used. Rows that do not exist are 0."""
        count, tiles = Int32(0), Int32(0)
        for turn in cutlass.range(self.turns):
            tile = self.tile_at(turn)
            blocks = Blocks(*self.blocks_of(tile, Int32(0)))
            if blocks.end > 0:
                pair = tile.head // self.group
                q = cute.domain_offset((tile.first_q, 0), mQ[None, None, tile.head, tile.batch_q])
                k = cute.domain_offset((tile.first_k, 0), mK[None, None, pair, tile.batch_k])
                v = cute.domain_offset((0, tile.first_k), mV[None, None, pair, tile.batch_k])
                tQsQ, tQgQ = partition(tma_q, self.sQ, q, (WARPGROUP_ROWS, self.head_size))
                tKsK, tKgK = partition(tma_k, self.sK, k, (self.block, self.head_size))
                tVsV, tVgV = partition(tma_v, self.sV, v, (self.head_size_v, self.block))
                gK, gV = tKgK[None, None, 0], tVgV[None, 0, None]
                k_bytes, v_bytes = (const_expr(2 * self.block * size) for size in self.spec.sizes)
                first, end = blocks.first, blocks.end
                start = count - first  # of a block's number in the rings
                self.load_block(tma_k, gK, tKsK, first, count, self.k_full, self.k_empty, k_bytes)
                self.load_queries(tma_q, tQgQ, tQsQ, tile, tiles)
                for n in cutlass.range(first + 1, end, unroll=1):
                    self.load_block(tma_k, gK, tKsK, n, start + n, self.k_full, self.k_empty, k_bytes)
                    self.load_block(tma_v, gV, tVsV, n - 1, start + n - 1, self.v_full, self.v_empty, v_bytes)
                self.load_block(tma_v, gV, tVsV, end - 1, start + end - 1, self.v_full, self.v_empty, v_bytes)
                count += end - first
                tiles += 1

    @cute.jit
    def load_pages(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
    ):
        """``load``, where keys and values lie in pages."""
        d, dv = self.spec.sizes
        columns, columns_v = panel_columns(d), panel_columns(dv)
        tKsK, tKgK = self.partition_pages(tma_k, mK, self.boxes_of(self.sK, d), columns)
        tVsV, tVgV = self.partition_pages(tma_v, mV, self.boxes_of(self.sV, dv), columns_v)
        k_ring, v_ring = (self.k_full, self.k_empty), (self.v_full, self.v_empty)
        k_bytes, v_bytes = (const_expr(2 * self.block * size) for size in self.spec.sizes)
        k_parts, v_parts = const_expr(d // columns), const_expr(dv // columns_v)
        count, tiles = Int32(0), Int32(0)
        for turn in cutlass.range(self.turns):
            tile = self.tile_at(turn)
            blocks = Blocks(*self.blocks_of(tile, Int32(0)))
            if blocks.end > 0:
                pair, sequence, keys = tile.head // self.group, tile.batch_k, tile.len_k
                q = cute.domain_offset((tile.first_q, 0), mQ[None, None, tile.head, tile.batch_q])
                tQsQ, tQgQ = partition(tma_q, self.sQ, q, (WARPGROUP_ROWS, self.head_size))
                gK, gV = tKgK[None, None, None, pair, None], tVgV[None, None, None, pair, None]
                first, end = blocks.first, blocks.end
                start = count - first
                window = first * self.boxes // WARP_SIZE
                pages = self.look_up(sequence, keys, window)
                coming = self.look_up(sequence, keys, window + 1)
                self.load_boxes(tma_k, gK, tKsK, k_parts, sequence, pages, first, count, *k_ring, k_bytes)
                self.load_queries(tma_q, tQgQ, tQsQ, tile, tiles)
                for n in cutlass.range(first + 1, end, unroll=1):
                    of_values = pages
                    if n * self.boxes % WARP_SIZE == 0:
                        pages = coming
                        coming = self.look_up(sequence, keys, n * self.boxes // WARP_SIZE + 1)
                    self.load_boxes(tma_k, gK, tKsK, k_parts, sequence, pages, n, start + n, *k_ring, k_bytes)
                    self.load_boxes(
                        tma_v, gV, tVsV, v_parts, sequence, of_values, n - 1, start + n - 1, *v_ring, v_bytes
                    )
                self.load_boxes(tma_v, gV, tVsV, v_parts, sequence, pages, end - 1, start + end - 1, *v_ring, v_bytes)
                count += end - first
                tiles += 1

    @cute.jit
    def load_queries(self, tma_q: cute.CopyAtom, tQgQ: cute.Tensor, tQsQ: cute.Tensor, tile: tuple, tiles: Int32):
        """Those of a tile, of which so many came before."""
        slot, phase = self.place_of_queries(tiles)
        full = self.q_full + slot
        cute.arch.mbarrier_wait(self.q_empty + slot, phase ^ 1)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * self.tile_rows * self.head_size)
        for wg in cutlass.range_constexpr(self.warpgroups):
            source = tQgQ[None, tile.m * self.warpgroups + wg, 0]
            cute.copy(tma_q, source, tQsQ[None, slot * self.warpgroups + wg], tma_bar_ptr=full)

    def place_of_queries(self, tiles: Int32) -> tuple:
        """(Slot, phase of its barriers) of a tile."""
        if self.q_stages == 1:
            return 0, tiles % 2
        return tiles % self.q_stages, tiles // self.q_stages % 2

    def boxes_of(self, ring: cute.Tensor, size: int) -> cute.Tensor:
        """A ring as (rows of a box, its columns, boxes of a block, panels of columns, slots)."""
        columns = panel_columns(size)
        layout = cute.make_layout(
            (self.box_rows, columns, self.boxes, size // columns, self.stages),
            stride=(columns, 1, self.box_rows * columns, self.block * columns, self.block * size),
        )
        return cute.make_tensor(ring.iterator, layout)
