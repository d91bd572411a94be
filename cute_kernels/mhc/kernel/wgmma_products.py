"""The base of products of bf16 x with many fp32 rows on SM90: pairs of CTAs, their ring, their warps.

The rows (phi of eight streams, or as many columns of dH) are few beside x, but too many for the registers of warps,
where their bf16 terms would be made again for every few tokens: they come with every tile of x, once for both CTAs of a
pair by multicast, some warps split them in their place into terms, and the tensor cores read these from there.

    gmem rows --TMA, multicast--> ring in smem --> the rows' terms, in their place --wgmma with x--> sums in registers
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Boolean, Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_kernels.common.cluster_barriers import arrive_in_cluster

WARPGROUP = 128
THREADS = 4 * WARPGROUP
CLUSTER = 2  # CTAs that share the rows


class WgmmaProducts:
    """``config.stages`` tiles of rows in flight.

    A slot is full when the rows have come, split when the terms are in their place, and empty when both CTAs have
    multiplied.
    """

    def tiled_mma(self, majors: tuple, columns: int, warpgroups: tuple) -> cute.TiledMma:
        """``warpgroups`` side by side; an instruction makes 64 rows of ``columns`` sums of operands with ``majors``."""
        return sm90.make_trivial_tiled_mma(BFloat16, BFloat16, *majors, Float32, warpgroups, tiler_mn=(64, columns))

    @cute.jit
    def meet(
        self,
        smem,
        tidx: Int32,
        boxes: cutlass.Constexpr[int],
        splitters: cutlass.Constexpr[int],
        readers: cutlass.Constexpr[int],
    ):
        """Barriers, for tiles of so many ``boxes``, for as many threads that split, and that tell a slot is read; both
        CTAs and the kernel before.
        """
        stages = const_expr(self.config.stages)
        self.full, self.split, self.empty = (smem.allocate_array(Int64, stages) for _ in range(3))
        if tidx == 0:
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(self.full + stage, loaders(boxes))
                cute.arch.mbarrier_init(self.split + stage, splitters)
                cute.arch.mbarrier_init(self.empty + stage, readers)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_wait()
        cute.arch.cluster_wait()

    @cute.jit
    def part(self):
        """The pair has multiplied: nothing may arrive at the barriers of a CTA that has ended."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def expect(self, full: cute.Pointer, num_bytes: cutlass.Constexpr[int], boxes: cutlass.Constexpr[int]):
        """The loading warp, where its slot is empty: so many bytes come, of the rows as many ``boxes``."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, num_bytes)
            if const_expr(loaders(boxes) > 1):
                arrive_in_cluster(full, 1 - self.rank)

    @cute.jit
    def load_shared(self, atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, full, mine: Boolean):
        """A box of the rows to both CTAs, by that one whose it is."""
        if mine:
            tSs, tSg = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2)
            )
            cute.copy(atom, tSg, tSs, tma_bar_ptr=full, mcast_mask=Int16((1 << CLUSTER) - 1))

    @cute.jit
    def sums_of(self, tiled_mma: cute.TiledMma, thread: Int32, shape: cutlass.Constexpr):
        """(sums of a thread of those that multiply, where they are in a tile of ``shape``)."""
        places = tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor(shape))
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        return cute.make_rmem_tensor(places.shape[:3], Float32), places

    @cute.jit
    def free(self, empty: cute.Pointer, slot: Int32):
        """This warp has read a slot: its lanes tell both CTAs."""
        lane = cute.arch.lane_idx()
        if lane < CLUSTER:
            arrive_in_cluster(empty + slot, lane)


def loaders(boxes: int) -> int:
    """CTAs whose loading warps arrive when a slot is filled: all where one has no box of the rows to bring.

    A slot must not be full before it is empty in both CTAs: who has multiplied tells both, and would count for the
    tile before where another has yet to read that one. Boxes of both CTAs, or their arrivals, see to it.
    """
    return 1 if boxes >= CLUSTER else CLUSTER


def swizzled(shape: tuple[int, int], bits: int):
    """A box of rows of 16 bytes times 2^bits, swizzled; of the second mode all is in a row."""
    return cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, cute.make_layout(shape, stride=(shape[1], 1)))
