"""CuTe kernel of dw and db of few, wide rows, for SM90 and SM100: it runs beside the kernel of dx, not behind it."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.column_sums import FEW_COLUMNS, FEW_CTAS, FEW_THREADS, SumRows
from cute_kernels.common.row_layout import RowLayout

BATCH = 8  # rows of which a thread has four columns in flight


def has_own_rows(layout: RowLayout, save: str) -> bool:
    """Whether a cluster that has one row adds up nothing, so that ``FewRowSums`` can make its partial row again."""
    return save == "input" and layout.teams == layout.tile_rows == 1 and layout.vec >= 4


class FewRowSums:
    """dw and db where each row has a cluster of its own: the bits that ``SumRows`` makes of the clusters' partial rows.

    A partial row of one row is rstd dy (x - mean), or dy. This kernel multiplies again, so the kernel of dx writes no
    partial rows, and begins it as soon as its own CTAs run; this one waits for it only to end after it. A thread adds
    four columns of the rows, ascending.
    """

    def __init__(self, sum_rows: SumRows):
        self.sum_rows = sum_rows

    @cute.jit
    def launch(
        self,
        x: cute.Tensor,
        dy: cute.Tensor,
        statistics: cute.Tensor,
        partials: cute.Tensor,
        dw: Optional[cute.Tensor],
        db: Optional[cute.Tensor],
        stream,
    ):
        """``partials``: for its shape (outputs, rows, columns)."""
        self.kernel(x, dy, statistics, partials, dw, db).launch(
            grid=[cute.ceil_div(x.shape[1], FEW_COLUMNS), partials.shape[0], 1],
            block=[FEW_THREADS, 1, 1],
            min_blocks_per_mp=FEW_CTAS,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        dy: cute.Tensor,
        statistics: cute.Tensor,
        partials: cute.Tensor,
        dw: Optional[cute.Tensor],
        db: Optional[cute.Tensor],
    ):
        """The sums pass through shared memory, so that neighbours write neighbouring columns."""
        tidx, _, _ = cute.arch.thread_idx()
        bidx, index, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout(FEW_COLUMNS), byte_alignment=16)
        total = cute.make_rmem_tensor((4,), Float32)
        total.fill(0.0)
        column = bidx * FEW_COLUMNS + tidx * 4
        if column < x.shape[1]:
            if const_expr(partials.shape[0] == 2):
                if index == 0:
                    self.add_to_dw(total, x, dy, statistics, column)
                else:
                    self.add_to_db(total, dy, column)
            elif const_expr(dw is not None):
                self.add_to_dw(total, x, dy, statistics, column)
            else:
                self.add_to_db(total, dy, column)
        cute.autovec_copy(total, cute.make_tensor((sums.iterator + tidx * 4).align(16), cute.make_layout(4)))
        cute.arch.barrier()
        for i in cutlass.range_constexpr(4):
            local = i * FEW_THREADS + tidx
            self.sum_rows.write_output(partials, dw, db, index, bidx * FEW_COLUMNS + local, sums[local])
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def add_to_dw(self, total, x: cute.Tensor, dy: cute.Tensor, statistics: cute.Tensor, column: Int32):
        rows = x.shape[0]
        for begin in cutlass.range(0, rows, BATCH, unroll=1):
            rX, rdY = (cute.make_rmem_tensor((4, BATCH), t.element_type) for t in (x, dy))
            rS, rMu = (cute.make_rmem_tensor((BATCH,), Float32) for _ in range(2))
            for of_rows in (rX, rdY, rS, rMu):
                of_rows.fill(0.0)
            for b in cutlass.range_constexpr(BATCH):
                if begin + b < rows:
                    rX[None, b].store(load_four(x, begin + b, column).load())
                    rdY[None, b].store(load_four(dy, begin + b, column).load())
                    rS[b] = statistics[0, None][begin + b]
                    if const_expr(statistics.shape[0] == 2):
                        rMu[b] = statistics[1, None][begin + b]
            for b in cutlass.range_constexpr(BATCH):
                xc = rX[None, b].load().to(Float32)
                if const_expr(statistics.shape[0] == 2):
                    xc = xc - rMu[b]
                # Rounded as a partial row is: the compiler could fuse a product with the sum
                scaled = rdY[None, b].load().to(Float32) * rS[b]
                total.store(total.load() + cute.math.fma(scaled, xc, cute.zeros_like(xc)))

    @cute.jit
    def add_to_db(self, total, dy: cute.Tensor, column: Int32):
        rows = dy.shape[0]
        for begin in cutlass.range(0, rows, BATCH, unroll=1):
            rdY = cute.make_rmem_tensor((4, BATCH), dy.element_type)
            rdY.fill(0.0)
            for b in cutlass.range_constexpr(BATCH):
                if begin + b < rows:
                    rdY[None, b].store(load_four(dy, begin + b, column).load())
            for b in cutlass.range_constexpr(BATCH):
                total.store(total.load() + rdY[None, b].load().to(Float32))


@cute.jit
def load_four(x: cute.Tensor, row: Int32, column: Int32):
    """Four neighbouring elements of a row."""
    source = x.iterator + (Int64(row) * x.layout.stride[0] + column)
    values = cute.make_rmem_tensor((4,), x.element_type)
    align = const_expr(4 * x.element_type.width // 8)
    cute.autovec_copy(cute.make_tensor(source.align(align), cute.make_layout(4)), values)
    return values
