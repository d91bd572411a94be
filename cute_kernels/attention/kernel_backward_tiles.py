"""Tiles of attention's backward for SM90, as its parts share them: tiled MMAs, shared memory, and the barriers in it.

Up to 128 channels a block has 128 keys and a warpgroup 64 of them, with all channels of their dk and dv: p and ds are
in its registers, as the first operands of the products. Beyond (``by_channels``) a block has 64 keys, and each
warpgroup half of the channels of dk, dv and dq. It finds the scores of half of a tile's queries, so p and ds come from
shared memory.

A warpgroup has half of dq's channels, so it multiplies with half of k's. They are whole panels of a swizzle
(``backward_panel``): of 192 channels three of 32.

A product has 64 rows, which a tile of 80 queries has not: its partial of dq lies across (``dq_across``), rows are
channels, of which each warpgroup has half.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_kernels.attention.config import (
    WARPGROUP_ROWS,
    BackwardConfig,
    BackwardSpec,
    backward_block,
    backward_panel,
)

WARP_SIZE, WARPGROUP = 32, 128
WARPGROUPS = 2  # that compute
COMPUTE = WARPGROUPS * WARPGROUP
COMPUTE_BARRIER = 1  # the named barrier of all threads that compute
VECTOR = 4  # fp32 numbers of sums that move together


class BackwardTiles:
    """Static sizes, layouts and barriers of ``BackwardSm90``; arguments as in the builder ``backward_sm90``."""

    def __init__(self, dtype: type[cutlass.Numeric], spec: BackwardSpec, config: BackwardConfig):
        self.dtype = dtype
        self.spec = spec
        self.head_size, self.head_size_v = spec.sizes
        self.descends = spec.causal or spec.window
        self.ragged_q, self.ragged_k = spec.packed_q, spec.packed_k or spec.used_k
        self.block = backward_block(self.head_size)
        self.by_channels = self.block == WARPGROUP_ROWS
        self.tile_rows, self.stages, self.dout_stages = config.tile_rows, config.stages, config.dout_stages
        self.dv_in_ds = not self.by_channels and self.tile_rows >= self.head_size_v  # room for a block's dv in fp32
        self.own_queries = self.tile_rows // WARPGROUPS if self.by_channels else self.tile_rows  # of a warpgroup
        self.k_panel = backward_panel(self.head_size, True)  # of k and dq
        self.padded_rows = config.padded_rows
        self.dq_across = self.tile_rows % WARPGROUP_ROWS != 0
        self.adders, self.dq_buffers, self.dq_parts = config.adders, config.dq_buffers, config.dq_parts
        self.dv_first, self.scores_ahead = config.dv_first, config.scores_ahead

    def tiled_mmas(self) -> tuple:
        """Tiled MMAs of scores and dp (keys by queries), of dk and dv (two if head sizes differ), of dq's partial."""
        along, across = OperandMajorMode.K, OperandMajorMode.MN
        source = warpgroup.OperandSource
        tiles = self.tile_rows // WARPGROUP_ROWS  # of dq's rows; a warpgroup has one, or half of the columns
        if self.dq_across:
            of_dq = across, along, (WARPGROUPS, 1, 1), (WARPGROUP_ROWS, self.tile_rows)
        else:
            columns = tiles * self.head_size // WARPGROUPS
            of_dq = across, across, (tiles, WARPGROUPS // tiles, 1), (WARPGROUP_ROWS, columns)
        keys, parts, place = (WARPGROUPS, 1, 1), 1, source.RMEM
        if self.by_channels:
            keys, parts, place = (1, WARPGROUPS, 1), WARPGROUPS, source.SMEM

        def made(first, second, layout, tiler, place=source.SMEM):
            return sm90.make_trivial_tiled_mma(
                self.dtype, self.dtype, first, second, Float32, layout, tiler_mn=tiler, a_source=place
            )

        return (
            made(along, along, keys, (WARPGROUP_ROWS, self.own_queries)),
            *(
                made(along, across, keys, (WARPGROUP_ROWS, channels // parts), place)
                for channels in dict.fromkeys((self.head_size, self.head_size_v))
            ),
            made(*of_dq),
        )

    def rows_layout(self, channels: int, rows: int, *stages: int, panel: int | None = None):
        """Swizzled shared memory of rows, in a ring if there are ``stages``; ``panel``: channels of a swizzle."""
        kinds = warpgroup.SmemLayoutAtomKind
        kind = {64: kinds.K_SW128, 32: kinds.K_SW64, 16: kinds.K_SW32}[panel or self.panel(channels)]
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (rows, channels, *stages), order=(0, 1, 2)[: 2 + len(stages)])

    def columns_layout(self, channels: int, rows: int, *stages: int, panel: int | None = None):
        """The same bytes across: channels by rows."""
        kinds = warpgroup.SmemLayoutAtomKind
        kind = {64: kinds.MN_SW128, 32: kinds.MN_SW64, 16: kinds.MN_SW32}[panel or self.panel(channels)]
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (channels, rows, *stages), order=(1, 0, 2)[: 2 + len(stages)])

    def panel(self, channels: int) -> int:
        return backward_panel(channels, self.by_channels)

    def allocate(self, smem):
        """Barriers, the ticket, k and v, the rings, ds, and dq's partial."""

        def barriers(number):
            return smem.allocate_array(Int64, number)

        self.ticket_full, self.ticket_empty, self.k_full, self.v_full, self.kv_empty = (barriers(1) for _ in range(5))
        self.q_full, self.q_empty = (barriers(self.stages) for _ in range(2))
        self.dout_full, self.dout_empty = (barriers(self.dout_stages) for _ in range(2))
        self.dq_full, self.dq_empty = (barriers(WARPGROUPS * self.adders) for _ in range(2))
        self.sTicket = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=8)
        # Values of queries: the pair of a lane in each 8 columns
        self.sLse, self.sDelta = (
            smem.allocate_tensor(
                Float32,
                cute.make_layout((2, 4, self.tile_rows // 8, stages), stride=(1, 2, 8, self.tile_rows)),
                byte_alignment=128,
            )
            for stages in (self.stages, self.dout_stages)
        )

        def tensors(channels, rows, *stages, panel=None):
            along, across = (f(channels, rows, *stages, panel=panel) for f in (self.rows_layout, self.columns_layout))
            tensor = smem.allocate_tensor(self.dtype, along.outer, byte_alignment=1024, swizzle=along.inner)
            return tensor, cute.make_tensor(tensor.iterator, across.outer)

        self.sK, self.sK_across = tensors(self.head_size, self.block, panel=self.k_panel)
        self.sV, _ = tensors(self.head_size_v, self.block)
        if self.by_channels:  # behind k and v: together they have room for a block's dk in fp32
            (self.sP, _), (self.sDs, self.sDs_across) = (
                tensors(self.tile_rows, self.block, 2, panel=self.own_queries) for _ in range(2)
            )
        self.sQ, self.sQ_across = tensors(self.head_size, self.tile_rows, self.stages)
        self.sDout, self.sDout_across = tensors(self.head_size_v, self.tile_rows, self.dout_stages)
        if self.dq_across:  # keys lie along
            self.sDs_across, self.sDs = tensors(self.block, self.tile_rows, 2)
        elif not self.by_channels:
            self.sDs, self.sDs_across = tensors(self.tile_rows, self.block, 2)
        self.dq_numbers = self.tile_rows * self.head_size // WARPGROUPS  # of a warpgroup
        numbers = self.dq_numbers // self.dq_parts
        layout = cute.make_layout(
            (VECTOR, WARPGROUP, numbers // (VECTOR * WARPGROUP), WARPGROUPS * self.dq_buffers),
            stride=(1, VECTOR, VECTOR * WARPGROUP, numbers),
        )
        self.sDq = smem.allocate_tensor(Float32, layout, byte_alignment=128)

    def dq_shape(self, mma: cute.TiledMma):
        """The shape of a thread's accumulators of a partial of dq."""
        rows = self.tile_rows, self.head_size
        return mma.partition_shape_C(rows[::-1] if self.dq_across else rows)

    @cute.jit
    def release(self, barrier: cute.Pointer):
        """This warp has done its part."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(barrier)

    def meet(self):
        """A barrier of all threads that compute."""
        cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=COMPUTE)
