"""Places of tokens' slots among the experts' rows: a stable counting sort by one CTA, without atomics.

Each of 32 warps has neighbouring slots. It counts them by expert, 32 at a time: lanes that name the same expert find
each other, the first of them adds. The counts of all warps become the places of each warp's first slot of each expert;
a second walk over the slots gives every slot its own.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.moe.config import PlanSpec
from cute_kernels.moe.kernel.warp_rows import WARP, symbolic_list
from jit_cache import Program, compiled

WARPS = 32
AHEAD = 8  # indices of a lane that are on their way at once. With one, too, 8192 x 8 of them take 129 us (H200)
THREADS = WARPS * WARP
ALL = -1  # lanes of a warp


class Plan:
    """See the builder ``plan``."""

    def __init__(self, spec: PlanSpec):
        self.num_experts, self.align = spec.num_experts, spec.align

    @cute.jit
    def __call__(self, indices, offs, slots, positions, counts, stream):
        self.kernel(indices, offs, slots, positions, counts).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, indices, offs, slots, positions, counts):
        experts = const_expr(self.num_experts)
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = tidx % WARP, cute.arch.make_warp_uniform(tidx // WARP)
        smem = SmemAllocator()
        sCounts = smem.allocate_tensor(Int32, cute.make_layout((WARPS, experts), stride=(experts, 1)), 16)
        sEnds = smem.allocate_tensor(Int32, cute.make_layout(WARPS), 16)
        for i in cutlass.range(tidx, WARPS * experts, THREADS, unroll=1):
            sCounts[i // experts, i % experts] = 0
        cute.arch.griddepcontrol_wait()
        total = indices.shape[0]
        each = cute.ceil_div(cute.ceil_div(total, WARPS), WARP) * WARP
        first = warp * each
        last = cutlass.min(first + each, total)
        mine = sCounts[warp, None]
        cute.arch.barrier()
        for base in cutlass.range(first, last, AHEAD * WARP, unroll=1):
            experts_of = [self.expert_of(indices, base + i * WARP + lane, last) for i in range(AHEAD)]
            for i in cutlass.range_constexpr(AHEAD):
                if base + i * WARP < last:
                    self.step(mine, experts_of[i], lane)
        cute.arch.barrier()

        # Slots of an expert in the warps before, then its first row
        count = Int32(0)
        if tidx < experts:
            for w in cutlass.range(WARPS, unroll=4):
                of_warp = sCounts[w, tidx]
                sCounts[w, tidx] = count
                count += of_warp
            counts[tidx] = count
        padded = cute.ceil_div(count, self.align) * self.align
        end = padded
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(end, 1 << i)
            if lane >= 1 << i:
                end = end + other
        if lane == WARP - 1:
            sEnds[warp] = end
        cute.arch.barrier()
        before, all_rows = Int32(0), Int32(0)
        for w in cutlass.range_constexpr(WARPS):
            if w < warp:
                before += sEnds[w]
            all_rows += sEnds[w]
        end += before
        if tidx < experts:
            offs[tidx] = end
            for w in cutlass.range(WARPS, unroll=4):
                sCounts[w, tidx] = sCounts[w, tidx] + end - padded
            for row in cutlass.range(end - padded + count, end):
                slots[row] = -1
        for row in cutlass.range(all_rows + tidx, slots.shape[0], THREADS):
            slots[row] = -1
        cute.arch.barrier()
        for base in cutlass.range(first, last, AHEAD * WARP, unroll=1):
            experts_of = [self.expert_of(indices, base + i * WARP + lane, last) for i in range(AHEAD)]
            for i in cutlass.range_constexpr(AHEAD):
                if base + i * WARP < last:
                    slot, position = base + i * WARP + lane, self.step(mine, experts_of[i], lane)
                    if slot < last:
                        positions[slot] = position
                        if position >= 0:
                            slots[position] = slot

    @cute.jit
    def expert_of(self, indices, slot: Int32, last: Int32) -> Int32:
        """The expert of a slot; num_experts where there is none."""
        expert = Int32(self.num_experts)
        if slot < last:
            expert = indices[slot]
        return expert if expert >= 0 and expert < self.num_experts else Int32(self.num_experts)

    @cute.jit
    def step(self, counts, expert: Int32, lane: Int32) -> Int32:
        """Count the experts of 32 slots; what is counted of a lane's expert before it, -1 of no expert."""
        valid = expert < self.num_experts
        same = cute.arch.match_sync(ALL, expert)
        rank = cute.arch.popc(same & cute.arch.lanemask_lt()).to(Int32)
        found = Int32(-1)
        if valid:
            found = counts[expert] + rank
        cute.arch.sync_warp()
        if valid and rank == 0:
            counts[expert] = found + cute.arch.popc(same).to(Int32)
        cute.arch.sync_warp()
        return found


@compiled
def plan(arch: str, spec: PlanSpec) -> Program:
    """Plan indices (T k,): ends of the experts' rows, the slot of each row (-1: none), the row of each slot, counts."""
    total, rows = cute.sym_int(), cute.sym_int()
    return Program(
        Plan(spec),
        symbolic_list(Int32, total),
        symbolic_list(Int32, spec.num_experts),
        symbolic_list(Int32, rows),
        symbolic_list(Int32, total),
        symbolic_list(Int32, spec.num_experts),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
