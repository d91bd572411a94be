"""Sums of attention's backward in global memory, added in a fixed order: dq, and dk and dv of a group's heads.

A counter says how many parts have been added to a sum. A thread that adds waits until that is its own turn, adds, waits
until the sum is in memory, and counts.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.attention.kernel_backward_blocks import Block
from cute_kernels.attention.kernel_backward_tiles import COMPUTE, VECTOR, WARP_SIZE, WARPGROUP, WARPGROUPS
from cute_kernels.attention.kernel_threads import opaque


class BackwardSums:
    """The part of ``BackwardSm90`` that adds: threads of the producer's warpgroup, and the end of a block."""

    @cute.jit
    def add_dq(self, dq_sums: cute.Tensor, adder: Int32):
        """Partials of dq into their sums, each in its turn, by the parts that shared memory has room for.

        Adders take a CTA's partials in turn: while one waits for its sum to be in memory, the next one waits for its
        turn. A partial's buffer is free when it has been read.
        """
        adders, parts, numbers = const_expr((self.adders, self.dq_parts, self.dq_numbers // self.dq_parts))
        count, turn = Int32(0), Int32(0)
        ticket = self.read_ticket(turn, True)
        while ticket < self.tickets:
            block = Block(*self.block_of(ticket))
            first_tile = self.queries.first_tile(block.sequence, self.tile_rows)
            first = block.first + (count * (adders - 1) + adder) % adders  # (adder - count), not negative
            for m in cutlass.range(first, block.end, adders, unroll=1):
                line = (first_tile + m) * self.heads + block.head
                counter = self.counters + (1 + line)
                before = self.turn_of(block, m)
                wait_for(counter, before)
                target = dq_sums.iterator + Int64(line) * (WARPGROUPS * self.dq_numbers)
                use = (count + m - block.first) // adders
                for part in cutlass.range_constexpr(parts):
                    phase = (use * parts + part) % 2
                    for wg in cutlass.range_constexpr(WARPGROUPS):
                        slot = adder * WARPGROUPS + wg
                        cute.arch.mbarrier_wait(self.dq_full + slot, phase)
                        buffer = slot
                        if const_expr(self.dq_buffers != adders):
                            buffer = (count + m - block.first) % self.dq_buffers * WARPGROUPS + wg
                        source = self.sDq[None, 0, 0, buffer].iterator
                        place = const_expr(wg * self.dq_numbers + part * numbers)
                        if before == 0:
                            bulk_store(target + place, source, 4 * numbers)
                        else:
                            bulk_add(target + place, source, 4 * numbers)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    for wg in cutlass.range_constexpr(WARPGROUPS):
                        cute.arch.mbarrier_arrive(self.dq_empty + (adder * WARPGROUPS + wg))
                cute.arch.cp_async_bulk_wait_group(0)
                cute.arch.fence_proxy("async")
                count_one(counter)
            count += block.end - block.first
            turn += 1
            ticket = self.read_ticket(turn, True)

    @cute.jit
    def add_head(self, dk: cute.Tensor, dv: cute.Tensor, dkv_sums: cute.Tensor, line: Int32, member: Int32):
        """This head's sums added to those of the group's heads before, in memory. They go by way of k's and v's place,
        one after the other; dv by that of ds, at the same time, if it has room. Its next ds comes behind the next k.
        """
        counter = self.counters + (1 + self.num_tiles * self.heads + line)
        most = const_expr(self.block * self.head_size)
        turns = const_expr(((0, 1),) if self.dv_in_ds else ((0,), (1,)))
        for turn in cutlass.range_constexpr(len(turns)):
            for which in turns[turn]:
                self.stage_sums((dk, dv)[which], self.staged_sums(which))
            cute.arch.fence_proxy("async.shared", space="cta")
            self.meet()
            if const_expr(turn == 0):
                if (self.tidx < WARP_SIZE) & (member != 0):
                    wait_as_warp(counter, member)
            if self.tidx == 0:
                for which in turns[turn]:
                    target = dkv_sums.iterator + (Int64(line) * 2 + which) * most
                    source = self.staged_sums(which)[None, 0, 0, 0].iterator
                    num_bytes = const_expr(4 * self.block * (self.head_size, self.head_size_v)[which])
                    if member == 0:
                        bulk_store(target, source, num_bytes)
                    else:
                        bulk_add(target, source, num_bytes)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            if const_expr(turn + 1 < len(turns)):
                self.meet()
        if self.tidx == 0:
            cute.arch.mbarrier_arrive(self.kv_empty)
            cute.arch.cp_async_bulk_wait_group(0)
            cute.arch.fence_proxy("async")
            count_one(counter)

    def staged_sums(self, which: int) -> cute.Tensor:
        """Where a block's dk or dv, in fp32, waits for its way to memory: a thread's vectors of each warpgroup."""
        numbers = self.block * (self.head_size, self.head_size_v)[which]
        layout = cute.make_layout(
            (VECTOR, WARPGROUP, numbers // (VECTOR * COMPUTE), WARPGROUPS),
            stride=(1, VECTOR, VECTOR * WARPGROUP, numbers // WARPGROUPS),
        )
        place = self.sDs if which == 1 and self.dv_in_ds else self.sK
        return cute.make_tensor(cute.recast_ptr(place.iterator, cute.make_swizzle(0, 4, 3), Float32), layout)

    def stage_sums(self, total: cute.Tensor, staged: cute.Tensor):
        vector, thread = cute.make_rmem_tensor((VECTOR,), Float32), opaque(self.tidx) % WARPGROUP
        for i in range(cute.size(total) // VECTOR):
            for e in range(VECTOR):
                vector[e] = total[i * VECTOR + e]
            cute.autovec_copy(vector, staged[None, thread, i, self.wg])


@cute.jit
def wait_for(counter: cute.Pointer, value: Int32):
    """Until a counter has a value. Then all that was written before it was counted may be read, and added to.

    By a warp's only thread: see ``wait_as_warp``.
    """
    found = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    while found != value:
        found = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async")


@cute.jit
def wait_as_warp(counter: cute.Pointer, value: Int32):
    """``wait_for`` by all lanes of a warp that has more to do.

    Were one lane to poll, its loop would yield (YIELD in SASS). The other lanes then seem to go on from the place where
    they meet it (BSYNC), and all use that place's register again further on: the warp never comes together, and hangs
    (bench/experiments/attention.md).
    """
    found = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    while cute.arch.vote_any_sync(found != value):
        found = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async")


def count_one(counter: cute.Pointer):
    """Increment ``counter`` with release: whoever acquires it sees all that this thread has written before."""
    cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


def bulk_store(target: cute.Pointer, source: cute.Pointer, num_bytes: int):
    """Start copying contiguous bytes from shared to global memory."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), Int32(source.toint()), Int32(num_bytes)],
    )


def bulk_add(target: cute.Pointer, source: cute.Pointer, num_bytes: int):
    """Start adding contiguous fp32 numbers of shared memory to those of global memory; subnormal ones count as 0."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), Int32(source.toint()), Int32(num_bytes)],
    )
