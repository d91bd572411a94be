"""The CuTe kernel of sampling with filters, for SM90 and SM100.

The CTAs of a cluster share a row, and each keeps its part in shared memory: gmem -> registers -> smem, once. top_p, and
a top_k of many, count the logits by value as they come, a bucket for each 16 upper bits of fp32. A bucket of bf16 has
one value: counts times weights are the exact mass. In other dtypes a pass over the row weighs every logit, and counts
give a bound that no logit that is kept is below. For a top_k of few each thread counts its largest logit, which gives
a bound, too. Each warp lists its groups of four logits that reach the bound; all that follows looks at these alone.

An order key has the logit's bits and then its index. Digits of the distance of the last key that is kept from the
largest one are found from the highest to the lowest, and only as many as the bound leaves: a histogram of integer
weights in shared memory, which the CTAs read from each other. Integers add up to the same in any order: those atomics,
and the split of a row over CTAs, change no token.

Profile: ncu --clock-control none -k regex:Sample python -m bench.bench_sampling --filter sample.fwd.64x151936
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32, Uint64, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.common.cache_hints import EVICT_FIRST
from cute_kernels.sampling.config import HELD_BYTES, INDEX_BITS, LIMB_BITS, LIMBS, SampleSpec
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
from cute_kernels.sampling.kernel_rows import LARGEST_FINITE, LAST, WARP_SIZE, SampleRows, largest_of

# In turn: two histograms, so that one is read from other CTAs while the next is filled. The second one is also that of
# counts by value
DIGIT_BITS = (9, 11)
SECOND = LIMBS << DIGIT_BITS[0]
LIMB = (1 << LIMB_BITS) - 1
AHEAD = 5  # vectors that a thread loads at once


class SampleFiltered(SampleRows):
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
                weights = self.weights_of_buckets(counts, shared, tidx, is_mass, scale, largest)
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
        layout = cute.make_layout((self.list_length, self.warps))
        return held, smem.allocate_tensor(Uint16, layout, byte_alignment=16)

    def allocate(self, smem):
        """By warp: values, tokens, largest logits, sums; then what was found, histograms, totals by warp.

        Found: a bucket, what of it is needed, whether logits of one bucket weigh differently.
        """
        values = smem.allocate_tensor(Float32, cute.make_layout(self.warps), byte_alignment=16)
        tokens = smem.allocate_tensor(Int32, cute.make_layout(self.warps), byte_alignment=16)
        largest = smem.allocate_tensor(Float32, cute.make_layout(self.warps), byte_alignment=16)
        sums = smem.allocate_tensor(Uint32, cute.make_layout((2, self.warps)), byte_alignment=16)
        found = smem.allocate_tensor(Uint64, cute.make_layout(3), byte_alignment=16)
        histogram = smem.allocate_tensor(Uint32, cute.make_layout(SECOND + COUNTS), byte_alignment=16)
        totals = smem.allocate_tensor(Uint32, cute.make_layout((2, self.warps)), byte_alignment=16)
        return values, tokens, largest, sums, found, histogram, totals

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
    def weights_of_buckets(
        self, counts: cute.Tensor, shared, tidx: Int32, is_mass: Int32, scale: Float32, largest: Float32
    ) -> list:
        """What the logits of this thread's buckets weigh at least; the first thread has those of the largest logits."""
        found, weights = shared[4], []
        for j in cutlass.range_constexpr(COUNTS // self.threads):
            bucket, number, one = COUNTS - 1 - (tidx * (COUNTS // self.threads) + j), Uint64(0), Uint64(1)
            for rank in cutlass.range(self.cluster, unroll=self.cluster):
                number = number + Uint64(self.read(counts, bucket, rank))
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

    def listed_group(self, source, i: Int32):
        """Logits of a group that the warp listed, in fp32, and the column of the first."""
        held, lists, _, begin, _, warp = source
        first = Int32(lists[i, warp]) * self.group
        return self.ordered(self.vector(held, first, self.group)), begin + first

    @cute.jit
    def descend(
        self,
        source,
        shared,
        tidx: Int32,
        need: Uint64,
        share,
        top: Uint64,
        last: Uint64,
        distance: Uint64,
        left: Int32,
        scale: Float32,
        largest: Float32,
    ) -> Uint64:
        """The least distance from the top within which keys have the weight that is needed.

        A weight is 1; or where there is a ``share``, exp(distance), and where ``need`` is 0, that share of the weight
        of all is needed. Keys farther than ``last`` have none. Its ``left`` lowest bits are to be found.
        """
        listed, lane = source[2], source[4]
        found, histogram = shared[4], shared[5]
        limbs = const_expr(LIMBS if share is not None else 1)
        turn = Int32(0)
        while left > 0:
            bits = choose(turn == 0, Int32(DIGIT_BITS[0]), Int32(DIGIT_BITS[1]))
            begin, stride = choose(turn == 0, Int32(0), Int32(SECOND)), Int32(1) << bits
            for i in cutlass.range(tidx, limbs << bits, self.threads, unroll=1):
                histogram[begin + i] = Uint32(0)
            cute.arch.barrier()
            above, shift = Uint64(left), Uint64(cutlass.max(left - bits, 0))
            end = distance | ((Uint64(1) << above) - Uint64(1))
            nearest, farthest = value_of(distance), value_of(choose(end < last, end, last))
            for i in cutlass.range(lane, listed, WARP_SIZE, unroll=1):
                x, first = self.listed_group(source, i)
                for j in cutlass.range_constexpr(self.group):
                    # 32 bits decide nearly all of those that are not there
                    if value_of(top) - self.value_bits(x[j]) - nearest <= farthest - nearest:
                        behind = top - self.order(x[j], first + j)
                        if ((behind >> above) == (distance >> above)) & (behind <= last):
                            one = Uint64(1)
                            if const_expr(share is not None):
                                one = weight(self.distance(multiply(x[j], scale), largest))
                            bucket = begin + Int32((behind >> shift) & Uint64(stride - 1))
                            for limb in cutlass.range_constexpr(limbs):
                                part = Uint32((one >> Uint64(limb * LIMB_BITS)) & Uint64(LIMB))
                                if part != Uint32(0):
                                    target = histogram.iterator + (bucket + limb * stride)
                                    cute.arch.red(target, part, op="add", dtype="u32", sem="relaxed", scope="cta")
            self.meet()
            own = []
            for j in cutlass.range_constexpr((1 << DIGIT_BITS[1]) // self.threads):
                bucket = tidx * ((1 << DIGIT_BITS[1]) // self.threads) + j
                own.append(self.weight_of(histogram, begin, bucket, stride, limbs))
            need = self.search(own, shared, tidx, need, share)
            distance = distance | (found[0] << shift)
            left, turn = left - bits, turn ^ 1
        return distance

    @cute.jit
    def weight_of(
        self, histogram: cute.Tensor, begin: Int32, bucket: Int32, buckets: Int32, limbs: cutlass.Constexpr[int]
    ) -> Uint64:
        """The weight of a bucket in all CTAs; 0 if there is no such bucket."""
        total = Uint64(0)
        if bucket < buckets:
            for rank in cutlass.range(self.cluster, unroll=self.cluster):
                for limb in cutlass.range_constexpr(limbs):
                    part = Uint64(self.read(histogram, begin + bucket + limb * buckets, rank))
                    total = total + (part << Uint64(limb * LIMB_BITS))
        return total

    @cute.jit
    def search(self, own, shared, tidx: Int32, need: Uint64, share) -> Uint64:
        """Find the bucket in which weights reach ``need``, and what of it is needed: that is returned.

        Each thread has the weights of its buckets, which follow each other in the order of threads. A ``need`` of 0 is
        that share of all.
        """
        sums, found = shared[3], shared[4]
        each, total = const_expr(len(own)), Uint64(0)
        for j in cutlass.range_constexpr(each):
            total = total + own[j]
        lane, warp = tidx % WARP_SIZE, tidx // WARP_SIZE
        before = inclusive(total, lane) - total
        if lane == WARP_SIZE - 1:
            sums[0, warp] = Uint32(before + total)
            sums[1, warp] = Uint32((before + total) >> Uint64(32))
        cute.arch.barrier()
        of_warp = (Uint64(sums[1, lane]) << Uint64(32)) | Uint64(sums[0, lane])
        before = before + sum_of_warp(choose(lane < warp, of_warp, Uint64(0)))
        if const_expr(share is not None):
            if need == Uint64(0):
                need = least_mass(sum_of_warp(of_warp), share)
        for j in cutlass.range_constexpr(each):
            if (before < need) & (need <= before + own[j]):
                found[0] = Uint64(tidx * each + j)
                found[1] = need - before
            before = before + own[j]
        cute.arch.barrier()
        return found[1]


def last_bucket(found: cute.Tensor) -> Int32:
    """The bucket of counts that was found; -1: none."""
    return Int32(COUNTS - 1) - Int32(found[0])


def unscaled(bound: Float32, scale: Float32) -> Float32:
    """No logit whose scaled one reaches the bound is below."""
    quotient = multiply(bound, reciprocal(scale))
    below = add_down(quotient, multiply(cute.arch.fmax(quotient, -quotient), -1e-5))
    return add(choose(below == below, add_down(below, -1e-37), Float32(-math.inf)), 0.0)


def value_of(order: Uint64) -> Uint32:
    """An order key's bits of the logit; of a difference of keys, that of those."""
    return Uint32(order >> Uint64(INDEX_BITS))


def bit_length(value: Uint64) -> Int32:
    high, low = Uint32(value >> Uint64(32)), Uint32(value)
    zeros = [cute.arch.clz(word).to(Int32) for word in (high, low)]
    return choose(high != Uint32(0), Int32(64) - zeros[0], Int32(32) - zeros[1])


@cute.jit
def sum_of_warp(value: Uint64) -> Uint64:
    for step in cutlass.range_constexpr(5):
        low = cute.arch.shuffle_sync_bfly(Uint32(value), offset=1 << step)
        high = cute.arch.shuffle_sync_bfly(Uint32(value >> Uint64(32)), offset=1 << step)
        value = value + ((Uint64(high) << Uint64(32)) | Uint64(low))
    return value


@cute.jit
def inclusive(value: Uint64, lane: Int32) -> Uint64:
    """The sum of a warp's values up to this lane's."""
    for step in cutlass.range_constexpr(5):
        low = cute.arch.shuffle_sync_up(Uint32(value), offset=1 << step, mask_and_clamp=0)
        high = cute.arch.shuffle_sync_up(Uint32(value >> Uint64(32)), offset=1 << step, mask_and_clamp=0)
        other = (Uint64(high) << Uint64(32)) | Uint64(low)
        value = value + choose(lane >= (1 << step), other, Uint64(0))
    return value
