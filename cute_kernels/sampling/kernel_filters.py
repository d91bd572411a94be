"""The CuTe kernel of sampling with filters, for SM90 and SM100.

The CTAs of a cluster share a row, and each keeps its part in shared memory: gmem -> registers -> smem, once. top_p, and
a top_k of many, count the logits by value as they come, a bucket for each 16 upper bits of fp32. A bucket of bf16 has
one value: counts times weights are the exact mass. In other dtypes a pass over the row weighs every logit, and counts
give a bound that no logit that is kept is below. For a top_k of few each thread counts its largest logit, which gives
a bound, too. Each warp lists its groups of four logits that reach the bound; all that follows looks at these alone.

Profile: ncu --clock-control none -k regex:Sample python -m bench.bench_sampling --filter sample.fwd.64x151936
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32, Uint64, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.cache_hints import EVICT_FIRST
from cute_kernels.sampling.config import HELD_BYTES, INDEX_BITS, SampleSpec
from cute_kernels.sampling.kernel_arithmetic import (
    COUNTS,
    LEAST_NOISE,
    WEIGHTLESS,
    add,
    add_down,
    bucket_of,
    choose,
    fast_weight,
    is_edge,
    largest_noise,
    least_mass,
    lower_end,
    multiply,
    reciprocal,
    upper_end,
    weight,
)
from cute_kernels.sampling.kernel_rows import LARGEST_FINITE, LAST, WARP_SIZE, largest_of
from cute_kernels.sampling.kernel_threshold import SECOND, SampleThreshold, bit_length, sum_of_warp

AHEAD = 10  # vectors that a thread loads at once: its part of 75968 logits in bf16


class SampleFiltered(SampleThreshold):
    """One token of each row, of the logits that top_k, top_p and min_p keep."""

    def __init__(self, dtype, spec: SampleSpec):
        super().__init__(dtype, spec)
        self.has_whole_values = dtype is cutlass.BFloat16  # of which a bucket of counts has one
        self.held = HELD_BYTES * 8 // dtype.width
        self.turn = self.threads * self.wide // self.group  # groups that the threads look at together
        turns = -(-self.held // (self.threads * self.wide))
        self.list_length = turns * self.turn // self.warps

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
        span = cute.ceil_div(n, self.cluster * self.wide) * self.wide
        begin = rank * span
        count = cutlass.max(cutlass.min(begin + span, n) - begin, 0)
        lane, warp = tidx % WARP_SIZE, cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        smem = SmemAllocator()
        held, lists = self.allocate_row(smem, logits.element_type)
        shared = self.allocate(smem)
        values, indices, largest_values = shared[0], shared[1], shared[2]
        found, histogram = shared[4], shared[5]
        counts = cute.make_tensor(histogram.iterator + SECOND, cute.make_layout(COUNTS))
        for i in cutlass.range(tidx, COUNTS, self.threads, unroll=1):
            counts[i] = Uint32(0)
        if tidx == 0:
            found[0] = Uint64(COUNTS)
            found[2] = Uint64(0)
            shared[7][0] = Uint32(0)
            shared[7][1] = Uint32(0)
        cute.arch.barrier()
        cute.arch.griddepcontrol_wait()
        part = cute.make_tensor(logits.iterator + (Int64(row) * logits.stride[0] + begin), cute.make_layout(n))
        counts_all = (top_p > 0) & (top_k >= n) | (top_k < n) & (top_k * 4 > self.cluster * self.threads)
        own = self.hold(part, held, count, counts, choose(counts_all, Int32(1), Int32(0)), tidx)
        most = add(self.largest(own, largest_values, lane, warp), 0.0)
        largest = multiply(most, scale)
        is_finite = (largest <= LARGEST_FINITE) & (largest >= -LARGEST_FINITE)

        bound, need, is_exact = Float32(-math.inf), Uint64(0), Int32(0)
        if top_k < n:
            need = Uint64(top_k)
        if is_finite:
            if (top_k < n) | (top_p > 0):
                if choose(counts_all, Int32(1), Int32(0)) == 0:
                    self.count(counts, own)
                    self.meet()
                is_mass, share, rest = choose(top_k < n, Int32(0), Int32(1)), Uint64(top_p), Uint64(0)
                all_counts = self.counts_of_cluster(counts, lists, tidx)
                weights = self.weights_of_buckets(all_counts, shared, tidx, is_mass, scale, largest)
                if const_expr(self.has_whole_values):
                    rest = self.search(weights, shared, tidx, need, share)
                    whole = counts_all & (found[2] == Uint64(0)) & (is_edge(last_bucket(found)) == 0)
                    is_exact = choose(whole, Int32(1), Int32(0))
                if (is_exact | (is_mass ^ 1) & Int32(self.has_whole_values)) == 0:
                    near = need
                    if is_mass != 0:
                        total = self.total(self.weigh_row(held, count, scale, largest, tidx), shared, lane, warp)
                        need = least_mass(total, share)
                        near = need + (need >> Uint64(16))  # weights of neighbours may not grow in their last bits
                        if tidx == 0:
                            found[0] = Uint64(COUNTS)
                    self.search(weights, shared, tidx, near, share)
                bound = lower_end(last_bucket(found), self.has_whole_values)
                if is_exact != 0:
                    need = rest
            else:
                bound = unscaled(add_down(largest, add_down(multiply(min_p, 1.00001), -1e-30)), scale)
        listed = self.list_groups(held, lists, count, bound, tidx, warp)
        source = held, lists, listed, begin, lane, warp

        # Keys are kept that are so far from the largest one
        top = self.order(most, Int32(0))
        last = top - self.order(bound, Int32(LAST))
        begin_at = choose(is_exact != 0, last - Uint64(LAST), Uint64(0))
        digits = choose(is_exact != 0, Int32(INDEX_BITS), bit_length(last))
        if top_k < n:
            last = self.descend(source, shared, tidx, need, None, top, last, begin_at, digits, scale, largest)
            need, begin_at, digits = Uint64(0), Uint64(0), bit_length(last)
            if top_p > 0:
                self.meet()  # before histograms that others read are written over
        if top_p > 0:
            share = Uint64(top_p)
            last = self.descend(source, shared, tidx, need, share, top, last, begin_at, digits, scale, largest)
        threshold = top - last

        seed, position = Uint64(seeds[row]), Uint32(positions[row])
        # The value of the largest logit is above this, by more than it is rounded; which spares most logarithms
        is_small = (largest < 65536.0) & (largest > -65536.0)
        floor = choose(is_small & (noisy != 0), add(largest, LEAST_NOISE), Float32(-math.inf))
        best, token = floor, Int32(LAST)
        for i in cutlass.range(lane, listed, WARP_SIZE, unroll=1):
            x, first = self.listed_group(source, i)
            highest = largest_of([x[j] for j in range(self.group)])
            scaled = multiply(highest, scale)
            is_kept = (self.order(highest, Int32(0)) >= threshold) & (self.distance(scaled, largest) >= min_p)
            if is_kept & (add(scaled, largest_noise(Uint32(0))) > best):
                group = x, first, scale, noisy, position, seed
                best, token = self.larger(best, token, *group, threshold, largest, min_p)
        self.first_largest(best, token, values, indices, tidx, row, rank, tokens)

    def allocate_row(self, smem, dtype):
        """(The CTA's part of the row, of each warp the groups that it listed)."""
        held = smem.allocate_tensor(dtype, cute.make_layout(self.held), byte_alignment=16)
        length = max(self.list_length, 2 * COUNTS // self.warps)  # in the place of counts, first
        layout = cute.make_layout((length, self.warps))
        return held, smem.allocate_tensor(Uint16, layout, byte_alignment=16)

    def allocate(self, smem):
        """By warp: values, tokens, largest logits, sums; then what was found, histograms, totals by warp, keys left.

        Found: a bucket, what of it is needed, whether logits of one bucket weigh differently.
        """
        values = smem.allocate_tensor(Float32, cute.make_layout(self.warps), byte_alignment=16)
        tokens = smem.allocate_tensor(Int32, cute.make_layout(self.warps), byte_alignment=16)
        largest = smem.allocate_tensor(Float32, cute.make_layout(self.warps), byte_alignment=16)
        sums = smem.allocate_tensor(Uint32, cute.make_layout((2, self.warps)), byte_alignment=16)
        found = smem.allocate_tensor(Uint64, cute.make_layout(3), byte_alignment=16)
        histogram = smem.allocate_tensor(Uint32, cute.make_layout(SECOND + COUNTS), byte_alignment=16)
        totals = smem.allocate_tensor(Uint32, cute.make_layout((2, self.warps)), byte_alignment=16)
        numbers = smem.allocate_tensor(Uint32, cute.make_layout(2), byte_alignment=16)
        return values, tokens, largest, sums, found, histogram, totals, numbers

    @cute.jit
    def hold(
        self, part: cute.Tensor, held: cute.Tensor, count: Int32, counts: cute.Tensor, counts_all: Int32, tidx: Int32
    ) -> Float32:
        """Copy the CTA's part of the row to shared memory, and count it; the largest logit that this thread copied.

        -inf fills the last 16 bytes.
        """
        most, stride = Float32(-math.inf), const_expr(self.threads * self.vec)
        for chunk in cutlass.range(0, count, AHEAD * stride, unroll=1):
            first = chunk + tidx * self.vec
            places = [cutlass.min(first + v * stride, count - self.vec) for v in range(AHEAD)]
            loaded = [self.vector(part, place, self.vec, Int64(EVICT_FIRST)) for place in places]
            for v in cutlass.range_constexpr(AHEAD):
                x = self.numbers(loaded[v])
                own = largest_of([x[i] for i in range(self.vec)])
                if first + v * stride < count:  # else it is the last vector, that of another thread
                    most = cute.arch.fmax(most, own)
                    target = (held.iterator + places[v]).align(self.vec * held.element_type.width // 8)
                    cute.autovec_copy(loaded[v], cute.make_tensor(target, cute.make_layout(self.vec)))
                    if counts_all != 0:
                        for i in cutlass.range_constexpr(self.vec):
                            self.count(counts, x[i])
        if const_expr(self.vec < self.wide):
            if (tidx < self.wide) & ((count + tidx) // self.wide < cute.ceil_div(count, self.wide)):
                held[count + tidx] = held.element_type(-math.inf)
        return most

    @cute.jit
    def largest(self, most: Float32, values: cute.Tensor, lane: Int32, warp: Int32) -> Float32:
        """The largest of all threads of the cluster."""
        most = cute.arch.warp_reduction(most, cute.arch.fmax)
        if lane == 0:
            values[warp] = most
        self.meet()
        for rank in cutlass.range_constexpr(self.cluster):
            most = cute.arch.fmax(most, self.read(values, lane, rank))
        return cute.arch.warp_reduction(most, cute.arch.fmax)

    def count(self, counts: cute.Tensor, x: Float32):
        target = counts.iterator + bucket_of(x)
        cute.arch.red(target, Uint32(1), op="add", dtype="u32", sem="relaxed", scope="cta")

    @cute.jit
    def weigh_row(self, held: cute.Tensor, count: Int32, scale: Float32, largest: Float32, tidx: Int32) -> Uint64:
        """The weight of all logits that this thread looks at."""
        total = Uint64(0)
        for first in cutlass.range(tidx * self.wide, count, self.threads * self.wide, unroll=1):
            x = self.numbers(self.vector(held, first, self.wide))
            for i in cutlass.range_constexpr(self.wide):
                total = total + fast_weight(add(multiply(x[i], scale), -largest))
        return total

    @cute.jit
    def total(self, own: Uint64, shared, lane: Int32, warp: Int32) -> Uint64:
        """The sum of all threads of the cluster."""
        totals = shared[6]
        own = sum_of_warp(own)
        if lane == 0:
            totals[0, warp] = Uint32(own)
            totals[1, warp] = Uint32(own >> Uint64(32))
        self.meet()
        total = Uint64(0)
        for rank in cutlass.range_constexpr(self.cluster):
            low, high = self.read(totals, (0, lane), rank), self.read(totals, (1, lane), rank)
            total = total + ((Uint64(high) << Uint64(32)) | Uint64(low))
        return sum_of_warp(total)

    @cute.jit
    def counts_of_cluster(self, counts: cute.Tensor, lists: cute.Tensor, tidx: Int32) -> cute.Tensor:
        """The counts of all CTAs, where the lists will be.

        Lanes read consecutive words of another CTA: a thread's seven buckets, one after the other, cost 5 us more of
        27.7 (H200, 64x151936, 2 CTAs a row), and 20 us a wave with four.
        """
        if const_expr(self.cluster == 1):
            return counts
        sums = cute.make_tensor(cute.recast_ptr(lists.iterator, dtype=Uint32), cute.make_layout(COUNTS))
        for j in cutlass.range_constexpr(COUNTS // self.threads):
            bucket, number = j * self.threads + tidx, Uint32(0)
            for rank in cutlass.range_constexpr(self.cluster):
                number = number + self.read(counts, bucket, rank)
            sums[bucket] = number
        cute.arch.barrier()
        return sums

    @cute.jit
    def weights_of_buckets(
        self, counts: cute.Tensor, shared, tidx: Int32, is_mass: Int32, scale: Float32, largest: Float32
    ) -> list:
        """What the logits of this thread's buckets weigh at least; the first thread has those of the largest logits."""
        found, weights = shared[4], []
        for j in cutlass.range_constexpr(COUNTS // self.threads):
            bucket, one = COUNTS - 1 - (tidx * (COUNTS // self.threads) + j), Uint64(1)
            number = Uint64(counts[bucket])
            if (is_mass != 0) & (number != Uint64(0)):
                low = self.distance(multiply(lower_end(bucket, self.has_whole_values), scale), largest)
                one = weight(low)
                if const_expr(self.has_whole_values):
                    if is_edge(bucket) != 0:
                        high = self.distance(multiply(upper_end(bucket), scale), largest)
                        if (high != low) & (high > WEIGHTLESS):
                            found[2] = Uint64(1)
            weights.append(number * one)
        return weights

    @cute.jit
    def list_groups(
        self,
        held: cute.Tensor,
        lists: cute.Tensor,
        count: Int32,
        bound: Float32,
        tidx: Int32,
        warp: Int32,
    ) -> Int32:
        """Each warp lists those of its groups with a logit that is not below the bound; returns how many."""
        listed, below = Int32(0), cute.arch.lanemask_lt()
        for turn in cutlass.range(0, count, self.threads * self.wide, unroll=1):
            first = turn + tidx * self.wide
            x = self.numbers(self.vector(held, cutlass.min(first, self.held - self.wide), self.wide))
            for g in cutlass.range_constexpr(self.wide // self.group):
                most = largest_of([x[g * self.group + i] for i in range(self.group)])
                reaches = (first < count) & (choose(most < bound, Int32(0), Int32(1)) != 0)  # NaN alone, too
                those = cute.arch.vote_ballot_sync(reaches)
                if reaches:
                    place = listed + cute.arch.popc(those & below).to(Int32)
                    lists[place, warp] = Uint16(first // self.group + g)
                listed = listed + cute.arch.popc(those).to(Int32)
        cute.arch.sync_warp()
        return listed


def last_bucket(found: cute.Tensor) -> Int32:
    """The bucket of counts that was found; -1: none."""
    return Int32(COUNTS - 1) - Int32(found[0])


def unscaled(bound: Float32, scale: Float32) -> Float32:
    """No logit whose scaled one reaches the bound is below."""
    quotient = multiply(bound, reciprocal(scale))
    below = add_down(quotient, multiply(cute.arch.fmax(quotient, -quotient), -1e-5))
    return add(choose(below == below, add_down(below, -1e-37), Float32(-math.inf)), 0.0)
