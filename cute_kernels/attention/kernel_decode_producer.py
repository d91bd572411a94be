"""The warp of the SM90 kernel over a cache that loads blocks of keys and values, contiguous or in pages."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.attention.config import COLUMNS
from cute_kernels.attention.kernel_decode_items import DecodeItems
from cute_kernels.attention.kernel_rings import Rings
from cute_kernels.attention.kernel_threads import WARP_SIZE


class DecodeProducer(DecodeItems, Rings):
    """A part of the kernel.

    A block comes in ``boxes`` of ``box_rows`` rows, each of a page, and of ``COLUMNS`` channels. All blocks share one
    ring, ``sBoxes``.
    """

    @cute.jit
    def load(self, tma_k: cute.CopyAtom, mK: cute.Tensor, tma_v: cute.CopyAtom, mV: cute.Tensor):
        """The blocks of each item: k one block ahead of v, as they are used."""
        tKsK, tKgK = self.partition(tma_k, mK)
        tVsV, tVgV = self.partition(tma_v, mV)
        count = Int32(0)
        _, _, items = self.locate(Int32(0))
        for item in cutlass.range(self.bidx, items, self.grid, unroll=1):
            sequence, pair, _, _, _, keys, _, _, first, last = self.item_at(item)
            if first < last:
                gK, gV = tKgK[None, None, None, pair, None], tVgV[None, None, None, pair, None]
                window = first * self.boxes // WARP_SIZE
                pages = self.look_up(sequence, keys, window)
                coming = self.look_up(sequence, keys, window + 1)
                self.load_boxes(tma_k, gK, tKsK, self.width, sequence, pages, first, count)
                count += 1
                for n in cutlass.range(first + 1, last, unroll=1):
                    of_values = pages
                    if const_expr(self.paged):
                        if n * self.boxes % WARP_SIZE == 0:
                            pages = coming
                            coming = self.look_up(sequence, keys, n * self.boxes // WARP_SIZE + 1)
                    self.load_boxes(tma_k, gK, tKsK, self.width, sequence, pages, n, count)
                    self.load_boxes(tma_v, gV, tVsV, self.width_v, sequence, of_values, n - 1, count + 1)
                    count += 2
                self.load_boxes(tma_v, gV, tVsV, self.width_v, sequence, pages, last - 1, count)
                count += 1

    def partition(self, atom: cute.CopyAtom, cache: cute.Tensor) -> tuple:
        """(Boxes of the ring, boxes of a cache by (row, columns, pair, page)) as a copy takes them."""
        boxes = cute.local_tile(cache, (self.box_rows, COLUMNS), (None,) * 4)
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(self.sBoxes, 0, 2), cute.group_modes(boxes, 0, 2)
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
        width: cutlass.Constexpr[int],
        sequence: Int32,
        pages: Int32,
        n: Int32,
        count: Int32,
    ):
        """Block ``n`` into the slot of its place in the order of loads, once that is empty."""
        slot, phase = self.place_in_ring(count)
        cute.arch.mbarrier_wait(self.empty + slot, phase ^ 1)
        if self.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot, self.block * width * 2)
        for box in cutlass.range_constexpr(self.boxes):
            page, row = sequence, n
            if const_expr(self.paged):
                page = cute.arch.shuffle_sync(pages, offset=(n * self.boxes + box) % WARP_SIZE)
                row = n % (self.page_size // self.block) if const_expr(self.box_rows == self.block) else Int32(0)
            for part in cutlass.range_constexpr(width // COLUMNS):
                cute.copy(
                    atom, source[None, row, part, page], ring[None, box, part, slot], tma_bar_ptr=self.full + slot
                )
