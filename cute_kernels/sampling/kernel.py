"""The CuTe kernel of sampling, for SM90 and SM100.

The CTAs of a cluster share a row; a thread reads ``vec`` logits at a time. Without filters the row is read once, all
vectors of a thread at the same time; the words of a group of four logits come from one Philox counter. Leading zeros of
words bound values from above and below: only groups that may hold the CTA's largest value take logarithms. Greedy
choices make no words.

With filters digits of an order key, of the logit's bits and then of its index, are found from the highest to the
lowest: a histogram of integer weights in shared memory, which the CTAs read from each other. Integers add up to the
same in any order: those atomics, and the split of a row over CTAs, change no token.

Profile: ncu --clock-control none -k regex:SampleRows python -m bench.bench_sampling --filter sample.fwd.64x151936
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.cache_hints import EVICT_FIRST, load_vector
from cute_kernels.common.convert import to_fp32
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.philox import philox
from cute_kernels.common.rows import symbolic_vector
from cute_kernels.sampling.config import INDEX_BITS, LIMB_BITS, LIMBS, THREADS, SampleSpec, dropped_bits, levels
from cute_kernels.sampling.kernel_arithmetic import (
    LEAST_NOISE,
    add,
    choose,
    gumbel,
    largest_noise,
    least_mass,
    least_noise,
    multiply,
    order_bits,
    weight,
)
from jit_cache import Program, compiled

WARP_SIZE = 32
WARPS = THREADS // WARP_SIZE
MAX_BUCKETS = 2048
LAST = (1 << INDEX_BITS) - 1
LIMB = (1 << LIMB_BITS) - 1
HELD = 5  # vectors that a thread loads at once: its part of 151936 logits in bf16
LARGEST_FINITE = 3.4028234663852886e38


class SampleRows:
    """One token of each row."""

    def __init__(self, dtype, spec: SampleSpec):
        self.vec, self.cluster, self.filtered = spec.vec, spec.cluster, spec.filtered
        self.dropped = dropped_bits(dtype.width // 8, dtype is cutlass.BFloat16)
        self.group = min(self.vec, 4)

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
            block=[THREADS, 1, 1],
            cluster=[self.cluster, 1, 1] if const_expr(self.cluster > 1) else None,
            stream=stream,
            max_number_threads=[2 * THREADS, 1, 1],  # at most 64 registers: two CTAs an SM
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
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
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        row, rank = bidx // self.cluster, bidx % self.cluster
        n = logits.shape[1]
        span = cute.ceil_div(n, self.cluster * self.vec) * self.vec
        begin = rank * span
        end = cutlass.min(begin + span, n)
        smem = SmemAllocator()
        shared = self.allocate(smem)
        cute.arch.griddepcontrol_wait()
        line = cute.make_tensor(logits.iterator + Int64(row) * logits.stride[0], cute.make_layout(n))
        threshold, largest = Uint64(0), Float32(0.0)
        if const_expr(self.filtered):
            largest = self.largest(line, begin, end, scale, shared, tidx)
            if top_k < n:
                threshold = self.descend(line, begin, end, shared, tidx, Uint64(top_k), threshold, None, scale, largest)
            if top_p > 0:
                share = Uint64(top_p)
                threshold = self.descend(line, begin, end, shared, tidx, Uint64(1), threshold, share, scale, largest)
        seed, position = Uint64(seeds[row]), Uint32(positions[row])
        best, token = Float32(-math.inf), Int32(LAST)
        if const_expr(self.filtered):
            ahead = self.next(line, begin + tidx * self.vec, end)
            for first in cutlass.range(begin + tidx * self.vec, end, THREADS * self.vec, unroll=1):
                loaded = self.ordered(ahead)
                ahead.store(self.next(line, first + THREADS * self.vec, end).load())
                for g in cutlass.range_constexpr(0, self.vec, self.group):
                    x = cute.make_tensor(loaded.iterator + g, cute.make_layout(self.group))
                    most = largest_of([x[i] for i in range(self.group)])
                    scaled = multiply(most, scale)
                    is_kept = (self.order(most, Int32(0)) >= threshold) & (self.distance(scaled, largest) >= min_p)
                    if is_kept & (add(scaled, largest_noise(Uint32(0))) > best):
                        group = x, first + g, scale, noisy, position, seed
                        best, token = self.larger(best, token, *group, threshold, largest, min_p)
        else:
            slice_ = line, begin, end, scale, noisy, position, seed
            best, token = self.draw(*slice_, shared, tidx)
        self.first_largest(best, token, shared, tidx, row, rank, tokens)

    @cute.jit
    def draw(
        self,
        line: cute.Tensor,
        begin: Int32,
        end: Int32,
        scale: Float32,
        noisy: Int32,
        position: Uint32,
        seed: Uint64,
        shared,
        tidx: Int32,
    ):
        """The largest value of the slice, and its column, in the thread that has it; others may have smaller ones.

        Bounds of a group's values need its words, no logarithm. Only groups whose bound reaches what a value of the
        CTA is at least are computed: a few.
        """
        best, token, least = Float32(-math.inf), Int32(LAST), Float32(-LARGEST_FINITE)
        least_of_all = choose(noisy != 0, Float32(LEAST_NOISE), Float32(0.0))
        stride, groups = const_expr(THREADS * self.vec), const_expr(self.vec // self.group)
        for chunk in cutlass.range(begin, end, HELD * stride, unroll=1):
            first = chunk + tidx * self.vec
            places = [cutlass.min(first + v * stride, end - self.vec) for v in range(HELD)]
            held = [self.vector(line, place, self.vec, Int64(EVICT_FIRST)) for place in places]
            bounds = cute.make_rmem_tensor((groups, HELD), Float32)
            for v in cutlass.range_constexpr(HELD):
                x = self.numbers(held[v])
                is_there = first + v * stride < end
                for g in cutlass.range_constexpr(groups):
                    most = multiply(largest_of([x[g * self.group + i] for i in range(self.group)]), scale)
                    bounds[g, v] = choose(is_there, most, Float32(-math.inf))
                    least = cute.arch.fmax(least, add(bounds[g, v], least_of_all))
                if noisy != 0:
                    most = largest_of([bounds[g, v] for g in range(groups)])
                    if add(most, largest_noise(Uint32(0))) >= least:
                        for g in cutlass.range_constexpr(groups):
                            words = self.words(first + v * stride + g * self.group, position, seed)
                            word, logit = words[0], x[g * self.group]
                            for i in cutlass.range_constexpr(1, self.group):
                                is_less = words[i] < word
                                logit = choose(is_less, x[g * self.group + i], logit)
                                word = choose(is_less, words[i], word)
                            low = choose(is_there, multiply(logit, scale), Float32(-math.inf))
                            least = cute.arch.fmax(least, add(low, least_noise(word)))
                            bounds[g, v] = add(bounds[g, v], largest_noise(word))
            least = self.largest_of_cta(least, shared[0], tidx)
            found = Int32(0)
            for v in cutlass.range_constexpr(HELD):
                for g in cutlass.range_constexpr(groups):
                    found = found | choose(bounds[g, v] >= least, Int32(1 << (v * groups + g)), Int32(0))
            while found != 0:
                place = Int32(31) - cute.arch.clz(found & -found).to(Int32)
                column = first + place // groups * stride + place % groups * self.group
                group = self.load(line, column, self.group), column, scale, noisy, position, seed
                best, token = self.larger(best, token, *group, None, None, None)
                found = found & (found - 1)
            least = cute.arch.fmax(least, best)
        return best, token

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

    def allocate(self, smem):
        """(values by warp, tokens by warp, digits: sums by warp; found digit and what is left; histogram by limb)."""
        values = smem.allocate_tensor(Float32, cute.make_layout(WARPS + 1), byte_alignment=16)
        tokens = smem.allocate_tensor(Int32, cute.make_layout(WARPS + 1), byte_alignment=16)
        sums = found = histogram = None
        if self.filtered:
            sums = smem.allocate_tensor(Uint64, cute.make_layout(WARPS), byte_alignment=16)
            found = smem.allocate_tensor(Uint64, cute.make_layout(2), byte_alignment=16)
            layout = cute.make_layout((MAX_BUCKETS, LIMBS))
            histogram = smem.allocate_tensor(Uint32, layout, byte_alignment=16)
        return values, tokens, sums, found, histogram

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

    def next(self, line: cute.Tensor, first: Int32, end: Int32) -> cute.Tensor:
        """A thread's vector from ``first`` on; the last one of the slice beyond its end."""
        return self.vector(line, cutlass.min(first, end - self.vec), self.vec)

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
        bits = Uint64(order_bits(x) >> Uint32(self.dropped))
        return (bits << Uint64(INDEX_BITS)) | Uint64(LAST - column)

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
    def largest(self, line: cute.Tensor, begin: Int32, end: Int32, scale: Float32, shared, tidx: Int32) -> Float32:
        """The largest scaled logit of the row."""
        values = shared[0]
        most = Float32(-math.inf)
        ahead = self.next(line, begin + tidx * self.vec, end)
        for first in cutlass.range(begin + tidx * self.vec, end, THREADS * self.vec, unroll=1):
            x = self.ordered(ahead)
            ahead.store(self.next(line, first + THREADS * self.vec, end).load())
            for i in cutlass.range_constexpr(self.vec):
                most = cute.arch.fmax(most, multiply(x[i], scale))
        most = cute.arch.warp_reduction(most, cute.arch.fmax)
        if tidx % WARP_SIZE == 0:
            values[tidx // WARP_SIZE] = most
        self.meet()
        for i in cutlass.range_constexpr(-(-self.cluster * WARPS // WARP_SIZE)):
            place = i * WARP_SIZE + tidx % WARP_SIZE
            if place < self.cluster * WARPS:
                most = cute.arch.fmax(most, self.read(values, place % WARPS, place // WARPS))
        most = cute.arch.warp_reduction(most, cute.arch.fmax)
        self.meet()
        return most

    @cute.jit
    def largest_of_cta(self, value: Float32, values: cute.Tensor, tidx: Int32) -> Float32:
        value = cute.arch.warp_reduction(value, cute.arch.fmax)
        if tidx % WARP_SIZE == 0:
            values[tidx // WARP_SIZE] = value
        cute.arch.barrier()
        for w in cutlass.range_constexpr(WARPS):
            value = cute.arch.fmax(value, values[w])
        cute.arch.barrier()
        return value

    @cute.jit
    def descend(
        self,
        line: cute.Tensor,
        begin: Int32,
        end: Int32,
        shared,
        tidx: Int32,
        need: Uint64,
        least: Uint64,
        share,
        scale: Float32,
        largest: Float32,
    ) -> Uint64:
        """The largest order whose elements and all above them have the weight that is needed.

        A weight is 1, and ``need`` so many; or where there is a ``share``, exp(distance), and that share of the weight
        of all from ``least`` on is needed. Elements below ``least`` have none.
        """
        _, _, _, found, histogram = shared
        threshold = Uint64(0)
        for level in cutlass.range_constexpr(len(self.levels)):
            shift, bits = const_expr(self.levels[level])
            for i in cutlass.range(tidx, LIMBS << bits, THREADS, unroll=1):
                histogram[i & ((1 << bits) - 1), i >> bits] = Uint32(0)
            cute.arch.barrier()
            ahead = self.next(line, begin + tidx * self.vec, end)
            for first in cutlass.range(begin + tidx * self.vec, end, THREADS * self.vec, unroll=1):
                x = self.ordered(ahead)
                ahead.store(self.next(line, first + THREADS * self.vec, end).load())
                for i in cutlass.range_constexpr(self.vec):
                    order = self.order(x[i], first + i)
                    above = Uint64(shift + bits)
                    if ((order >> above) == (threshold >> above)) & (order >= least):
                        one = Uint64(1)
                        if const_expr(share is not None):
                            one = weight(self.distance(multiply(x[i], scale), largest))
                        bucket = Int32((order >> Uint64(shift)) & Uint64((1 << bits) - 1))
                        for limb in cutlass.range_constexpr(LIMBS if share is not None else 1):
                            part = Uint32((one >> Uint64(limb * LIMB_BITS)) & Uint64(LIMB))
                            if part != Uint32(0):
                                target = histogram.iterator + histogram.layout((bucket, limb))
                                cute.arch.red(target, part, op="add", dtype="u32", sem="relaxed", scope="cta")
            self.meet()
            need = self.find(shared, tidx, need, share if const_expr(level == 0) else None, bits)
            threshold = threshold | (found[0] << Uint64(shift))
            self.meet()  # before the histogram that others read, and what was found, are written over
        return threshold

    @property
    def levels(self):
        return levels(32 - self.dropped)

    @cute.jit
    def find(self, shared, tidx: Int32, need: Uint64, share, bits: cutlass.Constexpr[int]) -> Uint64:
        """The bucket, from the last one down, in which weights reach ``need``; returns what of it is needed."""
        _, _, sums, found, histogram = shared
        buckets = const_expr(1 << bits)
        each = const_expr(max(1, buckets // THREADS))
        own, total = [], Uint64(0)
        for j in cutlass.range_constexpr(each):
            own.append(self.weight_of(histogram, buckets - 1 - (tidx * each + j)))
            total = total + own[j]
        lane, warp = tidx % WARP_SIZE, tidx // WARP_SIZE
        before = inclusive(total, lane) - total
        if lane == WARP_SIZE - 1:
            sums[warp] = before + total
        cute.arch.barrier()
        all_of_them = Uint64(0)
        for w in cutlass.range_constexpr(WARPS):
            before = before + choose(warp > w, sums[w], Uint64(0))
            all_of_them = all_of_them + sums[w]
        if const_expr(share is not None):
            need = least_mass(all_of_them, share)
        for j in cutlass.range_constexpr(each):
            if (before < need) & (need <= before + own[j]):
                found[0] = Uint64(buckets - 1 - (tidx * each + j))
                found[1] = need - before
            before = before + own[j]
        cute.arch.barrier()
        return found[1]

    @cute.jit
    def weight_of(self, histogram: cute.Tensor, bucket: Int32) -> Uint64:
        """The weight of a bucket in all CTAs; 0 if there is no such bucket."""
        total = Uint64(0)
        if bucket >= 0:
            for rank in cutlass.range(self.cluster, unroll=4):
                for limb in cutlass.range_constexpr(LIMBS):
                    part = Uint64(self.read(histogram, (bucket, limb), rank))
                    total = total + (part << Uint64(limb * LIMB_BITS))
        return total

    @cute.jit
    def first_largest(self, best: Float32, token: Int32, shared, tidx: Int32, row: Int32, rank: Int32, tokens):
        """The token of the largest value, of equal ones the first; 0 if there is none above -inf."""
        values, indices = shared[0], shared[1]
        best, token = best_of_warp(best, token)
        if tidx % WARP_SIZE == 0:
            values[tidx // WARP_SIZE] = best
            indices[tidx // WARP_SIZE] = token
        self.meet()
        if (rank == 0) & (tidx < WARP_SIZE):
            for i in cutlass.range_constexpr(-(-self.cluster * WARPS // WARP_SIZE)):
                place = i * WARP_SIZE + tidx
                if place < self.cluster * WARPS:
                    other = self.read(values, place % WARPS, place // WARPS)
                    index = self.read(indices, place % WARPS, place // WARPS)
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


@cute.jit
def inclusive(value: Uint64, lane: Int32) -> Uint64:
    """The sum of a warp's values up to this lane's."""
    for step in cutlass.range_constexpr(5):
        low = cute.arch.shuffle_sync_up(Uint32(value), offset=1 << step, mask_and_clamp=0)
        high = cute.arch.shuffle_sync_up(Uint32(value >> Uint64(32)), offset=1 << step, mask_and_clamp=0)
        other = (Uint64(high) << Uint64(32)) | Uint64(low)
        value = value + choose(lane >= (1 << step), other, Uint64(0))
    return value


@compiled
def sample_rows(arch: str, spec: SampleSpec) -> Program:
    """Tokens of (rows, n) logits. ``scale``: 1 / temperature. ``top_p``: times 2^24; 0: none. ``min_p``: its log."""
    dtype, rows = cutlass_dtype(spec.logits), cute.sym_int()
    columns, stride = cute.sym_int(divisibility=spec.vec), cute.sym_int64(divisibility=spec.vec)
    align = spec.vec * dtype.width // 8
    return Program(
        SampleRows(dtype, spec),
        cute.runtime.make_fake_tensor(dtype, (rows, columns), (stride, 1), assumed_align=align),
        *(symbolic_vector(Int64, rows) for _ in range(3)),
        Float32(1.0),
        Int32(1),
        Int32(1),
        Int32(1),
        Float32(0.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
