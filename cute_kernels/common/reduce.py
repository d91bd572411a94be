"""Row sums in a fixed order: warp shuffles, then a team's warps, then the CTAs of a cluster."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.common.row_layout import WARP_SIZE, RowLayout


class RowSum:
    """Sums, or mean and spread, over the threads of a row; every thread of the row gets the same bits.

    Within a warp by xor shuffles. Across warps each warp publishes its values to all warps of the row and each thread
    combines them in ascending order of (CTA, warp). Where the row lies in one CTA that goes through shared memory and
    the team's barrier, else through ``st.async`` to all CTAs of the cluster and an mbarrier that counts bytes. Two
    buffers alternate: a warp can only be one round ahead, because a round ends when every warp's message of it has
    arrived, and a warp sends that message after it has read the round before. A CTA may end after its last round: all
    that its neighbours send it has arrived by then.

    ``max_values``: the most values that one round carries. ``round_index`` counts a team's rounds from 0.
    """

    def __init__(self, layout: RowLayout, max_values: int):
        self.layout = layout
        self.max_values = max_values
        self.width = min(layout.threads_per_row, WARP_SIZE)
        self.warps_per_row = layout.warps_per_team * layout.cluster

    def allocate(self, smem):
        """Shared memory: messages (value, warp, team, buffer) and mbarriers (team, buffer)."""
        messages = mbars = None
        if self.warps_per_row > 1:
            shape = (self.max_values, self.warps_per_row, self.layout.teams, 2)
            messages = smem.allocate_tensor(Float32, cute.make_layout(shape), byte_alignment=16)
        if self.layout.cluster > 1:
            mbars = smem.allocate_tensor(Int64, cute.make_layout((self.layout.teams, 2)), byte_alignment=8)
        return messages, mbars

    @cute.jit
    def init(self, mbars):
        """Arm the mbarriers; the caller synchronises the cluster afterwards."""
        if const_expr(self.layout.cluster > 1):
            if cute.arch.thread_idx()[0] == 0:
                for i in cutlass.range_constexpr(2 * self.layout.teams):
                    cute.arch.mbarrier_init(mbars.iterator + i, 1)
            cute.arch.mbarrier_init_fence()

    @cute.jit
    def sum(self, values, messages, mbars, team: Int32, round_index: Int32):
        """Sums of ``values``, a tuple of fp32 values of this thread."""
        totals = self.within_warp(values)
        if const_expr(self.warps_per_row > 1):
            self.send(totals, messages, mbars, team, round_index)
            return self.receive(len(values), messages, mbars, team, round_index)
        return tuple(totals)

    @cute.jit
    def within_warp(self, values):
        """Sums of ``values`` over a warp, or over the threads of a row that is shorter."""
        return [cute.arch.warp_reduction(value, operator.add, threads_in_group=self.width) for value in values]

    @cute.jit
    def receive(self, num_values: cutlass.Constexpr[int], messages, mbars, team: Int32, round_index: Int32):
        """Sums of what the row's warps sent."""
        self.wait(mbars, team, round_index)
        gathered = self._gather(num_values, messages, team, round_index)
        return tuple([self._add([gathered[i, w] for w in range(self._gathered())]) for i in range(num_values)])

    @cute.jit
    def moments(
        self, mean: Float32, spread: Float32, count: cutlass.Constexpr[int], messages, mbars, team, round_index
    ):
        """Mean, and sum of squared distances from it, of a row whose threads each hold them for ``count`` elements.

        Two parts of k elements combine to the mean of their means and
        spread_a + spread_b + (mean_a - mean_b)^2 k/2 (Chan, Golub and LeVeque, Updating formulae and a pairwise
        algorithm for computing sample variances, 1979): as accurate as centring in a second round, in one.
        """
        for step in cutlass.range_constexpr(self.width.bit_length() - 1):
            other_mean = cute.arch.shuffle_sync_bfly(mean, offset=1 << step)
            other_spread = cute.arch.shuffle_sync_bfly(spread, offset=1 << step)
            distance = other_mean - mean
            mean = (mean + other_mean) * 0.5
            spread = (spread + other_spread) + distance * distance * (0.5 * (count << step))
        if const_expr(self.warps_per_row > 1):
            self._exchange([mean, spread], messages, mbars, team, round_index)
            gathered = self._gather(2, messages, team, round_index)
            warps = const_expr(range(self._gathered()))
            mean = self._add([gathered[0, w] for w in warps]) * (1.0 / self.warps_per_row)
            distances = [gathered[0, w] - mean for w in warps]
            if const_expr(self.warps_per_row > 16):
                lane = cute.arch.lane_idx()
                distances = [
                    d * Float32(w * WARP_SIZE + lane < self.warps_per_row)
                    for w, d in zip(warps, distances, strict=True)
                ]
            weight = const_expr(1.0 * count * WARP_SIZE)
            spread = self._add([gathered[1, w] + d * d * weight for w, d in zip(warps, distances, strict=True)])
        return mean, spread

    @cute.jit
    def largest(self, value: Float32, messages, mbars, team: Int32, round_index: Int32):
        """The largest of the threads' values; NaN is none."""
        value = cute.arch.warp_reduction(value, cute.arch.fmax, threads_in_group=self.width)
        if const_expr(self.warps_per_row > 1):
            self._exchange([value], messages, mbars, team, round_index)
            gathered = self._gather(1, messages, team, round_index, (value,))
            for w in cutlass.range_constexpr(self._gathered()):
                value = cute.arch.fmax(value, gathered[0, w])
            if const_expr(self.warps_per_row > 16):
                value = cute.arch.warp_reduction(value, cute.arch.fmax)
        return value

    @cute.jit
    def scaled_sum(self, largest: Float32, total: Float32, messages, mbars, team, round_index):
        """(largest, total) of a row whose threads each hold theirs, total a sum of exp(v - largest).

        Sums are brought to the larger of two maxima by exp(largest - larger), a warp's first, then a row's.
        """
        largest, total = self.scaled_within_warp(largest, total)
        if const_expr(self.warps_per_row > 1):
            self.send([largest, total], messages, mbars, team, round_index)
            self.wait(mbars, team, round_index)
            return self.scaled_of_warps(messages, team, round_index)
        return largest, total

    @cute.jit
    def scaled_within_warp(self, largest: Float32, total: Float32):
        """The first half of ``scaled_sum``, of a warp."""
        widest = cute.arch.warp_reduction(largest, cute.arch.fmax, threads_in_group=self.width)
        total = rounded_product(total, cute.math.exp(largest - widest))
        return widest, cute.arch.warp_reduction(total, operator.add, threads_in_group=self.width)

    @cute.jit
    def scaled_of_warps(self, messages, team, round_index):
        """The second half, of what the row's warps sent."""
        gathered = self._gather(2, messages, team, round_index, (-Float32.inf, 0.0))
        warps = const_expr(range(self._gathered()))
        widest = gathered[0, 0]
        for w in warps[1:]:
            widest = cute.arch.fmax(widest, gathered[0, w])
        if const_expr(self.warps_per_row > 16):
            widest = cute.arch.warp_reduction(widest, cute.arch.fmax)
        factors = [(gathered[1, w], cute.math.exp(gathered[0, w] - widest)) for w in warps]
        # With 17 to 32 warps a lane has one product, which others add, too
        total = rounded_product(*factors[0]) if const_expr(len(factors) == 1) else sum_of_products(factors)
        return widest, self._add([total])

    @cute.jit
    def _exchange(self, values, messages, mbars, team: Int32, round_index: Int32):
        """Publish a warp's values to the row's warps and wait for theirs."""
        self.send(values, messages, mbars, team, round_index)
        self.wait(mbars, team, round_index)

    @cute.jit
    def send(self, values, messages, mbars, team: Int32, round_index: Int32):
        """Publish a warp's values to the row's warps."""
        layout = self.layout
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx() % layout.warps_per_team
        buffer = round_index % 2
        if const_expr(layout.cluster > 1):
            rank = cute.arch.block_idx_in_cluster()
            mbar = mbars.iterator + mbars.layout((team, buffer))
            if warp == 0 and lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(mbar, 4 * len(values) * self.warps_per_row)
            if lane < layout.cluster:
                for i in cutlass.range_constexpr(len(values)):
                    target = messages.layout((i, rank * layout.warps_per_team + warp, team, buffer))
                    cute.arch.store_async_dsmem(messages.iterator + target, float_bits(values[i]), mbar, lane)
        elif lane == 0:
            for i in cutlass.range_constexpr(len(values)):
                messages[i, warp, team, buffer] = values[i]

    @cute.jit
    def wait(self, mbars, team: Int32, round_index: Int32):
        """Until all warps of the row have sent; a thread sends in the next round after it has read this one."""
        if const_expr(self.layout.cluster > 1):
            mbar = mbars.iterator + mbars.layout((team, round_index % 2))
            cute.arch.mbarrier_wait(mbar, (round_index // 2) % 2)
        else:
            team_barrier(self.layout, team)

    def _gathered(self) -> int:
        """Warps' messages that one thread reads: all of few, every 32nd of many."""
        return self.warps_per_row if self.warps_per_row <= 16 else -(-self.warps_per_row // WARP_SIZE)

    @cute.jit
    def _gather(self, num_values: cutlass.Constexpr[int], messages, team: Int32, round_index: Int32, absent=(0.0, 0.0)):
        """Messages (value, warp) of a round that this thread combines; ``absent``: of a warp that is not there."""
        buffer = round_index % 2
        gathered = cute.make_rmem_tensor((self.max_values, self._gathered()), Float32)
        if const_expr(self.warps_per_row <= 16):
            cute.autovec_copy(messages[None, None, team, buffer], gathered)
        else:
            lane = cute.arch.lane_idx()
            for w in cutlass.range_constexpr(self._gathered()):
                for i in cutlass.range_constexpr(num_values):
                    gathered[i, w] = Float32(absent[i])
                    if w * WARP_SIZE + lane < self.warps_per_row:
                        gathered[i, w] = messages[i, w * WARP_SIZE + lane, team, buffer]
        return gathered

    @cute.jit
    def _add(self, values):
        """Sum of gathered values over the row's warps, in order."""
        total = values[0]
        for value in values[1:]:
            total = total + value
        if const_expr(self.warps_per_row > 16):
            total = cute.arch.warp_reduction(total, operator.add)
        return total


@cute.jit
def team_barrier(layout: cutlass.Constexpr, team: Int32):
    """All threads of a team meet."""
    if const_expr(layout.team_threads == WARP_SIZE):
        cute.arch.sync_warp()
    elif const_expr(layout.teams == 1):
        cute.arch.barrier()
    else:
        cute.arch.barrier(barrier_id=team + 1, number_of_threads=layout.team_threads)


@cute.jit
def rounded_product(a: Float32, b: Float32) -> Float32:
    """a b, which no sum that it goes into is fused with: lanes that add each other's products would get other bits."""
    return cute.arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def sum_of_products(factors: list):
    """Sum of a b over pairs of values or of vectors, in order, fused by name.

    Of two products that meet in a sum the compiler would choose which to round, by what is around. Of the first two it
    is the second.
    """
    (a, b), *others = factors
    if not others:
        return a * b
    (c, d), *others = others
    total = cute.math.fma(a, b, c * d)
    for a, b in others:
        total = cute.math.fma(a, b, total)
    return total


@cute.jit
def float_bits(value: Float32) -> Int32:
    """The bits of an fp32 value as a 32-bit integer."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])
