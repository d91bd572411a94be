"""A step of attention's backward for SM90 with heads beyond 128 channels, whose warpgroups split the channels.

k q^T and v dout^T: a warpgroup has half of the queries --> p, ds --> sP, sDs; then both have all of them
p dout --> dv, ds^T k --> a partial of dq, ds q --> dk: a warpgroup has half of the channels
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.attention.kernel_row import cap


class BackwardChannels:
    """The part of ``BackwardSm90`` that takes a step ``by_channels``."""

    @cute.jit
    def step_by_channels(self, tensors: tuple, reach: tuple, m: Int32, end: Int32, count: Int32, blocks: Int32):
        """A tile of queries: its part of dk and dv, and its partial of dq. Its scores are there."""
        dk, dv, weights, gradients, scores = tensors
        slot, _ = self.place_in_ring(count, self.stages)
        of_dout, phase = self.place_in_ring(count, self.dout_stages)
        dp = cute.make_rmem_tensor(self.scores_shape, Float32)
        rounded = cute.make_rmem_tensor(self.scores_shape, self.dtype)
        cute.arch.mbarrier_wait(self.v_full, blocks % 2)
        cute.arch.mbarrier_wait(self.dout_full + of_dout, phase)
        warpgroup.fence()
        self.multiply_rows(dp, self.tSrV, self.tSrDout, of_dout)

        if const_expr(self.spec.softcap):
            cap(scores, self.before_tanh)
        if not self.sees_whole(reach, m):
            self.hide_queries(scores, reach, m)
        self.find_weights(scores, rounded, slot)
        if const_expr(not self.spec.softcap):
            self.round(scores, rounded)
        self.put_scores(rounded, self.sP, count % 2)
        warpgroup.wait_group(0)
        self.find_gradients(scores, dp, of_dout)
        self.round(dp, rounded)
        self.put_scores(rounded, self.sDs, count % 2)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet()

        partial = cute.make_rmem_tensor(self.partial_shape, Float32)
        warpgroup.fence()
        self.add_keys(self.dv_next, dv, weights[None, None, None, count % 2], self.tKrDout, of_dout)
        self.multiply_ds(partial, count % 2)
        self.add_keys(self.dk_next, dk, gradients[None, None, None, count % 2], self.tKrQ, slot)
        warpgroup.wait_group(2)
        self.release(self.dout_empty + of_dout)
        ahead = cute.make_rmem_tensor(self.scores_shape, Float32)
        if const_expr(self.scores_ahead):
            self.score_ahead(ahead, m + 1 < end, count)
            warpgroup.wait_group(2)
            self.put_dq(partial, count)
        else:
            warpgroup.wait_group(1)
            self.put_dq(partial, count)
            self.score_ahead(ahead, m + 1 < end, count)
        warpgroup.wait_group(0)
        self.release(self.q_empty + slot)
        scores.store(ahead.load())
