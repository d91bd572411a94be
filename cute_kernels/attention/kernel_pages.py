"""Blocks of keys or values that come in boxes, each of a page of a cache, or all of a contiguous cache."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.attention.kernel_rings import Rings
from cute_kernels.attention.kernel_threads import WARP_SIZE


class Pages(Rings):
    """A part of a kernel's producer, a warp.

    It has ``paged``, ``block`` (keys), ``box_rows`` (keys that a copy brings), ``boxes`` (of a block), and of a call
    ``page_table``, ``page_size``, ``num_pages``, ``lane``.
    """

    def partition_pages(self, atom: cute.CopyAtom, cache: cute.Tensor, ring: cute.Tensor, columns: int) -> tuple:
        """(Boxes of a ring, boxes of a cache by (row, columns, pair, page)) as a copy takes them."""
        boxes = cute.local_tile(cache, (self.box_rows, columns), (None,) * 4)
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(ring, 0, 2), cute.group_modes(boxes, 0, 2)
        )

    @cute.jit
    def look_up(self, sequence: Int32, keys: Int32, window: Int32):
        """A page for each lane: of the boxes 32 window, 32 window + 1, ... Where there are no keys, one behind the last
        page, which reads as zeros.
        """
        page = Int32(self.num_pages)
        if const_expr(self.paged):
            key = (window * WARP_SIZE + self.lane) * self.box_rows
            if key < keys:
                page = self.page_table[sequence, key // self.page_size]
        return page

    @cute.jit
    def load_boxes(
        self,
        atom: cute.CopyAtom,
        source: cute.Tensor,
        ring: cute.Tensor,
        parts: cutlass.Constexpr[int],
        sequence: Int32,
        pages: Int32,
        n: Int32,
        count: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        num_bytes: cutlass.Constexpr[int],
    ):
        """Block ``n`` into the slot of its place in the order of loads, once that is empty; ``parts``: of a row."""
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
        if self.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, num_bytes)
        for box in cutlass.range_constexpr(self.boxes):
            page, row = sequence, n
            if const_expr(self.paged):
                page = cute.arch.shuffle_sync(pages, offset=(n * self.boxes + box) % WARP_SIZE)
                row = n % (self.page_size // self.block) if const_expr(self.box_rows == self.block) else Int32(0)
            for part in cutlass.range_constexpr(parts):
                cute.copy(atom, source[None, row, part, page], ring[None, box, part, slot], tma_bar_ptr=full + slot)
