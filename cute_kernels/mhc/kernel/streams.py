"""A thread's part of a token's streams: where it lies, and how it gets in and out of registers.

A token has n streams of C channels, in one of two orders: "streams" (stream after stream, element ``i C + c``) or
"channels" (channel after channel, element ``c n + i``). A thread holds ``vec`` neighbouring channels of all streams as
a fragment (vec, n), whatever the order: only loads and stores know it.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.common.cache_hints import LAST_BYTES, evict_first_if, load_vector
from cute_kernels.mhc.config import StreamLayout

WARP_SIZE = 32
SM_REGISTERS = 65536
# CTAs an SM that a launch asks for at least: with one ptxas may use all registers, and loads all before it computes.
# Without it, it puts loads off, to need fewer. H200, order of channels, us: forward of expand_combine 65536x4x768
# 220.5 -> 217.6 (44 -> 71 registers), its gradients but for dx 2048x4x5120 69.5 -> 59.5 (70 -> 128), dpre alone
# 4096x4x7168 87.2 -> 77.6. Where much is computed more warps are worth more: forward with the next layer's input
# 8192x4x4096 167.9 -> 176.3, all gradients 234.2 -> 248.9
LOADS_FIRST = 1


@cute.jit
def launch_size(rows, s: cutlass.Constexpr):
    """CTAs, so that every warp's worth of vectors of every token has a warp."""
    return Int32(cute.ceil_div(Int64(rows) * warps_per_token(s), s.threads // WARP_SIZE))


def warps_per_token(s: StreamLayout) -> int:
    """Warps that share a token where each takes ``unroll`` vectors a lane."""
    return -(-s.vectors // (WARP_SIZE * s.unroll))


@cute.jit
def vectors_of_thread(s: cutlass.Constexpr, backwards: cutlass.Constexpr[bool] = False):
    """(token, vectors of this thread: (first channel, whether it is inside) each); only the CTA's place in 64 bits.

    ``backwards``: the first CTA has the last tokens. All of a warp know that they have the same token, whose addresses
    they then share (forward of expand_combine, order of channels, 54 -> 44 registers, 4096x4x7168 133.1 -> 129.6 us).
    """
    warps = const_expr(warps_per_token(s))
    tidx = cute.arch.thread_idx()[0]
    bidx = cute.arch.block_idx()[0]
    if const_expr(backwards):
        bidx = cute.arch.grid_dim()[0] - 1 - bidx
    first = Int64(bidx) * (s.threads // WARP_SIZE)
    first_row = first // warps
    index = Int32(first - first_row * warps) + cute.arch.make_warp_uniform(tidx // WARP_SIZE)
    vector = index % warps * (WARP_SIZE * s.unroll) + tidx % WARP_SIZE
    return Int32(first_row) + index // warps, unrolled(vector, s)


def unrolled(vector, s: StreamLayout) -> list:
    """(first channel, whether it is inside) of the vectors of a lane, the first of which is ``vector``."""
    exact = s.vectors % (WARP_SIZE * s.unroll) == 0
    vectors = [vector + u * WARP_SIZE for u in range(s.unroll)]
    return [(v * s.vec, True if exact else v < s.vectors) for v in vectors]


@cute.jit
def row_pointer(matrix: cute.Tensor, row, column, align: cutlass.Constexpr[int]):
    """Address of ``matrix[row, column]``, in 64 bits, known to start on ``align`` elements."""
    pointer = matrix.iterator + (Int64(row) * matrix.stride[0] + column)
    return pointer.align(align * matrix.element_type.width // 8)


def stream_fragment(dtype, s: StreamLayout):
    """Registers for ``vec`` channels of all streams, as (vec, n), in the order of memory."""
    stride = (1, s.vec) if s.order == "streams" else (s.n, 1)
    return cute.make_rmem_tensor(cute.make_layout((s.vec, s.n), stride=stride), dtype)


@cute.jit
def last_reads_first(x: cute.Tensor, row, s: cutlass.Constexpr) -> Int64:
    """The policy of a token's loads: the last tokens make room first in L2, where the results then stay."""
    last_tokens = const_expr(LAST_BYTES // (s.n * s.channels * x.element_type.width // 8))
    return evict_first_if(x.shape[0] - row <= last_tokens)


@cute.jit
def load_streams(x: cute.Tensor, row, channel, inside, s: cutlass.Constexpr, policy: Optional[Int64] = None):
    """The streams of channels ``channel, ...``, in x's dtype; zeros unless ``inside``."""
    fragment = stream_fragment(x.element_type, s)
    if const_expr(inside is not True):
        fragment.fill(0)
    if inside:
        if const_expr(s.order == "streams"):
            for i in cutlass.range_constexpr(s.n):
                source = row_pointer(x, row, i * s.channels + channel, s.vec)
                load_vector(source, fragment[None, i], policy)
        else:
            for part in cutlass.range_constexpr(s.vec * s.n // s.access):
                source = row_pointer(x, row, channel * s.n + part * s.access, s.access)
                target = cute.make_tensor(fragment.iterator + part * s.access, cute.make_layout(s.access))
                load_vector(source, target, policy)
    return fragment


@cute.jit
def store_streams(values: cute.Tensor, x: cute.Tensor, row, channel, inside, s: cutlass.Constexpr):
    """Round a fragment (vec, n) of fp32 to x's dtype and write it, if it is ``inside``; returns what was written."""
    fragment = stream_fragment(x.element_type, s)
    for i in cutlass.range_constexpr(s.n):
        for c in cutlass.range_constexpr(s.vec):
            fragment[c, i] = values[c, i].to(x.element_type)
    if inside:
        if const_expr(s.order == "streams"):
            for i in cutlass.range_constexpr(s.n):
                target = row_pointer(x, row, i * s.channels + channel, s.vec)
                cute.autovec_copy(fragment[None, i], cute.make_tensor(target, cute.make_layout(s.vec)))
        else:
            for part in cutlass.range_constexpr(s.vec * s.n // s.access):
                target = row_pointer(x, row, channel * s.n + part * s.access, s.access)
                source = cute.make_tensor(fragment.iterator + part * s.access, cute.make_layout(s.access))
                cute.autovec_copy(source, cute.make_tensor(target, cute.make_layout(s.access)))
    return fragment


@cute.jit
def weighted_sum(streams: cute.Tensor, weights: cute.Tensor, s: cutlass.Constexpr):
    """sum_i weights_i x_i of a fragment (vec, n), in ascending i: fp32, of ``vec`` channels.

    Fused by name: of two products that meet in a sum the compiler would choose which to round, by what is around.
    """
    total = cute.make_rmem_tensor((s.vec,), Float32)
    for c in cutlass.range_constexpr(s.vec):
        total[c] = weights[0] * streams[c, 0].to(Float32)
        for i in cutlass.range_constexpr(1, s.n):
            total[c] = cute.math.fma(weights[i], streams[c, i].to(Float32), total[c])
    return total


@cute.jit
def load_channels(h: cute.Tensor, row, channel, inside, s: cutlass.Constexpr, policy: Optional[Int64] = None):
    """Channels ``channel, ...`` of one row of an (M, C) matrix, in its dtype; zeros unless ``inside``."""
    fragment = cute.make_rmem_tensor((s.vec,), h.element_type)
    if const_expr(inside is not True):
        fragment.fill(0)
    if inside:
        source = row_pointer(h, row, channel, s.vec)
        load_vector(source, fragment, policy)
    return fragment


@cute.jit
def store_channels(values: cute.Tensor, h: cute.Tensor, row, channel, inside, s: cutlass.Constexpr):
    """Round ``vec`` fp32 values to h's dtype and write them, if they are ``inside``."""
    fragment = cute.make_rmem_tensor((s.vec,), h.element_type)
    fragment.store(values.load().to(h.element_type))
    if inside:
        target = row_pointer(h, row, channel, s.vec)
        cute.autovec_copy(fragment, cute.make_tensor(target, cute.make_layout(s.vec)))


@cute.jit
def load_coefficients(matrix: cute.Tensor, row, count: cutlass.Constexpr[int], align: cutlass.Constexpr[int]):
    """The first ``count`` fp32 values of a row, ``align`` of which move together."""
    fragment = cute.make_rmem_tensor((count,), Float32)
    for part in cutlass.range_constexpr(count // align):
        source = row_pointer(matrix, row, part * align, align)
        target = cute.make_tensor(fragment.iterator + part * align, cute.make_layout(align))
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(align)), target)
    return fragment


def mix(i: int, o: int, n: int, orientation: str) -> int:
    """Index in a row of ``res`` of the weight with which stream ``i`` of x enters stream ``o`` of the result."""
    return i * n + o if orientation == "io" else o * n + i


def warp_sums(values: list):
    """Sums over a warp of each of up to 32 ``values``: lane l gets that of ``values[l % P]``, P a power of two.

    Lanes exchange halves of their lists, so that P values cost P - 1 shuffles and what is left of five, not 5 P. The
    order of the additions is that of a butterfly.
    """
    lane = cute.arch.lane_idx()
    size = 1 << (len(values) - 1).bit_length()
    values = values + [Float32(0.0)] * (size - len(values))
    while len(values) > 1:
        half = len(values) // 2
        upper = (lane & half) != 0
        values = [
            select(upper, high, low) + cute.arch.shuffle_sync_bfly(select(upper, low, high), offset=half)
            for low, high in zip(values[:half], values[half:], strict=True)
        ]
    total = values[0]
    while size < WARP_SIZE:
        total = total + cute.arch.shuffle_sync_bfly(total, offset=size)
        size *= 2
    return total


class TokenSums:
    """Which tokens and vectors the warps of a CTA have that add over a token's channels, and how they add.

    Up to ``most`` warps, a CTA, share a token, each with as many rounds of vectors, two at least: of a token of 64 KB
    each, few thousand tokens leave SMs idle at the end (H200, backward of aggregate, order of channels, share of the
    same-bytes copy, with up to four: 8192x4x4096 0.886 -> 0.962, 2048x4x5120 0.847 -> 0.940).
    """

    def __init__(self, layout: StreamLayout, count: int, most: int):
        self.count = count  # numbers that are added
        self.round = WARP_SIZE * layout.unroll  # vectors that a warp takes at once
        rounds = -(-layout.vectors // self.round)
        shares = (w for w in (8, 7, 5, 4, 2) if w <= most and rounds % w == 0 and rounds >= 2 * w)
        self.warps = next(shares, 1)  # of a token
        self.tokens = 1 if self.warps > 1 else 4  # of a CTA
        self.threads = self.warps * self.tokens * WARP_SIZE

    @cute.jit
    def row(self):
        """The token of this thread."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return cute.arch.block_idx()[0] * self.tokens + warp // self.warps

    @cute.jit
    def first_vector(self):
        """The first vector of this warp."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % self.warps * self.round

    @cute.jit
    def store(self, sums: cute.Tensor, outputs: cutlass.Constexpr[tuple], row, smem):
        """Write a token's ``sums``, in order, to its rows of ``outputs``: those of its warps are added in their order.

        Called by all warps of a token. They meet at the CTA's barrier: two tokens of two warps would want a barrier
        each, by a number that is not known beforehand, for which a CTA gets all 16 and few CTAs fit an SM.
        """
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        shared = None
        if const_expr(self.warps > 1):
            shared = smem.allocate_tensor(Float32, cute.make_layout((self.count, self.warps)))
        for first in cutlass.range_constexpr(0, self.count, WARP_SIZE):
            count = const_expr(min(WARP_SIZE, self.count - first))
            total = warp_sums([sums[first + j] for j in range(count)])
            if lane < count:
                if const_expr(self.warps > 1):
                    shared[first + lane, warp] = total
                else:
                    write_to(outputs, row, first + lane, total)
        if const_expr(self.warps > 1):
            cute.arch.barrier()
            for first in cutlass.range_constexpr(0, self.count, self.threads):
                index = first + cute.arch.thread_idx()[0]
                if index < self.count:
                    total = shared[index, 0]
                    for w in cutlass.range_constexpr(1, self.warps):
                        total = total + shared[index, w]
                    write_to(outputs, row, index, total)


@cute.jit
def write_to(outputs: cutlass.Constexpr[tuple], row, index, value):
    """Element ``index`` of the rows of ``outputs``, one after the other."""
    if const_expr(len(outputs) == 1):
        outputs[0][row, index] = value
    else:
        width = const_expr(outputs[0].shape[1])
        if index < width:
            outputs[0][row, index] = value
        else:
            outputs[1][row, index - width] = value


@cute.jit
def select(condition, a, b):
    """``a`` where the condition holds, else ``b``."""
    return a if condition else b


def take_registers(registers: Optional[int], threads: int):
    """Move a warp of a CTA of ``threads`` from its even share to this many registers a thread; None: stay."""
    even = SM_REGISTERS // threads // 8 * 8
    if registers is not None and registers > even:
        cute.arch.setmaxregister_increase(registers)
    elif registers is not None and registers < even:
        cute.arch.setmaxregister_decrease(registers)


def symbolic_streams(dtype, rows, width: int, align: int):
    """A (rows, width) matrix of any row stride, whose rows start on ``align`` elements."""
    if dtype is None:
        return None
    stride = (cute.sym_int64(divisibility=align), 1)
    return cute.runtime.make_fake_tensor(dtype, (rows, width), stride, assumed_align=align * dtype.width // 8)
