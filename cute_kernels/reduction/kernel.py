"""CuTe kernels of softmax, log_softmax and sums for SM90 and SM100.

Rows stream as those of the norms do: teams of threads (RowLayout) walk over them, each with a ring of tiles in shared
memory that the bulk-copy engine fills (RowRing), and sum across a row in a fixed order (RowSum). Columns are summed by
CTAs that take a fixed number of rows each. What is added to what depends on the length of a sum alone, never on how
many sums there are: each has the same bits in every batch.

Profile: ncu --clock-control none -k regex:Softmax python -m bench.bench_reduction --filter softmax.fwd.8192x4096
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.cache_hints import EVICT_FIRST, load_vector
from cute_kernels.common.convert import to_fp32
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.reduce import RowSum, team_barrier
from cute_kernels.common.row_layout import WARP_SIZE, RowConfig
from cute_kernels.common.row_ring import RowRing
from cute_kernels.common.row_store import RowStore
from cute_kernels.common.rows import (
    both,
    dot_elements,
    load_row,
    piece_of,
    store_row_values,
    sum_elements,
    sum_pieces,
    symbolic_rows,
    symbolic_vector,
    synchronize_cluster,
    thread_coordinates,
    tiles_of_team,
    valid_columns,
)
from cute_kernels.reduction.config import (
    COLUMN_ROWS,
    COLUMN_WARPS,
    ColumnSumSpec,
    RowSumSpec,
    SoftmaxBackwardSpec,
    SoftmaxSpec,
)
from jit_cache import Program, compiled

LOG2_E = 1.4426950408889634
LOWEST = -3.4028234663852886e38  # of fp32: where a row, or a thread's part of it, has nothing above -inf


class RowKernel:
    """The base of the kernels that stream rows: geometry, launch, and the walk of a team over its tiles."""

    rounds = 1  # of messages that ``reduce_row`` takes
    sums_all = True  # whether it takes the elements of all streams

    def __init__(self, config: RowConfig, writes: bool = True):
        self.ctas_per_sm = config.ctas_per_sm
        self.layout = config.layout
        self.ring = RowRing(config.layout, writes)
        self.row_sum = RowSum(config.layout, 2)
        self.store = RowStore(config.layout)

    def launched(self, kernel, num_clusters: Int32, stream):
        layout = self.layout
        kernel.launch(
            grid=[num_clusters * layout.cluster, 1, 1],
            block=[layout.threads, 1, 1],
            cluster=[layout.cluster, 1, 1] if const_expr(layout.cluster > 1) else None,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.jit
    def walk(self, streams, target: cute.Tensor, scale: Float32):
        """Rows of ``streams`` are summed by ``reduce_row``; ``target`` gets what ``element`` makes of them.

        Or if it is a vector, the sum of each row times ``scale``.

        gmem --bulk copy--> ring in smem --> registers (fp32) --> target (RowStore). A slot is free once the sum over
        the last of its rows is known, since that took every thread's elements: the next tile is requested there. Where
        the sum leaves a stream out, and comes from a cluster's messages, without a barrier, the team meets before.
        """
        layout = self.layout
        rows = streams[0].shape[0]
        rank, team, t, row_in_pass, leads = thread_coordinates(layout)
        column = 0 if const_expr(layout.cluster == 1) else rank * layout.columns_per_cta
        smem = SmemAllocator()
        tiles, mbars = self.ring.allocate(smem, streams)
        messages, message_mbars = self.row_sum.allocate(smem)
        (staged,) = self.store.allocate(smem, [target])
        num_tiles, first_tile, step = tiles_of_team(rows, team, layout)
        cute.arch.griddepcontrol_wait()
        if leads:
            self.ring.start(streams, tiles, mbars, team, first_tile, step, num_tiles, column)
        self.row_sum.init(message_mbars)
        synchronize_cluster(layout)

        has_column = valid_columns(column, t, layout)
        slot = team * layout.stages
        phase = Int32(0)
        round_index = Int32(0)
        for tile in cutlass.range(first_tile, num_tiles, step):
            cute.arch.mbarrier_wait(mbars + slot, phase)
            tile_rows = []
            for j in cutlass.range_constexpr(layout.rows_per_thread):
                tile_row = j * layout.rows_per_pass + row_in_pass
                row = tile * layout.tile_rows + tile_row
                # A row beyond the last one is whatever the slot holds: its sums are its own and nothing of it is stored
                fragments = []
                for i in cutlass.range_constexpr(len(streams)):
                    sRow = self.ring.row(streams[i], tiles[i], slot, tile_row, row, column)
                    fragments.append(load_row(sRow, t, has_column, True, layout))
                tile_rows.append(fragments)
            results = []
            for j in cutlass.range_constexpr(layout.rows_per_thread):
                row = tile * layout.tile_rows + j * layout.rows_per_pass + row_in_pass
                in_range = True if const_expr(layout.tile_rows == 1) else row < rows
                sums = self.reduce_row(tile_rows[j], has_column, messages, message_mbars, team, round_index)
                round_index += self.rounds
                if const_expr(j == layout.rows_per_thread - 1):
                    if const_expr(layout.cluster > 1 and not self.sums_all):
                        team_barrier(layout, team)
                    if leads:
                        self.ring.refill(streams, tiles, mbars, slot, tile + layout.stages * step, num_tiles, column)
                results.append(sums[0] * scale)
                if const_expr(cute.rank(target) == 2):
                    self.store.begin(team)
                    for k in cutlass.range_constexpr(len(layout.pieces)):
                        pieces = [piece_of(fragment, layout.pieces[k], layout).load() for fragment in tile_rows[j]]
                        value = self.element(pieces, sums).to(target.element_type)
                        inside = both(in_range, has_column[k])
                        self.store.piece(value, target, staged, team, row, column, t, layout.pieces[k], inside)
                    self.store.send([target], [staged], team, row, column)
            if const_expr(cute.rank(target) == 1):
                if rank == 0:
                    store_row_values(results, target, tile * layout.tile_rows, rows, layout)
            slot, phase = self.ring.advance(slot, phase, team)
        self.store.finish()

    @cute.jit
    def exp(self, distance):
        """exp of a vector; where ``exact`` is not set by the approximate power of two, off by 2^-22."""
        if const_expr(self.exact):
            return cute.math.exp(distance)
        return cute.math.exp2(distance * LOG2_E, fastmath=True)


class SoftmaxForward(RowKernel):
    """y = exp(x - max(x)) / sum(exp(x - max(x))) of each row; or its logarithm, x - max(x) - log(sum).

    softmax takes two rounds of messages, and one exponential an element; its logarithm one round, in which every thread
    brings a sum to its own maximum. H200, bf16: softmax in one round with two exponentials 8192x4096 38.8 us, so 37.9;
    1024x151936 198, so 191 (both in clusters of 16).
    """

    def __init__(self, log: bool, config: RowConfig):
        super().__init__(config)
        self.log = log
        self.rounds = 1 if log else 2

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, num_clusters: Int32, stream):
        self.exact = y.element_type is Float32
        self.launched(self.kernel(x, y), num_clusters, stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        self.walk([x], y, Float32(1.0))

    @cute.jit
    def reduce_row(self, row, has_column, messages, mbars, team, round_index):
        """(1 / sum,), and the row becomes its exponentials; or (largest, log(sum))."""
        layout = self.layout
        (rX,) = row
        for k in cutlass.range_constexpr(len(layout.pieces)):
            if const_expr(has_column[k] is not True):
                if not has_column[k]:
                    piece_of(rX, layout.pieces[k], layout).fill(-Float32.inf)
        largest = Float32(LOWEST)
        for k in cutlass.range_constexpr(len(layout.pieces)):
            pX = piece_of(rX, layout.pieces[k], layout)
            for i in cutlass.range_constexpr(cute.size(pX)):
                largest = cute.arch.fmax(largest, pX[i])
        if const_expr(self.log):
            powers = [self.exp(piece_of(rX, piece, layout).load() - largest) for piece in layout.pieces]
            largest, total = self.row_sum.scaled_sum(largest, sum_pieces(powers), messages, mbars, team, round_index)
            return largest, cute.math.log(total)
        largest = self.row_sum.largest(largest, messages, mbars, team, round_index)
        for k in cutlass.range_constexpr(len(layout.pieces)):
            pX = piece_of(rX, layout.pieces[k], layout)
            pX.store(self.exp(pX.load() - largest))
        (total,) = self.row_sum.sum((sum_elements(rX, layout),), messages, mbars, team, round_index + 1)
        return (1.0 / total,)

    @cute.jit
    def element(self, pieces, sums):
        return pieces[0] - sums[0] - sums[1] if const_expr(self.log) else pieces[0] * sums[0]


class SoftmaxBackward(RowKernel):
    """dx = y (dy - sum(dy y)) of each row; of the logarithm dx = dy - exp(y) sum(dy)."""

    def __init__(self, log: bool, config: RowConfig):
        super().__init__(config)
        self.log = log
        self.sums_all = not log

    @cute.jit
    def __call__(self, y: cute.Tensor, dy: cute.Tensor, dx: cute.Tensor, num_clusters: Int32, stream):
        self.exact = dx.element_type is Float32
        self.launched(self.kernel(y, dy, dx), num_clusters, stream)

    @cute.kernel
    def kernel(self, y: cute.Tensor, dy: cute.Tensor, dx: cute.Tensor):
        self.walk([y, dy], dx, Float32(1.0))

    @cute.jit
    def reduce_row(self, row, has_column, messages, mbars, team, round_index):
        rY, rDy = row
        own = sum_elements(rDy, self.layout) if const_expr(self.log) else dot_elements(rY, rDy, self.layout)
        return self.row_sum.sum((own,), messages, mbars, team, round_index)

    @cute.jit
    def element(self, pieces, sums):
        y, dy = pieces
        if const_expr(not self.log):
            return y * (dy - sums[0])
        power = self.exp(y)
        return cute.math.fma(-power, cute.full_like(power, sums[0]), dy)


class ReduceRows(RowKernel):
    """y = scale sum(x), or of squares, of each row."""

    def __init__(self, squares: bool, config: RowConfig):
        super().__init__(config, writes=False)
        self.squares = squares

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, scale: Float32, num_clusters: Int32, stream):
        self.launched(self.kernel(x, y, scale), num_clusters, stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, scale: Float32):
        self.walk([x], y, scale)

    @cute.jit
    def reduce_row(self, row, has_column, messages, mbars, team, round_index):
        (rX,) = row
        own = dot_elements(rX, rX, self.layout) if const_expr(self.squares) else sum_elements(rX, self.layout)
        return self.row_sum.sum((own,), messages, mbars, team, round_index)


class ReduceColumns:
    """y = scale sum(x), or of squares, over rows of many matrices, by parts of COLUMN_ROWS: (parts, columns) sums.

    A thread has ``vec`` columns, a warp every COLUMN_WARPS-th row of a part; then the warps are added in order.
    """

    def __init__(self, vec: int, squares: bool):
        self.vec, self.squares = vec, squares

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, scale: Float32, stream):
        columns = WARP_SIZE * self.vec
        self.kernel(x, y, scale).launch(
            grid=[cute.ceil_div(x.shape[2], columns) * y.shape[1] * x.shape[0], 1, 1],
            block=[WARP_SIZE * COLUMN_WARPS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, scale: Float32):
        vec = const_expr(self.vec)
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        lane, warp = tidx % WARP_SIZE, cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        tiles = cute.ceil_div(x.shape[2], WARP_SIZE * vec)
        part, tile = bidx % y.shape[1], bidx // y.shape[1]
        matrix, first_column = tile // tiles, tile % tiles * WARP_SIZE * vec
        column = first_column + lane * vec
        smem = SmemAllocator()
        shape = (vec, WARP_SIZE, COLUMN_WARPS)
        sums = smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)
        total = cute.make_rmem_tensor((vec,), Float32)
        total.fill(0.0)
        cute.arch.griddepcontrol_wait()
        inside = column < x.shape[2]
        # 64 bits: a row may lie beyond 2^31 elements
        source = x.iterator + (Int64(matrix) * x.stride[0] + Int64(part) * COLUMN_ROWS * x.stride[1] + column)
        last = cutlass.min(x.shape[1] - part * COLUMN_ROWS, COLUMN_ROWS)
        batch = const_expr(8)
        for first in cutlass.range(warp, last, COLUMN_WARPS * batch):
            loaded = cute.make_rmem_tensor((vec, batch), x.element_type)
            loaded.fill(0)
            for b in cutlass.range_constexpr(batch):
                row = first + b * COLUMN_WARPS
                if inside and row < last:
                    pointer = (source + Int64(row) * x.stride[1]).align(vec * x.element_type.width // 8)
                    load_vector(pointer, loaded[None, b], Int64(EVICT_FIRST))
            for b in cutlass.range_constexpr(batch):
                value = to_fp32(loaded[None, b].load())
                if const_expr(self.squares):
                    total.store(cute.math.fma(value, value, total.load()))
                else:
                    total.store(total.load() + value)
        cute.autovec_copy(total, sums[None, lane, warp])
        cute.arch.barrier()
        for i in cutlass.range(tidx, vec * WARP_SIZE, WARP_SIZE * COLUMN_WARPS):
            result = sums[i % vec, i // vec, 0]
            for w in cutlass.range_constexpr(1, COLUMN_WARPS):
                result = result + sums[i % vec, i // vec, w]
            if first_column + i < y.shape[2]:
                y[matrix, part, first_column + i] = (result * scale).to(y.element_type)


@compiled
def softmax_forward(arch: str, spec: SoftmaxSpec, config: RowConfig) -> Program:
    """softmax or log_softmax of rows of one width."""
    rows, layout = cute.sym_int(), config.layout
    return Program(
        SoftmaxForward(spec.log, config),
        symbolic_rows(cutlass_dtype(spec.x), rows, layout),
        symbolic_rows(cutlass_dtype(spec.y), rows, layout, streamed=False),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def softmax_backward(arch: str, spec: SoftmaxBackwardSpec, config: RowConfig) -> Program:
    """Gradient of softmax or log_softmax of rows of one width."""
    rows, layout = cute.sym_int(), config.layout
    return Program(
        SoftmaxBackward(spec.log, config),
        symbolic_rows(cutlass_dtype(spec.y), rows, layout),
        symbolic_rows(cutlass_dtype(spec.dy), rows, layout),
        symbolic_rows(cutlass_dtype(spec.dx), rows, layout, streamed=False),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def row_sums(arch: str, spec: RowSumSpec, config: RowConfig) -> Program:
    """Sums of rows of one width, or of their squares."""
    rows = cute.sym_int()
    return Program(
        ReduceRows(spec.squares, config),
        symbolic_rows(cutlass_dtype(spec.x), rows, config.layout),
        symbolic_vector(cutlass_dtype(spec.y), rows),
        Float32(1.0),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def column_sums(arch: str, spec: ColumnSumSpec) -> Program:
    """Sums of columns, or of their squares, of (matrices, rows, columns) to (matrices, parts, columns)."""
    x, y, vec = cutlass_dtype(spec.x), cutlass_dtype(spec.y), spec.vec
    matrices, rows, parts = (cute.sym_int() for _ in range(3))
    columns = cute.sym_int(divisibility=vec)
    strides = (cute.sym_int64(divisibility=vec), cute.sym_int64(divisibility=vec), 1)
    return Program(
        ReduceColumns(vec, spec.squares),
        cute.runtime.make_fake_tensor(x, (matrices, rows, columns), strides, assumed_align=vec * x.width // 8),
        cute.runtime.make_fake_tensor(y, (matrices, parts, columns), (cute.sym_int64(), cute.sym_int64(), 1)),
        Float32(1.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
