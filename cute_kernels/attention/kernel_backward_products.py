"""The products of attention's backward for SM90: what two warpgroups do with a block of keys and a tile of queries.

kernel_row_backward.py has the arithmetic; here are the products, their order, and who waits for whom.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import select_

from cute_kernels.attention.config import WARPGROUP_ROWS
from cute_kernels.attention.kernel_backward_blocks import Block
from cute_kernels.attention.kernel_backward_tiles import VECTOR, WARP_SIZE, WARPGROUP, WARPGROUPS
from cute_kernels.attention.kernel_row import ROWS, cap, column_of, first_column
from cute_kernels.attention.kernel_row_backward import hide_queries, score_gradient, through_tanh, weight
from cute_kernels.attention.kernel_threads import opaque, row_of_thread

HIDDEN = 1 << 30  # a column behind all


class BackwardProducts:
    """The part of ``BackwardSm90`` that the warpgroups that compute run, a block after the other."""

    @cute.jit
    def compute(
        self,
        mmas: tuple,
        atoms: tuple,
        matrices: tuple,
        dkv_sums: cute.Tensor,
        tidx: Int32,
    ):
        """``tidx``: among the threads that compute."""
        self.tidx = tidx
        self.wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        self.lane = tidx % WARP_SIZE
        score_mma, dk_mma, dv_mma, dq_mma = mmas[0], mmas[1], mmas[-2], mmas[-1]
        of_scores, of_dk, of_dv, of_dq = (
            mma.get_slice(self.wg * WARPGROUP) for mma in (score_mma, dk_mma, dv_mma, dq_mma)
        )
        self.tSrK, self.tSrV = (score_mma.make_fragment_A(of_scores.partition_A(t)) for t in (self.sK, self.sV))
        self.tSrQ, self.tSrDout = (score_mma.make_fragment_B(of_scores.partition_B(t)) for t in (self.sQ, self.sDout))
        self.tKrQ = dk_mma.make_fragment_B(of_dk.partition_B(self.sQ_across))
        self.tKrDout = dv_mma.make_fragment_B(of_dv.partition_B(self.sDout_across))
        if const_expr(self.dq_across):
            self.tQrK = dq_mma.make_fragment_A(of_dq.partition_A(self.sK_across))
            self.tQrDs = dq_mma.make_fragment_B(of_dq.partition_B(self.sDs_across))
        else:
            self.tQrDs = dq_mma.make_fragment_A(of_dq.partition_A(self.sDs_across))
            self.tQrK = dq_mma.make_fragment_B(of_dq.partition_B(self.sK_across))
        # Atoms whose products start from zero, or are added
        self.score_first, self.score_next, self.dk_next, self.dv_next, self.dq_first, self.dq_next = (
            cute.make_mma_atom(m.op) for m in (score_mma, score_mma, dk_mma, dv_mma, dq_mma, dq_mma)
        )
        for atom in (self.score_first, self.dq_first):
            atom.set(warpgroup.Field.ACCUMULATE, False)
        for atom in (self.score_next, self.dk_next, self.dv_next, self.dq_next):
            atom.set(warpgroup.Field.ACCUMULATE, True)
        self.scores_shape = score_mma.partition_shape_C((self.block, self.tile_rows))
        self.partial_shape = self.dq_shape(dq_mma)
        dk = cute.make_rmem_tensor(dk_mma.partition_shape_C((self.block, self.head_size)), Float32)
        dv = cute.make_rmem_tensor(dv_mma.partition_shape_C((self.block, self.head_size_v)), Float32)
        if const_expr(self.by_channels):
            weights, gradients = (dk_mma.make_fragment_A(of_dk.partition_A(t)) for t in (self.sP, self.sDs))
        else:
            shape = dk_mma.partition_shape_A((self.block, self.tile_rows))
            weights, gradients = (dk_mma.make_fragment_A(shape) for _ in range(2))
        scores = cute.make_rmem_tensor(self.scores_shape, Float32)
        tensors = dk, dv, weights, gradients, scores

        stores = (
            cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(across, 4), self.dtype)
            for across in (self.dq_across, False, False)
        )
        self.store_ds, self.store_dk, self.store_dv = (
            cute.make_tiled_copy_C(*both) for both in zip(stores, (score_mma, dk_mma, dv_mma), strict=True)
        )
        count, blocks, turn = Int32(0), Int32(0), Int32(0)
        ticket = self.read_ticket(turn, False)
        while ticket < self.tickets:
            block = Block(*self.block_of(ticket))
            if self.has_tiles(block):
                dk.fill(0.0)
                dv.fill(0.0)
                cute.arch.mbarrier_wait(self.k_full, blocks % 2)
                self.walk(tensors, block, count, blocks)
                # Found again, so that no register keeps all of it along the walk
                self.finish(tensors, atoms, matrices, dkv_sums, Block(*self.block_of(opaque(ticket))))
                count += block.end - block.first
                blocks += 1
            else:
                # Apart: were dk and dv to come from either way, ptxas would find too few registers, and serialize all
                if const_expr(self.spec.window or self.spec.packed_q):
                    if block.exists:
                        dk.fill(0.0)
                        dv.fill(0.0)
                        cute.arch.mbarrier_wait(self.k_full, blocks % 2)
                        cute.arch.mbarrier_wait(self.v_full, blocks % 2)
                        blocks += 1
                        self.finish(tensors, atoms, matrices, dkv_sums, block)
            turn += 1
            ticket = self.read_ticket(turn, False)
        if self.tidx < WARP_SIZE:
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def walk(self, tensors: tuple, block: tuple, count: Int32, blocks: Int32):
        """Over the tiles of queries that see a block.

        Of the block a step knows its reach: the query that has the place of its first key, and how many keys follow.
        """
        if const_expr(self.scores_ahead or self.by_channels):
            self.score(tensors[-1], count)
            warpgroup.wait_group(0)
        first_key = block.n * self.block
        reach = first_key + block.len_q - block.len_k, block.len_k - first_key
        start = count - block.first
        # There is one tile at least; did the compiler not know, ptxas would have every product waited for
        for m in cutlass.range(block.first, cutlass.max(block.end, block.first + 1), unroll=1):
            if const_expr(self.by_channels):
                self.step_by_channels(tensors, reach, m, block.end, start + m, blocks)
            else:
                self.step(tensors, reach, m, block.end, start + m, blocks)
        warpgroup.wait_group(0)

    @cute.jit
    def step(self, tensors: tuple, reach: tuple, m: Int32, end: Int32, count: Int32, blocks: Int32):
        """A tile of queries: its part of dk and dv, and its partial of dq."""
        dk, dv, weights, gradients, scores = tensors
        slot, phase = self.place_in_ring(count, self.stages)
        dp = cute.make_rmem_tensor(self.scores_shape, Float32)
        if const_expr(not self.scores_ahead):
            self.score(scores, count)
        cute.arch.mbarrier_wait(self.v_full, blocks % 2)
        cute.arch.mbarrier_wait(self.dout_full + slot, phase)
        warpgroup.fence()
        self.multiply_rows(dp, self.tSrV, self.tSrDout, slot)

        if const_expr(not self.scores_ahead):
            warpgroup.wait_group(1)
        if const_expr(self.spec.softcap):
            cap(scores, self.before_tanh)
        if not self.sees_whole(reach, m):
            self.hide_queries(scores, reach, m)
        self.find_weights(scores, weights, slot)
        if const_expr(self.dv_first):
            if const_expr(not self.spec.softcap):
                self.round(scores, weights)
            warpgroup.fence()
            self.add_keys(self.dv_next, dv, weights, self.tKrDout, slot)
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        self.find_gradients(scores, dp, slot)
        self.round(dp, gradients)
        self.put_scores(gradients, self.sDs, count % 2)
        if const_expr(not self.dv_first):
            self.round(scores, weights)
            warpgroup.fence()
            self.add_keys(self.dv_next, dv, weights, self.tKrDout, slot)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet()
        partial = cute.make_rmem_tensor(self.partial_shape, Float32)
        warpgroup.fence()
        self.multiply_ds(partial, count % 2)
        self.add_keys(self.dk_next, dk, gradients, self.tKrQ, slot)
        warpgroup.wait_group(2)
        self.release(self.dout_empty + slot)

        if const_expr(self.scores_ahead):
            ahead = cute.make_rmem_tensor(self.scores_shape, Float32)
            self.score_ahead(ahead, m + 1 < end, count)
            warpgroup.wait_group(2)
        else:
            warpgroup.wait_group(1)
        self.put_dq(partial, count)
        warpgroup.wait_group(0)
        self.release(self.q_empty + slot)
        if const_expr(self.scores_ahead):
            scores.store(ahead.load())

    @cute.jit
    def score(self, scores: cute.Tensor, count: Int32):
        """Issue the scores of a tile."""
        slot, phase = self.place_in_ring(count, self.stages)
        cute.arch.mbarrier_wait(self.q_full + slot, phase)
        warpgroup.fence()
        self.multiply_rows(scores, self.tSrK, self.tSrQ, slot)

    @cute.jit
    def score_ahead(self, scores: cute.Tensor, exists: Boolean, count: Int32):
        """Issue the scores of the tile behind the ``count``-th; if there is none its own, of which nothing is made."""
        following, phase = self.place_in_ring(count + 1, self.stages)
        if exists:
            cute.arch.mbarrier_wait(self.q_full + following, phase)
        warpgroup.fence()
        slot = Int32(select_(exists, following, count % self.stages))
        self.multiply_rows(scores, self.tSrK, self.tSrQ, slot)

    def multiply_rows(self, target: cute.Tensor, of_keys: cute.Tensor, of_queries: cute.Tensor, slot: Int32):
        """Issue keys times queries, over the head size: ``serial_k16`` from zero."""
        for k16 in range(cute.size(of_keys, mode=[2])):
            atom = self.score_next if k16 else self.score_first
            cute.gemm(atom, target, of_keys[None, None, k16], of_queries[None, None, k16, slot], target)
        warpgroup.commit_group()

    def add_keys(
        self, atom: cute.MmaAtom, target: cute.Tensor, factors: cute.Tensor, of_queries: cute.Tensor, slot: Int32
    ):
        """Issue what a tile of queries adds to dk or dv: ``serial_k16`` onto them."""
        for k16 in range(self.tile_rows // 16):
            cute.gemm(atom, target, factors[None, None, k16], of_queries[None, None, k16, slot], target)
        warpgroup.commit_group()

    def multiply_ds(self, target: cute.Tensor, slot: Int32):
        """Issue a block's partial of dq: ``serial_k16`` from zero."""
        for k16 in range(self.block // 16):
            atom = self.dq_next if k16 else self.dq_first
            ds, k = self.tQrDs[None, None, k16, slot], self.tQrK[None, None, k16]
            cute.gemm(atom, target, *((k, ds) if self.dq_across else (ds, k)), target)
        warpgroup.commit_group()

    def hide_queries(self, scores: cute.Tensor, reach: tuple, m: Int32):
        """Scores of queries that do not see a key, or of keys that do not exist."""
        own, keys = reach
        thread = opaque(self.tidx)
        if self.by_channels:
            key = row_of_thread(thread % WARPGROUP)
        else:
            key = thread // WARPGROUP * WARPGROUP_ROWS + row_of_thread(thread % WARPGROUP)
        first, last = [], []
        for r in range(ROWS):
            column = Int32(-HIDDEN)
            if self.descends:
                column = own + key + 8 * r - m * self.tile_rows - first_column(thread)
                if self.by_channels:
                    column -= thread // WARPGROUP * self.own_queries
            if self.spec.window:
                last.append(column + self.left)
                column -= self.right
            first.append(Int32(select_(key + 8 * r < keys, column, Int32(HIDDEN))))
        hide_queries(scores, tuple(first), tuple(last) if self.spec.window else None)

    def values_of(self, values: cute.Tensor, slot: Int32, columns: int) -> cute.Tensor:
        """Those of the lane's pair of queries in 8 columns."""
        pair = cute.make_rmem_tensor((2,), Float32)
        if self.by_channels:
            columns += self.wg * (self.own_queries // 8)
        cute.autovec_copy(values[None, self.lane % 4, columns, slot], pair)
        return pair

    def find_weights(self, scores: cute.Tensor, weights: cute.Tensor, slot: Int32):
        """Scores become p; with a softcap p times the tanh's derivative, and p is rounded already."""
        for columns in range(self.own_queries // 8):
            row_lse = self.values_of(self.sLse, slot, columns)
            found = cute.make_rmem_tensor((4,), Float32)
            for e in range(4):
                i = 4 * columns + e
                capped = scores[i]
                found[e] = weight(capped, self.score_scale, row_lse[column_of(i) % 2])
                scores[i] = through_tanh(found[e], capped) if self.spec.softcap else found[e]
            if self.spec.softcap:
                rounded = cute.make_tensor(weights.iterator + 4 * columns, cute.make_layout(4))
                rounded.store(found.load().to(self.dtype))

    def find_gradients(self, weights: cute.Tensor, dp: cute.Tensor, slot: Int32):
        """dp becomes ds."""
        for columns in range(self.own_queries // 8):
            delta = self.values_of(self.sDelta, slot, columns)
            for i in range(4 * columns, 4 * columns + 4):
                dp[i] = score_gradient(weights[i], dp[i], delta[column_of(i) % 2])

    def round(self, values: cute.Tensor, factors: cute.Tensor):
        """As the first operand of a product; the accumulators' elements are in its order."""
        flat = cute.make_layout(cute.size(values))
        cute.make_tensor(factors.iterator, flat).store(
            cute.make_tensor(values.iterator, flat).load().to(self.dtype)
        )  # fmt: skip

    def put_scores(self, values: cute.Tensor, shared: cute.Tensor, slot: Int32):
        """ds, or p, into shared memory, where the product before the last has been read by both warpgroups."""
        accumulators = cute.make_tensor(values.iterator, cute.make_layout(self.scores_shape))
        target = self.store_ds.get_slice(self.tidx).partition_D(shared)
        cute.copy(self.store_ds, self.store_ds.retile(accumulators), target[None, None, None, slot])

    @cute.jit
    def put_dq(self, partial: cute.Tensor, count: Int32):
        """A partial of dq into shared memory, a part after the other, once what was there has been read."""
        vector, thread = cute.make_rmem_tensor((VECTOR,), Float32), opaque(self.tidx) % WARPGROUP
        buffer = count % self.dq_buffers * WARPGROUPS + self.wg
        adder = count % self.adders * WARPGROUPS + self.wg
        vectors = const_expr(cute.size(partial) // (VECTOR * self.dq_parts))
        for part in cutlass.range_constexpr(self.dq_parts):
            # What had the buffer before: this partial's part before, or the last one of another partial. Its adder, and
            # how many of that one's partials came before
            before = count + (0 if part else self.adders - self.dq_buffers)
            reader, uses = before % self.adders * WARPGROUPS + self.wg, before // self.adders
            cute.arch.mbarrier_wait(self.dq_empty + reader, (uses * self.dq_parts + part) % 2 ^ 1)
            for i in cutlass.range_constexpr(vectors):
                for e in cutlass.range_constexpr(VECTOR):
                    vector[e] = partial[(part * vectors + i) * VECTOR + e]
                cute.autovec_copy(vector, self.sDq[None, thread, i, buffer])
            cute.arch.fence_proxy("async.shared", space="cta")
            self.release(self.dq_full + adder)
