"""The products of a warpgroup on SM90, for the forward and for a cache: 64 rows of queries and a block of keys.

    scores = q k^T, from zero                     q and k from shared memory
    O += p v                                      p from registers, v from shared memory

Each is ``serial_k16``: steps of 16, ascending. A row's bits depend on no other row of its warpgroup.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_kernels.attention.config import WARPGROUP_ROWS
from cute_kernels.attention.kernel_row import ROWS, per_row, rescale_element, reset, row_of, softmax_step


class Products:
    """A part of a kernel, with ``dtype``, ``head_size``, ``block`` (keys), ``sQ``, ``sK``, ``sV``, ``score_scale``."""

    thread_rows = ROWS  # rows of a thread that exist
    q_steps = 0  # steps of 16 channels of q that are in registers

    def tiled_mma(self, columns: int, of_values: bool, in_registers: bool = False) -> cute.TiledMma:
        """Q and K lie along the head size in shared memory, or Q in registers; P is in registers, V lies across."""
        return sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN if of_values else OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            tiler_mn=(WARPGROUP_ROWS, columns),
            a_source=warpgroup.OperandSource.RMEM if of_values or in_registers else warpgroup.OperandSource.SMEM,
        )

    def set_up(self, qk_mma: cute.TiledMma, pv_mma: cute.TiledMma, channels: int) -> tuple:
        """((O, p), (m, l, what O is rescaled with)) of a thread; ``channels``: of O."""
        qk_slice, pv_slice = qk_mma.get_slice(0), pv_mma.get_slice(0)
        self.tCrQ = qk_mma.make_fragment_A(qk_slice.partition_A(self.sQ))
        self.tCrK = qk_mma.make_fragment_B(qk_slice.partition_B(self.sK))
        self.tCrV = pv_mma.make_fragment_B(pv_slice.partition_B(self.sV))
        # Atoms whose products start from zero, or are added
        self.qk_first, self.qk_next, self.pv_next = (cute.make_mma_atom(m.op) for m in (qk_mma, qk_mma, pv_mma))
        self.qk_first.set(warpgroup.Field.ACCUMULATE, False)
        self.qk_next.set(warpgroup.Field.ACCUMULATE, True)
        self.pv_next.set(warpgroup.Field.ACCUMULATE, True)
        if self.q_steps:
            mma = self.tiled_mma(self.block, False, in_registers=True)
            self.rq_first, self.rq_next = (cute.make_mma_atom(mma.op) for _ in range(2))
            self.rq_first.set(warpgroup.Field.ACCUMULATE, False)
            self.rq_next.set(warpgroup.Field.ACCUMULATE, True)
            self.rQ = mma.make_fragment_A(mma.partition_shape_A((WARPGROUP_ROWS, 16 * self.q_steps)))
        self.scores_shape = qk_mma.partition_shape_C((WARPGROUP_ROWS, self.block))
        output = cute.make_rmem_tensor(pv_mma.partition_shape_C((WARPGROUP_ROWS, channels)), Float32)
        weights = pv_mma.make_fragment_A(pv_mma.partition_shape_A((WARPGROUP_ROWS, self.block)))
        return (output, weights), tuple(per_row() for _ in range(3))

    def score(self, scores: cute.Tensor, slot: Int32, *wg: Int32):
        """Issue q k^T of a block: ``serial_k16`` from zero; ``wg``: which rows of ``sQ``, where it has several."""
        for k16 in range((self.head_size + 15) // 16):
            if k16 < self.q_steps:
                atom, q = self.rq_next if k16 else self.rq_first, self.rQ[None, None, k16]
            else:
                atom, q = self.qk_next if k16 else self.qk_first, self.tCrQ[(None, None, k16, *wg)]
            cute.gemm(atom, scores, q, self.tCrK[None, None, k16, slot], scores)
        warpgroup.commit_group()

    @cute.jit
    def read_queries(self, wg: Int32, thread: Int32):
        """The first steps of q, of one of the warpgroups of ``sQ``, into registers."""
        atom = cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_A(atom, self.tiled_mma(self.block, False, in_registers=True))
        rows = cute.local_tile(self.sQ[None, None, wg], (WARPGROUP_ROWS, 16 * self.q_steps), (0, 0))
        cute.copy(copy, copy.get_slice(thread).partition_S(rows), copy.retile(self.rQ))

    def add_values(self, tensors: tuple, slot: Int32):
        """Issue O += p v of a block: ``serial_k16`` onto O."""
        output, weights = tensors
        for k16 in range(self.block // 16):
            cute.gemm(self.pv_next, output, weights[None, None, k16], self.tCrV[None, None, k16, slot], output)
        warpgroup.commit_group()

    def round_weights(self, scores: cute.Tensor, weights: cute.Tensor):
        """p as the first operand of a product; the accumulators' elements are in its order."""
        flat = cute.make_tensor(weights.iterator, cute.make_layout(cute.size(scores)))
        flat.store(cute.make_tensor(scores.iterator, cute.make_layout(cute.size(scores))).load().to(self.dtype))

    def weigh_first(self, tensors: tuple, state: tuple, scores: cute.Tensor):
        """p of the first block of a row's split."""
        output, weights = tensors
        reset(state[0], state[1])
        softmax_step(scores, state[0], state[1], state[2], self.score_scale, self.thread_rows)
        self.round_weights(scores, weights)
        output.fill(0.0)

    @cute.jit
    def weigh(self, tensors: tuple, state: tuple, scores: cute.Tensor):
        """p of a block; O, whose product with the block before is waited for, is rescaled where a maximum moves."""
        output, _ = tensors
        maximum, total, rescale = state
        moved = softmax_step(scores, maximum, total, rescale, self.score_scale, self.thread_rows)
        # The exponentials stay before the wait for O only if a branch is between them: ptxas moves them behind it. The
        # wait is not in the branch, which a warp may take alone: all of a warpgroup execute the same one
        for _ in cutlass.range(Int32(-self.score_scale), unroll=1):  # not once, which the compiler does not know
            cute.arch.sync_warp()
        warpgroup.wait_group(0)
        if cute.arch.vote_any_sync(moved):
            for i in cutlass.range_constexpr(cute.size(output)):
                if cutlass.const_expr(row_of(i) < self.thread_rows):
                    output[i] = rescale_element(output[i], rescale[row_of(i)])
