"""CuTe kernels of a row's logsumexp and variance, which stream rows as the softmax does, and of prefix sums."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.cache_hints import load_vector
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.reduce import team_barrier
from cute_kernels.common.row_layout import WARP_SIZE, RowConfig
from cute_kernels.common.rows import (
    dot_elements,
    load_row,
    piece_of,
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
    SCAN_ELEMENTS,
    SCAN_THREADS,
    LogSumExpSpec,
    PrefixSumSpec,
    VarianceSpec,
)
from cute_kernels.reduction.kernel import LOWEST, RowKernel
from jit_cache import Program, compiled

WARPS = SCAN_THREADS // WARP_SIZE


class LogSumExp(RowKernel):
    """y = max(x) + log(sum(exp(x - max(x)))) of each row, in one round of messages.

    The exponentials of rows in half precision are approximate: exact ones are 6 of 13 instructions an element, so that
    a kernel that only reads was bound by them (H200, 2671x50257 129.5 us, so 104.5; 134085x1001 101.5, so 76.6).
    Where a row off 16 bytes has several warps, its messages are read when the team has computed its next row: nobody
    waits for them (885x151643 131.6 us, so 106.7; 2671x50257 104.5, so 98.2; 2192x61229 89.2, so 87.7).
    """

    def __init__(self, config: RowConfig):
        super().__init__(config, writes=False)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, num_clusters: Int32, stream):
        self.exact = x.element_type is Float32
        self.launched(self.kernel(x, y), num_clusters, stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        if const_expr(self.row_sum.warps_per_row > 1 and not self.layout.aligned):
            self.walk_ahead(x, y)
        else:
            self.walk([x], y, Float32(1.0))

    @cute.jit
    def walk_ahead(self, x: cute.Tensor, y: cute.Tensor):
        """As ``walk``, rows of several warps: a row's messages are read after the next row has been summed.

        A slot is free when the team has its elements: all threads meet there, which also says that what was sent within
        a CTA has arrived. The last warp of the row's first CTA reads what all have sent; the first asks for rows.
        """
        layout = self.layout
        rank, team, t, _, leads = thread_coordinates(layout)
        column = 0 if const_expr(layout.cluster == 1) else rank * layout.columns_per_cta
        smem = SmemAllocator()
        tiles, mbars = self.ring.allocate(smem, [x])
        messages, message_mbars = self.row_sum.allocate(smem)
        num_rows, first_row, step = tiles_of_team(x.shape[0], team, layout)
        cute.arch.griddepcontrol_wait()
        if leads:
            self.ring.start([x], tiles, mbars, team, first_row, step, num_rows, column)
        self.row_sum.init(message_mbars)
        synchronize_cluster(layout)

        has_column = valid_columns(column, t, layout)
        slot = team * layout.stages
        phase = Int32(0)
        round_index = Int32(0)
        for row in cutlass.range(first_row, num_rows, step):
            cute.arch.mbarrier_wait(mbars + slot, phase)
            rX = load_row(self.ring.row(x, tiles[0], slot, 0, row, column), t, has_column, True, layout)
            team_barrier(layout, team)
            if leads:
                self.ring.refill([x], tiles, mbars, slot, row + layout.stages * step, num_rows, column)
            own = self.row_sum.scaled_within_warp(*self.own_sum(rX, has_column))
            if round_index > 0:
                self.store_result(y, row - step, messages, message_mbars, team, round_index - 1, rank, t)
            self.row_sum.send(own, messages, message_mbars, team, round_index)
            round_index += 1
            slot, phase = self.ring.advance(slot, phase, team)
        if round_index > 0:
            if const_expr(layout.cluster == 1):
                team_barrier(layout, team)
            last_row = first_row + (round_index - 1) * step
            self.store_result(y, last_row, messages, message_mbars, team, round_index - 1, rank, t)

    @cute.jit
    def store_result(self, y: cute.Tensor, row, messages, mbars, team, round_index, rank, t):
        """All wait for a row's messages, and one warp writes what they make."""
        if const_expr(self.layout.cluster > 1):
            self.row_sum.wait(mbars, team, round_index)
        warps = const_expr(self.layout.warps_per_team)
        if cute.arch.make_warp_uniform(t // WARP_SIZE) == warps - 1 and rank == 0:
            largest, total = self.row_sum.scaled_of_warps(messages, team, round_index)
            if cute.arch.lane_idx() == 0:
                y[row] = largest + cute.math.log(total)

    @cute.jit
    def own_sum(self, rX, has_column):
        """(largest, total) of a thread's elements, total a sum of exp(x - largest)."""
        layout = self.layout
        for k in cutlass.range_constexpr(len(layout.pieces)):
            if const_expr(has_column[k] is not True):
                if not has_column[k]:
                    piece_of(rX, layout.pieces[k], layout).fill(-Float32.inf)
        largest = Float32(LOWEST)
        for k in cutlass.range_constexpr(len(layout.pieces)):
            pX = piece_of(rX, layout.pieces[k], layout)
            for i in cutlass.range_constexpr(cute.size(pX)):
                largest = cute.arch.fmax(largest, pX[i])
        largest = cute.arch.fmin(largest, Float32(-LOWEST))  # of +inf a distance of +inf is left, not NaN
        powers = [self.exp(piece_of(rX, piece, layout).load() - largest) for piece in layout.pieces]
        return largest, sum_pieces(powers)

    @cute.jit
    def reduce_row(self, row, has_column, messages, mbars, team, round_index):
        own = self.own_sum(row[0], has_column)
        largest, total = self.row_sum.scaled_sum(*own, messages, mbars, team, round_index)
        return (largest + cute.math.log(total),)


class Variance(RowKernel):
    """y = scale sum((x - mean(x))^2) of each row, centred in a second round."""

    rounds = 2

    def __init__(self, config: RowConfig):
        super().__init__(config, writes=False)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, scale: Float32, num_clusters: Int32, stream):
        self.launched(self.kernel(x, y, scale), num_clusters, stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, scale: Float32):
        self.walk([x], y, scale)

    @cute.jit
    def reduce_row(self, row, has_column, messages, mbars, team, round_index):
        layout = self.layout
        (rX,) = row
        (total,) = self.row_sum.sum((sum_elements(rX, layout),), messages, mbars, team, round_index)
        mean = total * (1.0 / layout.n)
        for k in cutlass.range_constexpr(len(layout.pieces)):
            pX = piece_of(rX, layout.pieces[k], layout)
            pX.store(pX.load() - mean)
            if const_expr(has_column[k] is not True):
                if not has_column[k]:
                    pX.fill(0.0)
        return self.row_sum.sum((dot_elements(rX, rX, layout),), messages, mbars, team, round_index + 1)


