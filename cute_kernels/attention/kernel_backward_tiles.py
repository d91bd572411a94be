"""What the parts of attention's backward for SM90 share: tiled MMAs, shared memory, and the barriers in it."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_kernels.attention.config import WARPGROUP_ROWS, BackwardConfig, BackwardSpec, grid_for

WARP_SIZE, WARPGROUP = 32, 128
WARPGROUPS = 2  # that compute
COMPUTE = WARPGROUPS * WARPGROUP
ADDERS = 2  # threads that add dq in turn, each from a buffer of its own
COMPUTE_BARRIER = 1  # the named barrier of all threads that compute
VECTOR = 4  # fp32 numbers of sums that move together


class BackwardTiles:
    """Static sizes, layouts and barriers of ``BackwardSm90``; arguments as in the builder ``backward_sm90``."""

    def __init__(self, dtype: type[cutlass.Numeric], spec: BackwardSpec, config: BackwardConfig):
        self.dtype = dtype
        self.spec = spec
        self.head_size = spec.head_size
        self.descends = spec.causal or spec.window
        self.ragged_q, self.ragged_k = spec.packed_q, spec.packed_k or spec.used_k
        self.block = grid_for(self.head_size).block
        self.tile_rows, self.stages = config.tile_rows, config.stages
        self.dv_first, self.scores_ahead = config.dv_first, config.scores_ahead

    def tiled_mmas(self) -> tuple:
        """Of scores and dp, keys by queries; of dk and dv, whose first operand is in registers; of dq's partial."""
        along, across = OperandMajorMode.K, OperandMajorMode.MN
        source = warpgroup.OperandSource
        across_keys = (WARPGROUPS, 1, 1)
        tiles = self.tile_rows // WARPGROUP_ROWS  # of dq's rows; a warpgroup has one, or half of the columns
        of_dq = (tiles, WARPGROUPS // tiles, 1), (WARPGROUP_ROWS, tiles * self.head_size // WARPGROUPS)

        def made(first, second, layout, tiler, place=source.SMEM):
            return sm90.make_trivial_tiled_mma(
                self.dtype, self.dtype, first, second, Float32, layout, tiler_mn=tiler, a_source=place
            )

        return (
            made(along, along, across_keys, (WARPGROUP_ROWS, self.tile_rows)),
            made(along, across, across_keys, (WARPGROUP_ROWS, self.head_size), source.RMEM),
            made(across, across, *of_dq),
        )

    def layouts(self) -> tuple:
        """Swizzled shared memory: a block of keys, and rings of tiles of queries, along the head size and across it; of
        ds, along the queries and across them. Along and across are the same bytes.
        """
        kinds = warpgroup.SmemLayoutAtomKind
        along, across = (warpgroup.make_smem_layout_atom(k, self.dtype) for k in (kinds.K_SW128, kinds.MN_SW128))
        d, rows, block = self.head_size, self.tile_rows, self.block
        return (
            cute.tile_to_shape(along, (block, d), order=(0, 1)),
            cute.tile_to_shape(along, (rows, d, self.stages), order=(0, 1, 2)),
            cute.tile_to_shape(along, (block, rows, 2), order=(0, 1, 2)),
            cute.tile_to_shape(across, (d, block), order=(1, 0)),
            cute.tile_to_shape(across, (d, rows, self.stages), order=(1, 0, 2)),
            cute.tile_to_shape(across, (rows, block, 2), order=(1, 0, 2)),
        )

    def allocate(self, smem):
        """Barriers, the ticket, k and v, the rings, ds, and dq's partial."""

        def barriers(number):
            return smem.allocate_array(Int64, number)

        self.ticket_full, self.ticket_empty, self.k_full, self.v_full, self.kv_empty = (barriers(1) for _ in range(5))
        self.q_full, self.q_empty, self.dout_full, self.dout_empty = (barriers(self.stages) for _ in range(4))
        self.dq_full, self.dq_empty = (barriers(WARPGROUPS * ADDERS) for _ in range(2))
        self.sTicket = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=8)
        # Values of queries: the pair of a lane in each 8 columns
        of_rows = cute.make_layout((2, 4, self.tile_rows // 8, self.stages), stride=(1, 2, 8, self.tile_rows))
        self.sLse, self.sDelta = (smem.allocate_tensor(Float32, of_rows, byte_alignment=128) for _ in range(2))

        along, across = self.layouts()[:3], self.layouts()[3:]

        def tensors(i):
            tensor = smem.allocate_tensor(
                self.dtype, along[i].outer, byte_alignment=1024, swizzle=along[i].inner
            )  # fmt: skip
            return tensor, cute.make_tensor(tensor.iterator, across[i].outer)

        (self.sK, self.sK_across), (self.sV, _) = tensors(0), tensors(0)
        (self.sQ, self.sQ_across), (self.sDout, self.sDout_across) = tensors(1), tensors(1)
        self.sDs, self.sDs_across = tensors(2)
        numbers = self.tile_rows * self.head_size // WARPGROUPS
        layout = cute.make_layout(
            (VECTOR, WARPGROUP, numbers // (VECTOR * WARPGROUP), WARPGROUPS * ADDERS),
            stride=(1, VECTOR, VECTOR * WARPGROUP, numbers),
        )
        self.sDq = smem.allocate_tensor(Float32, layout, byte_alignment=128)
        self.dq_numbers = numbers  # of a warpgroup

    @cute.jit
    def release(self, barrier: cute.Pointer):
        """This warp has done its part."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(barrier)

    def meet(self):
        """A barrier of all threads that compute."""
        cute.arch.barrier(barrier_id=COMPUTE_BARRIER, number_of_threads=COMPUTE)
