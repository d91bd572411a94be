"""Sums over all rows of per-column values (dw, db): registers, then a partial row a cluster, then one ordered sum.

No atomics: the order is fixed by the geometry and the numbers of rows and of clusters, so reruns are bitwise equal.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.row_layout import FEW_BATCH, SUM_COLUMNS, RowLayout, adds_alone
from cute_kernels.common.rows import thread_chunks

SUM_PARTS = 32
SUM_BATCH = 8  # loads in flight a thread: up to 256 partial rows cost one trip to L2
SUM_THREADS = SUM_COLUMNS // 4 * SUM_PARTS
FEW_THREADS = 128
FEW_COLUMNS = 4 * FEW_THREADS
FEW_CTAS = 4  # an SM; without a bound the compiler keeps 3 of 16 loads in flight, to use fewer registers


class SumRows:
    """Sums of the rows of one or two matrices of partial sums.

    ``accumulate``: whether each is added to its output. ``overlaps``: the partial sums were there when the kernel
    before began, so that it is waited for only to end after it. ``most_rows``: of partial sums that an
    H200 makes, if known: ``adds_alone`` says whether a thread adds all of them.
    """

    def __init__(self, accumulate: tuple[bool, bool], overlaps: bool = False, most_rows: Optional[int] = None):
        self.accumulate = accumulate
        self.overlaps = overlaps
        self.most_rows = most_rows

    @cute.jit
    def launch(self, partials: cute.Tensor, first: Optional[cute.Tensor], second: Optional[cute.Tensor], rows, stream):
        """Add ``rows`` rows of ``partials`` (1 or 2 outputs, rows, columns, padded to a multiple of SUM_COLUMNS).

        A programmatic dependent launch: it overlaps the end of the kernel before, or all that comes behind its trigger.
        """
        few = const_expr(
            self.most_rows is not None and adds_alone(partials.shape[2], partials.shape[0], self.most_rows)
        )
        if const_expr(few):
            self.few_rows(partials, first, second, rows).launch(
                grid=[cute.ceil_div(partials.shape[2], FEW_COLUMNS), partials.shape[0], 1],
                block=[FEW_THREADS, 1, 1],
                min_blocks_per_mp=FEW_CTAS,
                preferred_smem_carveout=100,
                stream=stream,
                use_pdl=True,
            )
        else:
            self.kernel(partials, first, second, rows).launch(
                grid=[cute.ceil_div(partials.shape[2], SUM_COLUMNS), partials.shape[0], 1],
                block=[SUM_THREADS, 1, 1],
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def kernel(self, partials: cute.Tensor, first: Optional[cute.Tensor], second: Optional[cute.Tensor], rows: Int32):
        """32 threads a column take every 32nd partial row each, then are added in order."""
        tidx, _, _ = cute.arch.thread_idx()
        bidx, index, _ = cute.arch.block_idx()
        quad, part = tidx % (SUM_COLUMNS // 4), tidx // (SUM_COLUMNS // 4)
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((SUM_COLUMNS, SUM_PARTS)), byte_alignment=16)
        total = cute.make_rmem_tensor((4,), Float32)
        total.fill(0.0)
        if const_expr(not self.overlaps):
            cute.arch.griddepcontrol_wait()
        source = partials.iterator + (
            Int64(index) * partials.shape[1] * partials.shape[2] + bidx * SUM_COLUMNS + quad * 4
        )
        for begin in cutlass.range(part, rows, SUM_PARTS * SUM_BATCH):
            batch = cute.make_rmem_tensor((4, SUM_BATCH), Float32)
            batch.fill(0.0)
            for b in cutlass.range_constexpr(SUM_BATCH):
                row = begin + b * SUM_PARTS
                if row < rows:
                    batch[None, b].store(load_quad(source + Int64(row) * partials.shape[2]).load())
            for b in cutlass.range_constexpr(SUM_BATCH):
                total.store(total.load() + batch[None, b].load())
        cute.autovec_copy(
            total, cute.make_tensor((sums.iterator + part * SUM_COLUMNS + quad * 4).align(16), cute.make_layout(4))
        )
        cute.arch.barrier()
        column = bidx * SUM_COLUMNS + tidx
        if tidx < SUM_COLUMNS:
            result = Float32(0.0)
            for p in cutlass.range_constexpr(SUM_PARTS):
                result = result + sums[tidx, p]
            self.write_output(partials, first, second, index, column, result)
        if const_expr(self.overlaps):
            cute.arch.griddepcontrol_wait()

    @cute.kernel
    def few_rows(self, partials: cute.Tensor, first: Optional[cute.Tensor], second: Optional[cute.Tensor], rows: Int32):
        """A thread adds all rows of four columns, ascending: of up to 32 rows the sum of ``kernel``, bit by bit.

        The sums pass through shared memory, so that neighbours write neighbouring columns.
        """
        tidx, _, _ = cute.arch.thread_idx()
        bidx, index, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout(FEW_COLUMNS), byte_alignment=16)
        total = cute.make_rmem_tensor((4,), Float32)
        total.fill(0.0)
        cute.arch.griddepcontrol_wait()
        column = bidx * FEW_COLUMNS + tidx * 4
        if column < partials.shape[2]:
            source = partials.iterator + (Int64(index) * partials.shape[1] * partials.shape[2] + column)
            for begin in cutlass.range(0, rows, FEW_BATCH, unroll=1):
                batch = cute.make_rmem_tensor((4, FEW_BATCH), Float32)
                batch.fill(0.0)
                for b in cutlass.range_constexpr(FEW_BATCH):
                    if begin + b < rows:
                        batch[None, b].store(load_quad(source + Int64(begin + b) * partials.shape[2]).load())
                for b in cutlass.range_constexpr(FEW_BATCH):
                    total.store(total.load() + batch[None, b].load())
        cute.autovec_copy(total, cute.make_tensor((sums.iterator + tidx * 4).align(16), cute.make_layout(4)))
        cute.arch.barrier()
        for i in cutlass.range_constexpr(4):
            local = i * FEW_THREADS + tidx
            self.write_output(partials, first, second, index, bidx * FEW_COLUMNS + local, sums[local])

    @cute.jit
    def write_output(self, partials: cute.Tensor, first, second, index, column, result):
        """One column of the output that ``index`` of the partial sums is of."""
        if const_expr(partials.shape[0] == 1):
            self.write(*((first, 0) if const_expr(second is None) else (second, 1)), column, result)
        else:
            if const_expr(first is not None):
                if index == 0:
                    self.write(first, 0, column, result)
            if const_expr(second is not None):
                if index == 1:
                    self.write(second, 1, column, result)

    @cute.jit
    def write(self, output, which: cutlass.Constexpr[int], column, value):
        """One column of the first or the second output."""
        if column < output.shape[0]:
            if const_expr(self.accumulate[which]):
                value = value + output[column]
            output[column] = value.to(output.element_type)


class ColumnSums:
    """Partial sums of one or two fp32 values a column: a row of them a cluster, to be added by ``SumRows``."""

    def __init__(self, layout: RowLayout):
        self.layout = layout

    def scratch_bytes(self, num_values: int) -> int:
        """Shared memory that ``store`` needs."""
        layout = self.layout
        return 4 * layout.chunks * layout.threads_per_row * layout.vec * layout.teams * num_values

    @cute.jit
    def store(self, values, partials, scratch, team, t, column):
        """Add the rows of a warp and then the teams of the CTA, in order, and write one row of each ``partials[i]``.

        Through shared memory also where a CTA has one team: written from the registers, a warp's 16-byte accesses would
        leave half of each sector to the next instruction (H200, 512x16384 layer_norm: 28.7 us instead of 24.5).
        """
        layout = self.layout
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        pitch = const_expr(layout.chunks * layout.threads_per_row * layout.vec)
        scratch = cute.make_tensor(
            cute.recast_ptr(scratch.iterator, dtype=Float32), cute.make_layout((pitch, layout.teams, len(values)))
        )
        cute.arch.barrier()
        for i in cutlass.range_constexpr(len(values)):
            rD = values[i]
            for step in cutlass.range_constexpr((layout.rows_per_pass - 1).bit_length()):
                for k in cutlass.range_constexpr(layout.chunks):
                    for v in cutlass.range_constexpr(layout.vec):
                        neighbour = cute.arch.shuffle_sync_bfly(rD[v, k], offset=layout.threads_per_row << step)
                        rD[v, k] = rD[v, k] + neighbour
            if tidx % layout.team_threads < layout.threads_per_row:
                mine = cute.make_tensor(scratch[None, team, i].iterator, thread_chunks(layout))
                cute.autovec_copy(rD, mine[None, t, None])
        cute.arch.barrier()
        num_columns = cutlass.min(layout.columns_per_cta, partials.shape[2] - column)
        for i in cutlass.range_constexpr(len(values)):
            for first in cutlass.range(4 * tidx, num_columns, 4 * layout.threads):
                total = cute.make_rmem_tensor((4,), Float32)
                total.fill(0.0)
                for team_index in cutlass.range_constexpr(layout.teams):
                    total.store(total.load() + load_quad(scratch[None, team_index, i].iterator + first).load())
                quad = partials.iterator + partials.layout((i, bidx // layout.cluster, column + first))
                cute.autovec_copy(total, cute.make_tensor(quad.align(16), cute.make_layout(4)))


@cute.jit
def load_quad(pointer: cute.Pointer):
    """Four fp32 values from a 16-byte aligned address."""
    quad = cute.make_rmem_tensor((4,), Float32)
    cute.autovec_copy(cute.make_tensor(pointer.align(16), cute.make_layout(4)), quad)
    return quad
