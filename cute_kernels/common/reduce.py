"""Row sums in a fixed order: warp shuffles, then a team's warps, then the CTAs of a cluster."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.common.row_layout import WARP_SIZE, RowLayout


class RowSum:
    """Sum of one to four fp32 values over the threads of a row; every thread of the row gets the same bits.

    Within a warp by xor shuffles. Across warps each warp publishes its sums to all warps of the row and each thread adds
    them in ascending order of (CTA, warp): through shared memory and the team's named barrier when the row lies in one
    CTA, through ``st.async`` to all CTAs of the cluster and an mbarrier that counts bytes when it does not. Two buffers
    alternate: a warp can only be one round ahead, because a round ends when every warp's message of it has arrived, and
    a warp sends that message after it has read the round before.
    """

    def __init__(self, layout: RowLayout, num_values: int):
        self.layout = layout
        self.num_values = num_values
        self.warps_per_row = layout.warps_per_team * layout.cluster
        self.crosses_warps = self.warps_per_row > 1
        self.crosses_ctas = layout.cluster > 1

    def allocate(self, smem):
        """Shared memory: messages (value, warp, team, buffer) and mbarriers (team, buffer)."""
        if not self.crosses_warps:
            return None, None
        layout = cute.make_layout((self.num_values, self.warps_per_row, self.layout.teams, 2))
        messages = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        mbars = None
        if self.crosses_ctas:
            mbars = smem.allocate_tensor(Int64, cute.make_layout((self.layout.teams, 2)), byte_alignment=8)
        return messages, mbars

    @cute.jit
    def init(self, mbars):
        """Arm the mbarriers; the caller synchronises the cluster afterwards."""
        if const_expr(self.crosses_ctas):
            if cute.arch.thread_idx()[0] == 0:
                for i in cutlass.range_constexpr(2 * self.layout.teams):
                    cute.arch.mbarrier_init(mbars.iterator + i, 1)
            cute.arch.mbarrier_init_fence()

    @cute.jit
    def __call__(self, values, messages, mbars, team: Int32, round_index: Int32):
        """Sums of ``values`` (a tuple of Float32). ``round_index`` counts this team's calls from 0."""
        layout = self.layout
        width = const_expr(min(layout.threads_per_row, WARP_SIZE))
        sums = tuple(cute.arch.warp_reduction(value, operator.add, threads_in_group=width) for value in values)
        if const_expr(self.crosses_warps):
            lane = cute.arch.lane_idx()
            warp = cute.arch.warp_idx() % layout.warps_per_team
            buffer = round_index % 2
            if const_expr(self.crosses_ctas):
                rank = cute.arch.block_idx_in_cluster()
                mbar = mbars.iterator + mbars.layout((team, buffer))
                if warp == 0 and lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(mbar, 4 * self.num_values * self.warps_per_row)
                if lane < layout.cluster:
                    for i in cutlass.range_constexpr(self.num_values):
                        target = messages.iterator + messages.layout(
                            (i, rank * layout.warps_per_team + warp, team, buffer)
                        )
                        cute.arch.store_async_dsmem(target, float_bits(sums[i]), mbar, lane)
                cute.arch.mbarrier_wait(mbar, (round_index // 2) % 2)
            else:
                if lane == 0:
                    for i in cutlass.range_constexpr(self.num_values):
                        messages[i, warp, team, buffer] = sums[i]
                team_barrier(layout, team)
            sums = self._add_messages(messages, team, buffer)
        return sums

    @cute.jit
    def _add_messages(self, messages, team: Int32, buffer: Int32):
        count = const_expr(self.warps_per_row)
        totals = [Float32(0.0)] * self.num_values
        if const_expr(count <= 16):
            gathered = cute.make_rmem_tensor((self.num_values, count), Float32)
            cute.autovec_copy(messages[None, None, team, buffer], gathered)
            for warp in cutlass.range_constexpr(count):
                for i in cutlass.range_constexpr(self.num_values):
                    totals[i] = totals[i] + gathered[i, warp]
        else:
            lane = cute.arch.lane_idx()
            for first in cutlass.range_constexpr(0, count, WARP_SIZE):
                if first + lane < count:
                    for i in cutlass.range_constexpr(self.num_values):
                        totals[i] = totals[i] + messages[i, first + lane, team, buffer]
            totals = [cute.arch.warp_reduction(total, operator.add) for total in totals]
        return tuple(totals)


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
def float_bits(value: Float32) -> Int32:
    """The bits of an fp32 value as a 32-bit integer."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])
