"""Threads of a warpgroup: which rows are theirs, what a warp knows of its lanes."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cutlass_dsl import select_

from cute_kernels.attention.kernel_row import QUAD

WARP_SIZE, WARPGROUP = 32, 128


def row_of_thread(thread: Int32) -> Int32:
    """The first of a thread's two rows in its warpgroup; the other one is 8 below."""
    return thread // WARP_SIZE * 16 + thread % WARP_SIZE // QUAD


def opaque(value: Int32) -> Int32:
    """The same, as the compiler does not know it: addresses made of it are not kept in registers all along."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


@cute.jit
def sum_to_lane(value: Int32, lane: Int32):
    """The sum of the values of the lanes up to this one."""
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, offset=2**step, mask_and_clamp=0)
        value += Int32(select_(lane >= 2**step, other, Int32(0)))
    return value
