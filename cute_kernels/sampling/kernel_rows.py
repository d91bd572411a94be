"""What both kernels of sampling share: a launch, logits as numbers, random words, and the largest value of a row.

The CTAs of a cluster share a row. Each thread has the largest value among those that it looked at, and its column.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64, const_expr

from cute_kernels.common.cache_hints import load_vector
from cute_kernels.common.convert import to_fp32
from cute_kernels.common.philox import philox
from cute_kernels.sampling.config import FILTER_THREADS, INDEX_BITS, THREADS, SampleSpec, dropped_bits
from cute_kernels.sampling.kernel_arithmetic import add, choose, gumbel, largest_noise, multiply, order_bits

WARP_SIZE = 32
LAST = (1 << INDEX_BITS) - 1
LARGEST_FINITE = 3.4028234663852886e38


class SampleRows:
    """One token of each row."""

    def __init__(self, dtype, spec: SampleSpec):
        self.vec, self.cluster, self.filtered = spec.vec, spec.cluster, spec.filtered
        self.dropped = dropped_bits(dtype.width // 8, dtype is cutlass.BFloat16)
        self.threads = FILTER_THREADS if spec.filtered else THREADS
        self.warps = self.threads // WARP_SIZE
        self.wide = 128 // dtype.width  # logits that fill 16 bytes
        self.group = 4 if spec.filtered else min(self.vec, 4)

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,
        seeds: cute.Tensor,
        positions: cute.Tensor,
        tokens: cute.Tensor,
        scale: Float32,
        noisy: Int32,
        top_k: Int32,
        top_p: Int32,
        min_p: Float32,
        stream,
    ):
        self.kernel(logits, seeds, positions, tokens, scale, noisy, top_k, top_p, min_p).launch(
            grid=[logits.shape[0] * self.cluster, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1] if const_expr(self.cluster > 1) else None,
            stream=stream,
            max_number_threads=[1024, 1, 1],  # at most 64 registers
            use_pdl=True,
        )

    @cute.jit
    def larger(
        self,
        best: Float32,
        token: Int32,
        x: cute.Tensor,
        first: Int32,
        scale: Float32,
        noisy: Int32,
        position: Uint32,
        seed: Uint64,
        threshold,
        largest,
        min_p,
    ):
        """The largest value of a group that passes the filters, and its column; where none is above ``best``, those."""
        noise = cute.make_rmem_tensor((self.group,), Float32)
        noise.fill(0.0)
        if noisy != 0:
            words = self.words(first, position, seed)
            least = words[0]
            for i in cutlass.range_constexpr(1, self.group):
                least = choose(words[i] < least, words[i], least)
            most = multiply(largest_of([x[i] for i in range(self.group)]), scale)
            if add(most, largest_noise(least)) > best:  # else no value is above best: none is without noise, either
                for i in cutlass.range_constexpr(self.group):
                    noise[i] = gumbel(words[i])
        for i in cutlass.range_constexpr(self.group):
            scaled = multiply(x[i], scale)
            value = add(scaled, noise[i])
            wins = value > best
            if const_expr(self.filtered):
                is_kept = self.order(x[i], first + i) >= threshold
                wins = wins & is_kept & (self.distance(scaled, largest) >= min_p)
            best, token = choose(wins, value, best), choose(wins, first + i, token)
        return best, token

    def vector(self, line: cute.Tensor, first: Int32, number: int, policy=None) -> cute.Tensor:
        """Consecutive logits."""
        loaded = cute.make_rmem_tensor((number,), line.element_type)
        load_vector((line.iterator + first).align(number * line.element_type.width // 8), loaded, policy)
        return loaded

    def numbers(self, loaded: cute.Tensor):
        """Logits in fp32."""
        return to_fp32(loaded.load()) if cute.size(loaded) > 1 else loaded.load().to(Float32)

    def load(self, line: cute.Tensor, first: Int32, number: int) -> cute.Tensor:
        """Consecutive logits in fp32: NaN as -inf, -0 as 0."""
        return self.ordered(self.vector(line, first, number))

    def ordered(self, loaded: cute.Tensor) -> cute.Tensor:
        """Logits in fp32: NaN as -inf, -0 as 0."""
        number = cute.size(loaded)
        x = cute.make_rmem_tensor((number,), Float32)
        x.store(self.numbers(loaded))
        for i in range(number):
            x[i] = add(choose(x[i] == x[i], x[i], Float32(-math.inf)), 0.0)
        return x

    def words(self, first: Int32, position: Uint32, seed: Uint64) -> list:
        """The random words of a group's columns."""
        words = philox(Uint32(first) // Uint32(4), position, seed)
        return words if self.group == 4 else [self.word(words, first + i) for i in range(self.group)]

    def word(self, words: list, column: Int32) -> Uint32:
        """Which of a counter's words a column has."""
        i = column % 4
        return choose(i < 2, choose(i == 0, words[0], words[1]), choose(i == 2, words[2], words[3]))

    def order(self, x: Float32, column: Int32) -> Uint64:
        """Larger of larger logits, and of equal ones of the lower index."""
        return (Uint64(self.value_bits(x)) << Uint64(INDEX_BITS)) | Uint64(LAST - column)

    def value_bits(self, x: Float32) -> Uint32:
        return order_bits(x) >> Uint32(self.dropped)

    def distance(self, scaled: Float32, largest: Float32) -> Float32:
        return choose(scaled == largest, Float32(0.0), add(scaled, -largest))

    @cute.jit
    def meet(self):
        """All CTAs of the cluster see what each wrote to its shared memory."""
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()

    def read(self, shared: cute.Tensor, place, rank):
        """An element of a CTA's shared memory, from any of the cluster."""
        if self.cluster == 1:
            return shared[place]
        address = cute.arch.map_dsmem_ptr(shared.iterator + shared.layout(place), rank).toint()
        return cute.arch.inline_ptx(
            "ld.shared::cluster.b32 {$w0}, [{$r0}];", write_only_types=[shared.element_type], read_only_args=[address]
        )

    @cute.jit
    def first_largest(
        self, best: Float32, token: Int32, values, indices, tidx: Int32, row: Int32, rank: Int32, tokens: cute.Tensor
    ):
        """The token of the largest value, of equal ones the first; 0 if there is none above -inf."""
        best, token = best_of_warp(best, token)
        if tidx % WARP_SIZE == 0:
            values[tidx // WARP_SIZE] = best
            indices[tidx // WARP_SIZE] = token
        self.meet()
        if (rank == 0) & (tidx < WARP_SIZE):
            for i in cutlass.range_constexpr(-(-self.cluster * self.warps // WARP_SIZE)):
                place = i * WARP_SIZE + tidx
                if place < self.cluster * self.warps:
                    other = self.read(values, place % self.warps, place // self.warps)
                    index = self.read(indices, place % self.warps, place // self.warps)
                    best, token = better(best, token, other, index)
            best, token = best_of_warp(best, token)
            if tidx == 0:
                tokens[row] = Int64(choose(best == Float32(-math.inf), Int32(0), token))
        if const_expr(self.cluster > 1):
            self.meet()  # a CTA that ends takes its shared memory with it


@cute.jit
def best_of_warp(value: Float32, index: Int32):
    """The largest of a warp's values, of equal ones that of the lowest index, and the index."""
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_bfly(value, offset=1 << step)
        value, index = better(value, index, other, cute.arch.shuffle_sync_bfly(index, offset=1 << step))
    return value, index


def largest_of(values) -> Float32:
    """The largest number; NaN if there is none."""
    most = values[0]
    for i in range(1, len(values)):
        most = cute.arch.fmax(most, values[i])
    return most


def better(value: Float32, index: Int32, other: Float32, other_index: Int32):
    """The larger of two values, with its index; the lower index if they are equal."""
    wins = (other > value) | ((other == value) & (other_index < index))
    return choose(wins, other, value), choose(wins, other_index, index)
