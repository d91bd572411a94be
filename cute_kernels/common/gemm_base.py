"""The base of the matrix products of SM90 and SM100: static attributes, the entry, and the warp that loads."""

from typing import Optional

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.common.cache_hints import EVICT_NORMAL, evict_first_if
from cute_kernels.common.gemm_config import GemmConfig
from cute_kernels.common.gemm_epilogue import (
    batch_last,
    entry_and_tile,
    entry_of,
    is_read_once,
    num_tiles,
    shift_of,
    shifted_rows,
    tile_of,
    transpose,
)


class GemmBase:
    """d (M, N) = act(a b^T + bias); the class of an architecture has ``multiply``, which launches its kernel.

    Args:
        activation: "relu", "silu", "gelu" or None.
        a_major, b_major: the dimension whose elements are neighbours, "m" or "k", "n" or "k": the last one of what is
            given.
        transposed: d and z are given as (N, M), and the bias lies along M.
        accumulate: the accumulators start from d.
        tma_store: d and z leave by TMA.
    """

    def __init__(
        self,
        activation: Optional[str],
        a_major: str,
        b_major: str,
        transposed: bool,
        accumulate: bool,
        tma_store: bool,
        config: GemmConfig,
    ):
        self.activation = activation
        self.majors = a_major, b_major
        self.transposed = transposed
        self.accumulate = accumulate
        self.tma_store = tma_store
        self.tile = config.tile
        self.cluster = config.cluster
        self.stages = config.stages
        self.group = config.group
        self.overlapping = config.overlapping

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        z: Optional[cute.Tensor],
        bias: Optional[cute.Tensor],
        valid_k: Optional[cute.Tensor],
        num_ctas: Int32,
        stream,
    ):
        self.dtype, self.out = a.element_type, d.element_type
        a, b, d = self.oriented(a, b, d)
        if const_expr(self.transposed and z is not None):
            z = transpose(z)
        self.multiply(a, b, d, z, bias, valid_k, (), num_ctas, stream)

    def oriented(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """a (M, K), b (N, K), d (M, N) as the product has them; of batches the index is last."""
        a, b, d = batch_last(a), batch_last(b), batch_last(d)
        a = transpose(a) if self.majors[0] == "m" else a
        b = transpose(b) if self.majors[1] == "n" else b
        return a, b, transpose(d) if self.transposed else d

    def load_op(self, multicast: int):
        """Instruction that loads an operand's tile, or this CTA's share of one that ``multicast`` CTAs need."""
        return cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()

    def tiles_of(self, d: cute.Tensor):
        """How many tiles d has along M and N, each a cluster's."""
        return tuple(cute.ceil_div(d.shape[i], self.tile[i] * self.cluster[i]) for i in range(2))

    @cute.jit
    def shift(self, m: Int32, n: Int32, d: cute.Tensor) -> tuple:
        """How far tile (m, n) moves, along M and along N.

        Where neighbours of d are a part's by TMA it begins on 16 bytes: else the store is an illegal instruction.
        """
        aligned = const_expr(128 // self.out.width if self.tma_store else 1)
        multiples = const_expr((aligned, 1) if self.transposed else (1, aligned))
        return tuple(shift_of(tile, self.tile[i], d.shape[i], multiples[i]) for i, tile in enumerate((m, n)))

    @cute.jit
    def load_tiles(
        self, ring, a: tuple, b: tuple, d: cute.Tensor, divisors: tuple, place: tuple, walk: tuple, k_tiles: Int32
    ):
        """Feed the ring; returns its state behind the last tile.

        ``a``, ``b``: an operand's copy, the operand, its tiles in gmem and in smem, the CTAs that get it. ``place``:
        rank along M and along N in the cluster. ``walk``: first tile and step.
        """
        (tma_a, mA, tAgA, tAsA, a_mask), (tma_b, mB, tBgB, tBsB, b_mask) = a, b
        (cluster_m, cluster_n), (rank_m, rank_n), (first_tile, step) = self.cluster, place, walk
        tiles_m, tiles_n = self.tiles_of(d)
        # Weights that are read once make room first; the tokens may be wanted again
        a_policy, b_policy = Int64(EVICT_NORMAL), evict_first_if(is_read_once(mB, tiles_m, d))
        if const_expr(self.transposed):
            a_policy, b_policy = evict_first_if(is_read_once(mA, tiles_n, d)), Int64(EVICT_NORMAL)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        for index in cutlass.range(first_tile, num_tiles(tiles_m, tiles_n, d), step):
            entry, tile = entry_and_tile(index, divisors)
            m, n = tile_of(tile, tiles_m, divisors, self.group)
            tAgA_entry, tBgB_entry = entry_of(tAgA, entry, divisors), entry_of(tBgB, entry, divisors)
            if const_expr(self.overlapping):
                shift_m, shift_n = self.shift(m * cluster_m + rank_m, n * cluster_n + rank_n, d)
                tAgA_entry = shifted_rows(tAgA_entry, mA, shift_m)
                tBgB_entry = shifted_rows(tBgB_entry, mB, shift_n)
            for k in cutlass.range(k_tiles, unroll=1):  # less code to fetch before the first loads
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(
                    tma_a,
                    tAgA_entry[None, m * cluster_m + rank_m, k],
                    tAsA[None, state.index],
                    tma_bar_ptr=full,
                    mcast_mask=a_mask,
                    cache_policy=a_policy,
                )
                cute.copy(
                    tma_b,
                    tBgB_entry[None, n * cluster_n + rank_n, k],
                    tBsB[None, state.index],
                    tma_bar_ptr=full,
                    mcast_mask=b_mask,
                    cache_policy=b_policy,
                )
                state.advance()
        return state