class PrefixSums:
    """y[m, j] = x[m, 0] + ... + x[m, j]: a CTA walks over a row, tile by tile.

    Of a tile a thread adds its four elements, a warp its threads' sums by shuffles, and each thread the warps before
    its own, ascending; the tiles before are one number. So an element is a function of those up to it, in a fixed
    order: a longer row moves no bit of it.
    """

    def __init__(self, vec: int):
        self.vec = vec

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(x, y).launch(grid=[x.shape[0], 1, 1], block=[SCAN_THREADS, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        lane, warp = tidx % WARP_SIZE, tidx // WARP_SIZE
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((WARPS, 2)), byte_alignment=16)
        source = x.iterator + Int64(row) * x.stride[0]
        target = y.iterator + Int64(row) * y.stride[0]
        n, tile = x.shape[1], const_expr(SCAN_THREADS * SCAN_ELEMENTS)
        before, buffer = Float32(0.0), Int32(0)
        cute.arch.griddepcontrol_wait()
        following = cute.make_rmem_tensor((SCAN_ELEMENTS,), Float32)
        self.load(following, source, tidx * SCAN_ELEMENTS, n)
        for first in cutlass.range(0, n, tile, unroll=1):
            at = first + tidx * SCAN_ELEMENTS
            own = [following[0]]
            for i in cutlass.range_constexpr(1, SCAN_ELEMENTS):
                own.append(own[i - 1] + following[i])
            self.load(following, source, at + tile, n)
            through = own[-1]
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(through, offset=1 << step, mask_and_clamp=0)
                if lane >= (1 << step):
                    through = other + through
            ahead = cute.arch.shuffle_sync_up(through, offset=1, mask_and_clamp=0)
            if lane == 0:
                ahead = Float32(0.0)
            if lane == WARP_SIZE - 1:
                sums[warp, buffer] = through
            cute.arch.barrier()
            of_warps = Float32(0.0)
            of_tile = Float32(0.0)
            for w in cutlass.range_constexpr(WARPS):
                if warp == w:
                    of_warps = of_tile
                of_tile = of_tile + sums[w, buffer]
            ahead = before + (of_warps + ahead)
            result = cute.make_rmem_tensor((SCAN_ELEMENTS,), Float32)
            for i in cutlass.range_constexpr(SCAN_ELEMENTS):
                result[i] = ahead + own[i]
            self.store(result, target, at, n, y.element_type)
            before = before + of_tile
            buffer = 1 - buffer  # a warp may be a tile ahead, not two

    @cute.jit
    def load(self, values: cute.Tensor, source: cute.Pointer, at: Int32, n: Int32):
        """A thread's elements, in fp32; 0 beyond the row."""
        vec = const_expr(self.vec)
        for i in cutlass.range_constexpr(0, SCAN_ELEMENTS, vec):
            loaded = cute.make_rmem_tensor((vec,), source.value_type)
            loaded.fill(0)
            if at + i < n:
                load_vector((source + (at + i)).align(vec * source.value_type.width // 8), loaded, None)
            for j in cutlass.range_constexpr(vec):
                values[i + j] = loaded[j].to(Float32)

    @cute.jit
    def store(self, result: cute.Tensor, target: cute.Pointer, at: Int32, n: Int32, dtype: cutlass.Constexpr):
        vec = const_expr(self.vec)
        rounded = cute.make_rmem_tensor((SCAN_ELEMENTS,), dtype)
        rounded.store(result.load().to(dtype))
        for i in cutlass.range_constexpr(0, SCAN_ELEMENTS, vec):
            if at + i < n:
                part = cute.make_tensor(rounded.iterator + i, cute.make_layout(vec))
                pointer = (target + (at + i)).align(vec * dtype.width // 8)
                cute.autovec_copy(part, cute.make_tensor(pointer, cute.make_layout(vec)))


@compiled
def log_sum_exp(arch: str, spec: LogSumExpSpec, config: RowConfig) -> Program:
    """logsumexp of rows of one width."""
    rows = cute.sym_int()
    return Program(
        LogSumExp(config),
        symbolic_rows(cutlass_dtype(spec.x), rows, config.layout),
        symbolic_vector(Float32, rows),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def variances(arch: str, spec: VarianceSpec, config: RowConfig) -> Program:
    """Sums of squared distances from the mean, times ``scale``, of rows of one width."""
    rows = cute.sym_int()
    return Program(
        Variance(config),
        symbolic_rows(cutlass_dtype(spec.x), rows, config.layout),
        symbolic_vector(Float32, rows),
        Float32(1.0),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


@compiled
def prefix_sums(arch: str, spec: PrefixSumSpec) -> Program:
    """Prefix sums of rows of any length."""
    rows, columns, vec = cute.sym_int(), cute.sym_int(divisibility=spec.vec), spec.vec

    def matrix(dtype):
        stride = (cute.sym_int64(divisibility=vec), 1)
        return cute.runtime.make_fake_tensor(dtype, (rows, columns), stride, assumed_align=vec * dtype.width // 8)

    return Program(
        PrefixSums(vec),
        matrix(cutlass_dtype(spec.x)),
        matrix(cutlass_dtype(spec.y)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
