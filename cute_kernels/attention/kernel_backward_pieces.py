"""Blocks of keys that attention's backward takes in pieces: dk and dv wait in memory from one piece to the next.

A block's pieces are parts of its tiles of queries. The last blocks handed out are the longest where the mask is causal;
in pieces they are shorter, so fewer CTAs are without a block at the end. dk and dv go on from the same fp32 numbers: no
bit changes. A piece ends as a head of a group does: its sums are stored, and counted. The next one, whose ticket comes
later, waits for that.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import select_

from cute_kernels.attention.kernel_backward_blocks import Block
from cute_kernels.attention.kernel_backward_sums import wait_for
from cute_kernels.attention.kernel_backward_tiles import VECTOR, WARPGROUP
from cute_kernels.attention.kernel_threads import opaque


class BackwardPieces:
    """The part of ``BackwardSm90`` that begins a piece of a block."""

    @cute.jit
    def wait_for_piece(self, block: Block):
        """The warp that loads, before it loads k: until the piece before is in memory, if there is one."""
        if block.before > 0:
            if cute.arch.lane_idx() == 0:
                wait_for(self.counter_of(self.line_of_pieces(block)), block.before)
            cute.arch.sync_warp()

    def resume(self, dk: cute.Tensor, dv: cute.Tensor, dkv_sums: cute.Tensor, block: Block):
        """dk and dv as the piece before has left them, once k is there; from zeros in memory if there is none.

        (Were they to come from either way, ptxas would find too few registers, and have every product waited for.)
        """
        thread, line, resumes = opaque(self.tidx), self.line_of_pieces(block), block.before > 0
        stride = Int64(select_(resumes, Int64(4 * VECTOR * WARPGROUP), Int64(0)))
        for which, total in enumerate((dk, dv)):
            number = (Int64(line) * 2 + which) * (self.block * self.head_size)
            number += thread // WARPGROUP * (cute.size(total) * WARPGROUP) + thread % WARPGROUP * VECTOR
            source = Int64(select_(resumes, (dkv_sums.iterator + number).toint(), self.zeros.toint()))
            vector = cute.make_rmem_tensor((VECTOR,), Float32)
            for i in range(cute.size(total) // VECTOR):
                place = cute.make_ptr(Float32, source + i * stride, cute.AddressSpace.gmem, assumed_align=16)
                cute.autovec_copy(cute.make_tensor(place, cute.make_layout(VECTOR)), vector)
                for e in range(VECTOR):
                    total[i * VECTOR + e] = vector[e]

    def line_of_pieces(self, block: Block) -> Int32:
        """Where in dkv_sums dk and dv of a block wait: behind the sums of groups."""
        return block.place + (opaque(self.num_blocks) * opaque(self.pairs) if self.spec.grouped else Int32(0))
