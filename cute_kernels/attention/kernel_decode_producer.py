"""The warp of the SM90 kernel over a cache that loads blocks of keys and values, contiguous or in pages."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.attention.config import COLUMNS
from cute_kernels.attention.kernel_decode_items import DecodeItems
from cute_kernels.attention.kernel_pages import Pages
from cute_kernels.attention.kernel_threads import WARP_SIZE


class DecodeProducer(DecodeItems, Pages):
    """A part of the kernel.

    A block comes in ``boxes`` of ``COLUMNS`` channels. All blocks share one ring, ``sBoxes``.
    """

    @cute.jit
    def load(self, tma_k: cute.CopyAtom, mK: cute.Tensor, tma_v: cute.CopyAtom, mV: cute.Tensor):
        """The blocks of each item: k one block ahead of v, as they are used."""
        tKsK, tKgK = self.partition_pages(tma_k, mK, self.sBoxes, COLUMNS)
        tVsV, tVgV = self.partition_pages(tma_v, mV, self.sBoxes, COLUMNS)
        count = Int32(0)
        _, _, items = self.locate(Int32(0))
        for item in cutlass.range(self.bidx, items, self.grid, unroll=1):
            sequence, pair, _, _, _, keys, _, _, first, last = self.item_at(item)
            if first < last:
                gK, gV = tKgK[None, None, None, pair, None], tVgV[None, None, None, pair, None]
                window = first * self.boxes // WARP_SIZE
                pages = self.look_up(sequence, keys, window)
                coming = self.look_up(sequence, keys, window + 1)
                self.load_part(tma_k, gK, tKsK, self.width, sequence, pages, first, count)
                count += 1
                for n in cutlass.range(first + 1, last, unroll=1):
                    of_values = pages
                    if const_expr(self.paged):
                        if n * self.boxes % WARP_SIZE == 0:
                            pages = coming
                            coming = self.look_up(sequence, keys, n * self.boxes // WARP_SIZE + 1)
                    self.load_part(tma_k, gK, tKsK, self.width, sequence, pages, n, count)
                    self.load_part(tma_v, gV, tVsV, self.width_v, sequence, of_values, n - 1, count + 1)
                    count += 2
                self.load_part(tma_v, gV, tVsV, self.width_v, sequence, pages, last - 1, count)
                count += 1

    def load_part(
        self,
        atom: cute.CopyAtom,
        source: cute.Tensor,
        ring: cute.Tensor,
        width: int,
        sequence: Int32,
        pages: Int32,
        n: Int32,
        count: Int32,
    ):
        """Block ``n`` of keys or values of ``width`` channels."""
        parts, num_bytes = width // COLUMNS, 2 * self.block * width
        self.load_boxes(atom, source, ring, parts, sequence, pages, n, count, self.full, self.empty, num_bytes)
