"""CuTe kernels of a row's logsumexp and variance, which stream rows as the softmax does, and of prefix sums."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.cache_hints import load_vector
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.row_layout import WARP_SIZE, RowConfig
from cute_kernels.common.rows import (
    dot_elements,
    piece_of,
    sum_elements,
    sum_pieces,
    symbolic_rows,
    symbolic_vector,
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
    """

    def __init__(self, config: RowConfig):
        super().__init__(config, writes=False)

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, num_clusters: Int32, stream):
        self.exact = x.element_type is Float32
        self.launched(self.kernel(x, y), num_clusters, stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        self.walk([x], y, Float32(1.0))

    @cute.jit
    def reduce_row(self, row, has_column, messages, mbars, team, round_index):
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
        largest = cute.arch.fmin(largest, Float32(-LOWEST))  # of +inf a distance of +inf is left, not NaN
        powers = [self.exp(piece_of(rX, piece, layout).load() - largest) for piece in layout.pieces]
        largest, total = self.row_sum.scaled_sum(largest, sum_pieces(powers), messages, mbars, team, round_index)
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
