"""Products of groups of few bf16 rows with mxfp8 matrices, for SM90: half the bytes, the bits of dequantized ones.

    gmem q, a --TMA--> sQ, sA --2 bytes a load--> q --exact--> bf16 registers --mma--> fp32 registers --> gmem d
                       scales --a word a row of 128 of k, one tile of K ahead--^

Few rows wait for the stream of the matrices. So the matrices' rows lie along an instruction's 16 rows, and the rows a
along its 8 columns. A warp makes bf16 of its part of a tile between shared memory and the tensor cores: written back,
it would cross shared memory three times. Two CTAs share an SM: one loads while the other multiplies.

An element's bits S EEEE MMM, placed as bf16's S 0000EEEE MMM0000, stand for it times 2^-120, a subnormal one, too.
Times 2^120 is exact. Times its scale, 2^(s - 127) in bf16, is rounded once, as ``dequantize`` does. Two elements
are placed by a permutation of bytes, which spreads each sign over 8 bits, a shift and a mask.

The contract ``serial_k16``; the walk is that of kernel_grouped_sm90.py, of tiles of rows along N.

Profile: ncu --clock-control none -k regex:Mxfp8 python -m bench.bench_moe --filter mxfp8
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint16, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cute_kernels.common.cache_hints import EVICT_NORMAL, evict_first_if
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.gemm_config import GemmConfig
from cute_kernels.common.gemm_epilogue import batch_last, store_sums, transpose
from cute_kernels.common.symbolic import symbolic_matrix
from cute_kernels.gemm.config_mxfp8 import BLOCK, CTAS_PER_SM, GroupedMxfp8Spec
from cute_kernels.gemm.kernel_grouped_walk import (
    WARP,
    allocate_tables,
    before,
    corner_of,
    group_of,
    scan,
    tile_in_group,
)
from jit_cache import Program, compiled

WARPS = 4  # that multiply; one more loads
THREADS = (WARPS + 1) * WARP
LINE = 128
# By bytes
WORDS = {1: Uint8, 2: Uint16, 4: Int32}
MASKS = {1: 0xFF, 2: 0xFFFF, 4: -1}
MINUS_ZEROS = -0x7FFF8000  # two of bf16: a product is a fused multiply-add of it
TWO_TO_120 = 0x7B807B80


class GroupedMxfp8Sm90:
    """d (R, N): rows a (R, K), those of a group times its matrix q (N, K) with scales (N, K / 32).

    ``scale_vec``: scales of a row that one load takes: 4 where K is a multiple of 128, 2 of 64, else 1.
    """

    def __init__(self, config: GemmConfig, scale_vec: int):
        self.tile, self.stages, self.scale_vec = config.tile, config.stages, scale_vec
        if self.tile[0] % (16 * WARPS) or self.tile[2] != 4 * BLOCK or config.cluster != (1, 1):
            raise ValueError(f"config must be of {16 * WARPS} rows, {4 * BLOCK} of k and one CTA, got {config}")
        self.parts = self.tile[0] // (16 * WARPS)  # a warp's, of 16 rows

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        q: cute.Tensor,
        scale: cute.Tensor,
        d: cute.Tensor,
        offs: cute.Tensor,
        num_ctas: Int32,
        stream,
    ):
        tile_m, tile_n, tile_k = self.tile
        groups, n, k = q.shape
        # Two elements are loaded as one of 16 bits
        pairs = cute.recast_ptr(q.iterator, dtype=BFloat16)
        q = batch_last(
            cute.make_tensor(pairs, cute.make_layout((groups, n, k // 2), stride=(n * Int64(k // 2), k // 2, 1)))
        )
        tiled_mma = cute.make_tiled_mma(
            warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16)),
            cute.make_layout((WARPS, 1, 1)),
            permutation_mnk=(16 * WARPS, min(tile_n, 16), 16),
        )
        sQ_layout = self.ring_layout((tile_m, tile_k // 2))
        sA_layout = self.ring_layout((tile_n, tile_k))
        load = cpasync.CopyBulkTensorTileG2SOp()
        one_q, one_a = (cute.slice_(layout, (None, None, 0)) for layout in (sQ_layout, sA_layout))
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, q, one_q, (tile_m, tile_k // 2))
        tma_a, mA = cpasync.make_tiled_tma_atom(load, a, one_a, (tile_n, tile_k))
        s = cute.recast_ptr(scale.iterator, dtype=Uint8)
        self.kernel(tiled_mma, sQ_layout, sA_layout, tma_q, mQ, tma_a, mA, s, transpose(d), offs).launch(
            grid=[num_ctas, 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    def ring_layout(self, shape: tuple[int, int]):
        """Shared memory of an operand's ring: (rows, k, stages), 128 bytes of a row together, swizzled."""
        atom = warpgroup.make_smem_layout_atom(
            sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, BFloat16, shape[1]), BFloat16
        )
        return cute.tile_to_shape(atom, (*shape, self.stages), order=(0, 1, 2))

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        sQ_layout: cute.ComposedLayout,
        sA_layout: cute.ComposedLayout,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        scale: cute.Pointer,
        d: cute.Tensor,
        offs: cute.Tensor,
    ):
        tile_m, tile_n, tile_k = self.tile
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = tidx % WARP
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index == WARPS:
            cpasync.prefetch_descriptor(tma_q)
            cpasync.prefetch_descriptor(tma_a)
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * self.stages)
        sQ = smem.allocate_tensor(BFloat16, sQ_layout.outer, byte_alignment=1024, swizzle=sQ_layout.inner)
        sA = smem.allocate_tensor(BFloat16, sA_layout.outer, byte_alignment=1024, swizzle=sA_layout.inner)
        tables = allocate_tables(smem)
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, WARPS),
            tx_count=tile_m * tile_k + tile_n * tile_k * 2,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)

        cute.arch.griddepcontrol_wait()
        groups = offs.shape[0]
        if warp_index == WARPS:
            scan(offs, mA.shape[0], tile_n, tables, lane)
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
        cute.arch.sync_threads()
        tiles_n = cute.ceil_div(d.shape[0], tile_m)
        walk = tables, groups, tiles_n, lane
        tiles = bidx, tables[1][groups - 1] * tiles_n, grid
        k_tiles = cute.ceil_div(mA.shape[1], tile_k)
        if warp_index == WARPS:
            self.load_tiles(ring, (tma_q, mQ, sQ), (tma_a, mA, sA), scale, walk, tiles, k_tiles)
        else:
            self.clear_rest(d, tables[0][groups - 1], bidx, grid, tidx)
            self.multiply_tiles(tiled_mma, ring, sQ, sA, scale, d, mA.shape[1] // BLOCK, walk, tiles, k_tiles, tidx)

    @cute.jit
    def place(self, walk: tuple, index: Int32, group: Int32):
        """(group, first of the matrix' rows, first row and end of the group's, tiles along these) of a tile."""
        (ends, tiles), groups, tiles_n, lane = walk
        group = group_of(tiles, groups, tiles_n, index, group, lane)
        tiles_before = before(tiles, group)
        tiles_m = tiles[group] - tiles_before
        m, n = tile_in_group(index - tiles_before * tiles_n, tiles_m, tiles_n, 1)
        return group, n * self.tile[0], before(ends, group) + m * self.tile[1], ends[group], tiles_m

    @cute.jit
    def load_tiles(self, ring, q: tuple, a: tuple, scale: cute.Pointer, walk: tuple, tiles: tuple, k_tiles: Int32):
        """Feed the ring, by one warp; a tile's scales begin their way to L2 with its first elements."""
        (tma_q, mQ, sQ), (tma_a, mA, sA), (first_tile, total, step) = q, a, tiles
        tile_m, tile_n, tile_k = self.tile
        lane = walk[-1]
        size, columns = mQ.shape[0], mA.shape[1] // BLOCK
        group = Int32(0)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        for index in cutlass.range(first_tile, total, step):
            group, first, row, _, shared = self.place(walk, index, group)
            begin = scale + (Int64(group) * size + first) * columns
            count = cutlass.min(size - first, tile_m) * columns
            for line in cutlass.range(lane * LINE, count, WARP * LINE, unroll=1):
                cute.arch.prefetch((begin + line).llvm_ptr, cache_level="L2")
            gQ = cute.local_tile(
                cute.domain_offset((first, 0), mQ[None, None, group]), (tile_m, tile_k // 2), (0, None)
            )
            gA = cute.local_tile(cute.domain_offset((row, 0), mA), (tile_n, tile_k), (0, None))
            tQsQ, tQgQ = self.partition(tma_q, sQ, gQ)
            tAsA, tAgA = self.partition(tma_a, sA, gA)
            policy = evict_first_if(shared == 1)  # a matrix that no other tile needs makes room first
            for k in cutlass.range(k_tiles, unroll=1):
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(tma_q, tQgQ[None, k], tQsQ[None, state.index], tma_bar_ptr=full, cache_policy=policy)
                cute.copy(
                    tma_a, tAgA[None, k], tAsA[None, state.index], tma_bar_ptr=full, cache_policy=Int64(EVICT_NORMAL)
                )
                state.advance()
        ring.producer_tail(state)

    def partition(self, tma, ring, tiles):
        """An operand's ring, and its tiles of K, as TMA copies them."""
        return cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(ring, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    @cute.jit
    def multiply_tiles(
        self,
        tiled_mma: cute.TiledMma,
        ring,
        sQ: cute.Tensor,
        sA: cute.Tensor,
        scale: cute.Pointer,
        d: cute.Tensor,
        columns: Int32,
        walk: tuple,
        tiles: tuple,
        k_tiles: Int32,
        thread: Int32,
    ):
        tile_m, tile_n, tile_k = self.tile
        first_tile, total, step = tiles
        # A thread's rows of an instruction's 16 are ``row`` and 8 further; of 16 k its pairs are ``pair`` and 4 further
        row, pair = thread // WARP * 16 + thread % WARP // 4, thread % 4
        elements = cute.recast_ptr(sQ.iterator, dtype=Uint16)
        thr_mma = tiled_mma.get_slice(thread)
        tCcD = thr_mma.partition_C(cute.make_identity_tensor((tile_m, tile_n)))
        sums = cute.make_rmem_tensor(tCcD.shape[:3], Float32)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 2 if tile_n == 8 else 4), BFloat16)
        copy = cute.make_tiled_copy_B(atom, tiled_mma)
        tAsA = copy.get_slice(thread).partition_S(sA)
        rA = cute.make_rmem_tensor(thr_mma.partition_B(sA).shape[:3], BFloat16)
        tArA = copy.retile(rA)
        rQ = cute.make_rmem_tensor(((2, 2, 2), self.parts), BFloat16)
        words = cute.recast_tensor(rQ, Int32)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        group = Int32(0)
        for index in cutlass.range(first_tile, total, step):
            group, first, first_row, end, _ = self.place(walk, index, group)
            sums.fill(0.0)
            scales = self.load_scales(scale, Int64(group) * d.shape[0], first + row, d.shape[0], columns, Int32(0))
            for k in cutlass.range(k_tiles, unroll=1):
                ahead = self.load_scales(scale, Int64(group) * d.shape[0], first + row, d.shape[0], columns, k + 1)
                ring.consumer_wait(state)
                tile = elements + (state.index * (tile_m * tile_k // 2) + row * (tile_k // 2) + pair)
                for block in cutlass.range_constexpr(tile_k // BLOCK):
                    factors = self.factors(scales, block)
                    for half in cutlass.range_constexpr(2):
                        k16 = const_expr(2 * block + half)
                        cute.copy(copy, tAsA[None, None, k16, state.index], tArA[None, None, k16])
                        at = (row % 8 ^ k16) * 8  # swizzled: where a row's 16 bytes lie among its 128
                        for i in cutlass.range_constexpr(4 * self.parts):
                            of_row, of_k = const_expr(i // 4 * 16 * WARPS + i % 2 * 8), const_expr(i // 2 % 2)
                            bits = self.load(tile + (at + of_row * (tile_k // 2) + 4 * of_k))
                            words[i] = dequantized(bits, factors[i // 4 * 2 + i % 2])
                        cute.gemm(tiled_mma, sums, rQ, rA[None, None, k16], sums)
                ring.consumer_release(state)
                state.advance()
                for i in cutlass.range_constexpr(2 * self.parts):
                    scales[i] = ahead[i]
            left = corner_of(d, first, first_row, d.shape[0], end, d.element_type.width // 8)
            store_sums(sums, tCcD, left, None, Int32(0), Int32(0), None)

    @cute.jit
    def load(self, pointer: cute.Pointer):
        """A word of what lies there; its upper bits, if that is shorter, are copies of the sign."""
        return cute.make_tensor(pointer, cute.make_layout(1))[0].to(Int32)

    @cute.jit
    def load_scales(self, scale: cute.Pointer, rows_before: Int64, row: Int32, rows: Int32, columns: Int32, k: Int32):
        """The four scales of a tile of K of each of a thread's rows, a word each.

        Beyond the last row or block the last one's: what it scales are zeros, or is not stored.
        """
        vec = const_expr(self.scale_vec)
        words = cute.make_rmem_tensor((2 * self.parts,), Int32)
        for i in cutlass.range_constexpr(2 * self.parts):
            here = cutlass.min(row + const_expr(i // 2 * 16 * WARPS + i % 2 * 8), rows - 1)
            line = scale + cute.assume((rows_before + here) * columns, divby=vec)
            word = Int32(0)
            for j in cutlass.range_constexpr(0, 4, vec):
                at = line + cute.assume(cutlass.min(4 * k + j, columns - vec), divby=vec)
                loaded = self.load(cute.recast_ptr(at, dtype=WORDS[vec])) & MASKS[vec]
                word = word | loaded << 8 * j
            words[i] = word
        return words

    @cute.jit
    def factors(self, scales: cute.Tensor, block: cutlass.Constexpr[int]):
        """2^(s - 127), twice in a word, of a block of each row."""
        found = cute.make_rmem_tensor((cute.size(scales),), Int32)
        for i in cutlass.range_constexpr(cute.size(scales)):
            bits = Int32(cute.arch.prmt(scales[i], 0, 0x0404 | block << 4 | block << 12)) >> 1 & 0x7F807F80
            bits = cutlass.max(bits, 0x00400040)  # of s = 0 the number is subnormal
            found[i] = cute.arch.fma_packed_bf16x2(bits, Int32(0), bits)  # of s = 255 infinity becomes NaN
        return found

    @cute.jit
    def clear_rest(self, d: cute.Tensor, end: Int32, cta: Int32, ctas: Int32, thread: Int32):
        """Zero the rows beyond the last group, which are whole vectors of 16 bytes."""
        vec = const_expr(128 // d.element_type.width)
        zeros = cute.make_rmem_tensor((vec,), d.element_type)
        zeros.fill(0.0)
        for row in cutlass.range(end + cta, d.shape[1], ctas):
            for vector in cutlass.range(thread, d.shape[0] // vec, WARPS * WARP):
                pointer = (d.iterator + cute.crd2idx((vector * vec, row), d.layout)).align(16)
                cute.autovec_copy(zeros, cute.make_tensor(pointer, cute.make_layout(vec)))


@cute.jit
def dequantized(bits: Int32, factor: Int32) -> Int32:
    """Two e4m3 elements, the lower 16 ``bits``, as bf16, times a factor."""
    spread = Int32(cute.arch.prmt(bits, 0, 0x9180))  # bytes 0, its sign, 1, its sign
    placed = spread << 4 & -0x780F7810
    exact = cute.arch.fma_packed_bf16x2(placed, Int32(TWO_TO_120), Int32(MINUS_ZEROS))
    return cute.arch.fma_packed_bf16x2(exact, factor, Int32(MINUS_ZEROS))


@compiled
def grouped_mxfp8(arch: str, spec: GroupedMxfp8Spec, config: GemmConfig) -> Program:
    """d (R, N) of rows a (R, K), and q (E, N, K) with scales (E, N, K / 32) of groups that end at ``offs`` (E,)."""
    rows, n, groups = cute.sym_int(), cute.sym_int(divisibility=BLOCK), cute.sym_int()
    k = cute.sym_int(divisibility=BLOCK * spec.scale_vec)
    columns = cute.sym_int(divisibility=spec.scale_vec)
    return Program(
        GroupedMxfp8Sm90(config, spec.scale_vec),
        symbolic_matrix(BFloat16, (rows, k), True),
        cute.runtime.make_fake_compact_tensor(
            cutlass.Float8E4M3FN, (groups, n, k), stride_order=(2, 1, 0), assumed_align=16
        ),
        cute.runtime.make_fake_compact_tensor(
            cutlass.Float8E8M0FNU, (groups, n, columns), stride_order=(2, 1, 0), assumed_align=spec.scale_vec
        ),
        symbolic_matrix(cutlass_dtype(spec.out), (rows, n), True),
        cute.runtime.make_fake_compact_tensor(Int32, (groups,), assumed_align=4),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
