"""The last key that top_k and top_p keep, of the groups that the warps listed.

An order key has the logit's bits and then its index: no two are equal. Few keys are gathered by each CTA of the cluster
and each compared with all. Of many, digits of the last one's distance from the largest are found from the highest to
the lowest, as many as the bound leaves: a histogram of integer weights in shared memory, which the CTAs read from each
other. Integers add up to the same in any order: those atomics, and the split of a row over CTAs, change no token.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64, const_expr

from cute_kernels.sampling.config import INDEX_BITS, LIMB_BITS, LIMBS
from cute_kernels.sampling.kernel_arithmetic import choose, least_mass, multiply, weight
from cute_kernels.sampling.kernel_rows import WARP_SIZE, SampleRows

# In turn: two histograms, so that one is read from other CTAs while the next is filled. The second one's place is also
# that of the counts by value
DIGIT_BITS = (9, 11)
FEW = 256  # keys, that fit beside the first histogram
SECOND = LIMBS << DIGIT_BITS[0]
LIMB = (1 << LIMB_BITS) - 1


class SampleThreshold(SampleRows):
    """What a source, the lists of a CTA's warps, has within the last key that is kept."""

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
        number, key = self.settle(source, shared, tidx, need, share, top, last, distance, scale, largest)
        if number <= FEW:
            distance, left = key, Int32(0)
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
    def settle(
        self,
        source,
        shared,
        tidx: Int32,
        need: Uint64,
        share,
        top: Uint64,
        last: Uint64,
        distance: Uint64,
        scale: Float32,
        largest: Float32,
    ):
        """What ``descend`` finds, where few keys are left: each is compared with all. How many, and the distance.

        A key and its weight are four words; a CTA's lie where the first histogram is, and those of the cluster behind.
        """
        listed, lane = source[2], source[4]
        found, histogram, numbers = shared[4], shared[5], shared[7]
        place = const_expr(0 if share is None else 1)
        nearest, farthest = value_of(distance), value_of(last)
        for i in cutlass.range(lane, listed, WARP_SIZE, unroll=1):
            x, first = self.listed_group(source, i)
            for j in cutlass.range_constexpr(self.group):
                if value_of(top) - self.value_bits(x[j]) - nearest <= farthest - nearest:
                    behind = top - self.order(x[j], first + j)
                    if (behind >= distance) & (behind <= last) & (numbers[place] <= Uint32(FEW)):
                        at = Int32(
                            cute.arch.atomic_add(numbers.iterator + place, Uint32(1), sem="relaxed", scope="cta")
                        )
                        if at < FEW:
                            one = Uint64(1)
                            if const_expr(share is not None):
                                one = weight(self.distance(multiply(x[j], scale), largest))
                            self.write_pair(histogram, at, behind, one)
        self.meet()
        number = Int32(0)
        rank, index = Int32(0), tidx
        for r in cutlass.range_constexpr(self.cluster):
            of_rank = Int32(self.read(numbers, place, r))
            number = number + of_rank
            if const_expr(r < self.cluster - 1):
                is_beyond = (rank == r) & (index >= of_rank)
                rank, index = choose(is_beyond, Int32(r + 1), rank), choose(is_beyond, index - of_rank, index)
        if number <= FEW:
            if tidx < number:
                for w in cutlass.range_constexpr(4):
                    histogram[SECOND + 4 * tidx + w] = self.read(histogram, 4 * index + w, rank)
            cute.arch.barrier()
            if tidx < number:
                own, weight_ = self.pair(histogram, SECOND // 4 + tidx)
                before, total = Uint64(0), Uint64(0)
                for i in cutlass.range(number, unroll=1):
                    other, one = self.pair(histogram, SECOND // 4 + i)
                    total = total + one
                    before = before + choose(other < own, one, Uint64(0))
                if const_expr(share is not None):
                    if need == Uint64(0):
                        need = least_mass(total, share)
                if (before < need) & (need <= before + weight_):
                    found[0] = own
            cute.arch.barrier()
        return number, found[0]

    def write_pair(self, words: cute.Tensor, place: Int32, key: Uint64, one: Uint64):
        for w, value in enumerate((key, key >> Uint64(32), one, one >> Uint64(32))):
            words[4 * place + w] = Uint32(value)

    def pair(self, words: cute.Tensor, place: Int32):
        low, high, one, more = (Uint64(words[4 * place + w]) for w in range(4))
        return (high << Uint64(32)) | low, (more << Uint64(32)) | one

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
