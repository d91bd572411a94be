"""The warps of the SM90 kernel over a cache that load: keys and values, contiguous or in pages, and queries."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.attention.config import COLUMNS, FEW_ROWS, QUERY_STAGES, WARPGROUP_ROWS
from cute_kernels.attention.kernel_decode_items import DecodeItems, Item, Rows
from cute_kernels.attention.kernel_pages import Pages
from cute_kernels.attention.kernel_threads import WARP_SIZE

VECTOR = 8  # numbers of q that move together
MOST_VECTORS = 32  # of a lane, in flight


class DecodeProducer(DecodeItems, Pages):
    """A part of the kernel.

    A block comes in ``boxes`` of ``COLUMNS`` channels. All blocks share one ring, ``sBoxes``.
    """

    @cute.jit
    def load(self, tma_k: cute.CopyAtom, mK: cute.Tensor, tma_v: cute.CopyAtom, mV: cute.Tensor):
        """The blocks of each item: k one block ahead of v, as they are used."""
        tKsK, tKgK = self.partition_pages(tma_k, mK, self.sBoxes, COLUMNS)
        tVsV, tVgV = self.partition_pages(tma_v, mV, self.sBoxes, COLUMNS)
        count, number = Int32(0), Int32(0)
        place = Int32(self.bidx)
        if const_expr(self.merges_late):
            place = self.draw()
        _, _, items = self.locate(Int32(0))
        if const_expr(self.merges_late):
            place = self.item_of(place, items)
        while place < items:
            item = Item(*self.item_at(place))
            ticket, first, last = Int32(0), item.first, item.last
            if first < last:
                self.publish(item, number)
                number += 1
                gK, gV = tKgK[None, None, None, item.pair, None], tVgV[None, None, None, item.pair, None]
                window = first * self.boxes // WARP_SIZE
                pages = self.look_up(item.sequence, item.keys, window)
                coming = self.look_up(item.sequence, item.keys, window + 1)
                self.load_part(tma_k, gK, tKsK, self.width, item.sequence, pages, first, count)
                count += 1
                for n in cutlass.range(first + 1, last, unroll=1):
                    of_values = pages
                    if const_expr(self.paged):
                        if n * self.boxes % WARP_SIZE == 0:
                            pages = coming
                            coming = self.look_up(item.sequence, item.keys, n * self.boxes // WARP_SIZE + 1)
                    self.load_part(tma_k, gK, tKsK, self.width, item.sequence, pages, n, count)
                    self.load_part(tma_v, gV, tVsV, self.width_v, item.sequence, of_values, n - 1, count + 1)
                    count += 2
                ticket = self.draw()  # as late as the wait for a slot hides it
                self.load_part(tma_v, gV, tVsV, self.width_v, item.sequence, pages, last - 1, count)
                count += 1
            else:
                ticket = self.draw()
            place = self.item_of(ticket, items)
        self.publish(Item(*(Int32(0) for _ in Item._fields)), number)

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

    @cute.jit
    def load_queries(self, q: cute.Tensor):
        """The rows of each item's tile, one item ahead; those that do not exist are 0."""
        rows = WARPGROUP_ROWS
        if const_expr(self.few_rows):
            rows = FEW_ROWS
            zeros = cute.make_rmem_tensor((VECTOR,), self.dtype)
            zeros.fill(0.0)
            for stage in cutlass.range_constexpr(QUERY_STAGES):
                for i in cutlass.range(self.lane, WARPGROUP_ROWS * self.width // VECTOR, WARP_SIZE, unroll=1):
                    self.store_vector(zeros, i, stage)
        number = Int32(0)
        last = self.wait_for_item(number)
        while last > 0:
            item = self.read_item(number)
            self.release_item(number)
            stage, phase = number % QUERY_STAGES, number // QUERY_STAGES % 2
            cute.arch.mbarrier_wait(self.q_empty + stage, phase ^ 1)
            self.copy_queries(q, self.rows_of_item(item), stage, rows)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.mbarrier_arrive(self.q_full + stage)
            number += 1
            last = self.wait_for_item(number)

    @cute.jit
    def copy_queries(self, q: cute.Tensor, rows: Rows, stage: Int32, number_of_rows: cutlass.Constexpr[int]):
        """The first rows of a tile, which a token's heads of the group are."""
        vectors = self.width // VECTOR
        of_lane = number_of_rows * vectors // WARP_SIZE
        batch = of_lane // -(-of_lane // MOST_VECTORS)
        found = cute.make_rmem_tensor((VECTOR, batch), self.dtype)
        for begin in cutlass.range_constexpr(0, of_lane, batch):
            found.fill(0.0)
            for i in cutlass.range_constexpr(batch):
                number = self.lane + (begin + i) * WARP_SIZE
                row, column = rows.tile * WARPGROUP_ROWS + number // vectors, number % vectors
                token, head = row // self.group, row % self.group
                if token < rows.queries and column < self.head_size // VECTOR:
                    line = q[rows.dense, rows.first_query + token, rows.pair * self.group + head, None]
                    cute.autovec_copy(cute.local_tile(line, (VECTOR,), (column,)), found[None, i])
            for i in cutlass.range_constexpr(batch):
                self.store_vector(found[None, i], self.lane + (begin + i) * WARP_SIZE, stage)

    def store_vector(self, vector: cute.Tensor, number: Int32, stage: Int32):
        """Into the queries of a stage."""
        row, column = number // (self.width // VECTOR), number % (self.width // VECTOR)
        cute.autovec_copy(vector, cute.local_tile(self.sQ[None, None, stage], (1, VECTOR), (row, column))[0, None])
