"""Places of tokens' slots among the experts' rows: a stable counting sort of integers.

A CTA has a block of neighbouring slots, each of its 32 warps a part of it:

    count   indices --> counts of a block by expert --> a row of the table      (where there are several blocks)
    kernel  table --> rows of each expert, and of those in blocks before; counts of the warps --> each warp's first row
            indices, 32 at a time --> rank among equals by ballots --> positions, slots

The first kernel of a plan also clears its slots. Counters in shared memory are added to atomically where their order
does not matter, and in the order of slots where it does. Between both kernels nothing waits: the second begins when the
first has ended.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.moe.config import PLAN_THREADS, WARP, PlanSpec
from cute_kernels.moe.kernel.warp_rows import symbolic_list, symbolic_table
from jit_cache import Program, compiled

WARPS = PLAN_THREADS // WARP
AHEAD = 4  # indices of a lane that are on their way at once
BLOCKS_AHEAD = 16  # counts of a thread that are
ALL = -1  # lanes of a warp


class Plan:
    """See the builder ``plan``."""

    def __init__(self, spec: PlanSpec):
        self.num_experts, self.align, self.has_table = spec
        self.id_bits = spec.num_experts.bit_length()  # of num_experts, too: no expert
        self.parts = min(WARP, PLAN_THREADS // spec.num_experts)  # threads that sum an expert's counts of blocks

    @cute.jit
    def __call__(self, indices, table, offs, slots, positions, counts, of_warp: Int32, stream):
        num_ctas = Int32(1)
        if const_expr(self.has_table):
            num_ctas = table.shape[0]
            self.count(indices, table, slots, of_warp).launch(
                grid=[num_ctas, 1, 1], block=[PLAN_THREADS, 1, 1], stream=stream, use_pdl=True
            )
        self.kernel(indices, table, offs, slots, positions, counts, of_warp).launch(
            grid=[num_ctas, 1, 1], block=[PLAN_THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def count(self, indices, table, slots, of_warp: Int32):
        experts = const_expr(self.num_experts)
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        sCounts = SmemAllocator().allocate_tensor(Int32, cute.make_layout(experts), 16)
        for e in cutlass.range(tidx, experts, PLAN_THREADS, unroll=1):
            sCounts[e] = 0
        cute.arch.griddepcontrol_launch_dependents()  # CTAs that can only wait beside these
        cute.arch.griddepcontrol_wait()
        self.clear(slots)
        cute.arch.barrier()
        self.add_counts(sCounts, indices, of_warp)
        cute.arch.barrier()
        for e in cutlass.range(tidx, experts, PLAN_THREADS, unroll=1):
            table[block, e] = sCounts[e]

    @cute.kernel
    def kernel(self, indices, table, offs, slots, positions, counts, of_warp: Int32):
        experts = const_expr(self.num_experts)
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane, warp = tidx % WARP, cute.arch.make_warp_uniform(tidx // WARP)
        smem = SmemAllocator()
        sCounts = smem.allocate_tensor(Int32, cute.make_layout((WARPS, experts), stride=(experts, 1)), 16)
        sEnds = smem.allocate_tensor(Int32, cute.make_layout(WARPS), 16)
        sTable = None
        if const_expr(self.has_table):
            sTable = smem.allocate_tensor(
                Int32, cute.make_layout((2, self.parts, experts), stride=(self.parts * experts, experts, 1)), 16
            )
        for i in cutlass.range(tidx, WARPS * experts, PLAN_THREADS, unroll=1):
            sCounts[i // experts, i % experts] = 0
        cute.arch.griddepcontrol_wait()
        if const_expr(not self.has_table):
            self.clear(slots)
        mine = sCounts[warp, None]
        cute.arch.barrier()
        self.add_counts(mine, indices, of_warp)
        if const_expr(self.has_table):
            self.sum_blocks(sTable, table, block, tidx)
        cute.arch.barrier()

        # Slots of an expert, of all and of the blocks before; then the end of its rows
        count, before = Int32(0), Int32(0)
        if tidx < experts:
            if const_expr(self.has_table):
                for part in cutlass.range_constexpr(self.parts):
                    before += sTable[0, part, tidx]
                    count += sTable[1, part, tidx]
            else:
                for w in cutlass.range_constexpr(WARPS):
                    count += sCounts[w, tidx]
        padded = cute.ceil_div(count, self.align) * self.align
        end = padded
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(end, 1 << i)
            if lane >= 1 << i:
                end = end + other
        if lane == WARP - 1:
            sEnds[warp] = end
        cute.arch.barrier()
        end += cute.arch.warp_redux_sync(sEnds[lane] if lane < warp else Int32(0), "add")
        if tidx < experts:
            row = end - padded + before
            of_warps = [sCounts[w, tidx] for w in range(WARPS)]
            for w in cutlass.range_constexpr(WARPS):
                sCounts[w, tidx] = row
                row += of_warps[w]
            if tidx % blocks == block:
                offs[tidx] = end
                counts[tidx] = count
        cute.arch.barrier()

        first, last = self.slots_of_warp(indices, of_warp)
        for base in cutlass.range(first, last, AHEAD * WARP, unroll=1):
            experts_of = [self.expert_of(indices, base + i * WARP + lane, last) for i in range(AHEAD)]
            for i in cutlass.range_constexpr(AHEAD):
                if base + i * WARP < last:
                    slot, position = base + i * WARP + lane, self.next_row(mine, experts_of[i], lane)
                    if slot < last:
                        positions[slot] = position
                        if position >= 0:
                            slots[position] = slot

    @cute.jit
    def clear(self, slots):
        """Give no row a slot, before some rows get one: neighbours in one store, as rows behind groups are not."""
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        for row in cutlass.range(block * PLAN_THREADS + tidx, slots.shape[0], blocks * PLAN_THREADS, unroll=4):
            slots[row] = -1

    @cute.jit
    def slots_of_warp(self, indices, of_warp: Int32):
        """(first slot of this warp, its end)."""
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first = (block * WARPS + cute.arch.make_warp_uniform(tidx // WARP)) * of_warp
        return first, cutlass.min(first + of_warp, indices.shape[0])

    @cute.jit
    def expert_of(self, indices, slot: Int32, last: Int32) -> Int32:
        """The expert of a slot; num_experts where there is none."""
        expert = Int32(self.num_experts)
        if slot < last:
            expert = indices[slot]
        return expert if expert >= 0 and expert < self.num_experts else Int32(self.num_experts)

    @cute.jit
    def add_counts(self, counts, indices, of_warp: Int32):
        """Count this warp's slots by expert."""
        lane = cute.arch.thread_idx()[0] % WARP
        first, last = self.slots_of_warp(indices, of_warp)
        for base in cutlass.range(first, last, AHEAD * WARP, unroll=1):
            experts_of = [self.expert_of(indices, base + i * WARP + lane, last) for i in range(AHEAD)]
            for i in cutlass.range_constexpr(AHEAD):
                if experts_of[i] < self.num_experts:
                    cute.arch.atomic_add(counts.iterator + counts.layout(experts_of[i]), Int32(1))

    @cute.jit
    def sum_blocks(self, sTable, table, block: Int32, tidx: Int32):
        """The counts of each expert in blocks before this one, and in all; a thread takes a part of the blocks."""
        part, expert = tidx // self.num_experts, tidx % self.num_experts
        if part < self.parts:
            before, total = Int32(0), Int32(0)
            for base in cutlass.range(part, table.shape[0], BLOCKS_AHEAD * self.parts, unroll=1):
                places = [base + i * self.parts for i in range(BLOCKS_AHEAD)]
                found = [table[b, expert] if b < table.shape[0] else Int32(0) for b in places]
                for i in cutlass.range_constexpr(BLOCKS_AHEAD):
                    total += found[i]
                    before += found[i] if places[i] < block else Int32(0)
            sTable[0, part, expert] = before
            sTable[1, part, expert] = total

    @cute.jit
    def next_row(self, rows, expert: Int32, lane: Int32) -> Int32:
        """The row of a lane's slot, -1 of no expert; ``rows``, which has each expert's next one, moves on."""
        same = Int32(ALL)
        for i in cutlass.range_constexpr(self.id_bits):
            bit = (expert >> i) & 1
            same = same & (cute.arch.vote_ballot_sync(bit == 1) ^ (bit - 1))
        rank = cute.arch.popc(same & cute.arch.lanemask_lt()).to(Int32)
        found = Int32(-1)
        if expert < self.num_experts:
            found = rows[expert] + rank
        cute.arch.sync_warp()
        if expert < self.num_experts and rank == 0:
            rows[expert] = found + cute.arch.popc(same).to(Int32)
        cute.arch.sync_warp()
        return found


@compiled
def plan(arch: str, spec: PlanSpec) -> Program:
    """Plan indices (T k,): ends of the experts' rows, the slot of each row (-1: none), the row of each slot, counts.

    The table (blocks, E), where there are several blocks, is a workspace; a warp has ``of_warp`` slots.
    """
    total, rows = cute.sym_int(), cute.sym_int()
    return Program(
        Plan(spec),
        symbolic_list(Int32, total),
        symbolic_table(Int32, cute.sym_int(), spec.num_experts) if spec.has_table else None,
        symbolic_list(Int32, spec.num_experts),
        symbolic_list(Int32, rows),
        symbolic_list(Int32, total),
        symbolic_list(Int32, spec.num_experts),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
