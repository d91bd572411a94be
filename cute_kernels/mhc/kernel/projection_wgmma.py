"""The products of projection_split.py where phi has many rows (eight streams), for bf16 x on SM90: by warpgroup MMA.

In the registers of warps the terms of 80 rows would be read and split again for every 64 tokens: see
wgmma_products.py for what is done instead. The CTAs of a pair have neighbouring blocks of tokens, and share a tile
of phi, whose terms are further rows of one operand: an instruction multiplies x with all of them; a thread has the sums
of all terms of its products, and adds them at the end, the smallest first. Two warpgroups multiply, one splits phi; of
the fourth a warp feeds the ring, three add the squares of x.

Parts of K and partials are those of projection_split.py; a token's bits do not depend on the others, or on the CTA.

Profile: ncu --clock-control none -k regex:Projection python -m bench.bench_mhc --filter projection.fwd.4096x8x4096
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cute_kernels.common.cache_hints import LAST_BYTES, evict_first_if
from cute_kernels.common.cluster_barriers import wait_in_cluster
from cute_kernels.common.convert import to_fp32
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.rows import symbolic_vector
from cute_kernels.mhc.config import TILE_K, ProjectionSpec, WarpgroupProjectionConfig
from cute_kernels.mhc.kernel.projection_split import terms_of
from cute_kernels.mhc.kernel.streams import WARP_SIZE, symbolic_streams, take_registers
from cute_kernels.mhc.kernel.tile_ring import advance, load_box
from cute_kernels.mhc.kernel.wgmma_products import CLUSTER, THREADS, WARPGROUP, WgmmaProducts, swizzled
from jit_cache import Program, compiled

Dtype = type[cutlass.Numeric]
CONSUMERS = 2  # warpgroups that multiply
SPLITTER, LOADER = 8, 12  # the first warp of those that split phi, and the one that feeds the ring
SQUARE_WARPS = 3
REGISTERS = (200, 56)  # of a thread that multiplies, of another


class ProjectionWgmmaForward(WgmmaProducts):
    """partials[s, j, m] = sum over part s of K of x[m, k] phi'[j, k], and at j = N the sum of x[m, k]^2."""

    def __init__(self, config: WarpgroupProjectionConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        phi: cute.Tensor,
        norm_weight: Optional[cute.Tensor],
        partials: cute.Tensor,
        num_clusters: Int32,
        stream,
    ):
        config = self.config
        self.phi_type = phi.element_type
        self.phi_box = const_expr(128 * 8 // phi.element_type.width)  # columns that 128 bytes of a row hold
        majors = OperandMajorMode.K, OperandMajorMode.K
        tiled_mma = self.tiled_mma(majors, config.instruction_rows, (CONSUMERS, 1, 1))
        load, multicast = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
        shape = (config.tokens, TILE_K)
        tma_x, mX = cpasync.make_tiled_tma_atom(load, x, swizzled(shape, 3), shape)
        shape = (config.padded_columns, self.phi_box)
        tma_phi, mPhi = cpasync.make_tiled_tma_atom(multicast, phi, swizzled(shape, 3), shape)
        self.kernel(tiled_mma, tma_x, mX, tma_phi, mPhi, norm_weight, partials).launch(
            grid=[num_clusters * CLUSTER, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    def operand_layout(self, rows: int):
        """A ring of tiles as warpgroup MMA reads them: (rows, k, stages)."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        return cute.tile_to_shape(atom, (rows, TILE_K, self.config.stages), order=(0, 1, 2))

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        tma_x: cute.CopyAtom,
        mX: cute.Tensor,
        tma_phi: cute.CopyAtom,
        mPhi: cute.Tensor,
        norm_weight: Optional[cute.Tensor],
        partials: cute.Tensor,
    ):
        config = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        self.rank = bidx % CLUSTER
        blocks = cute.ceil_div(partials.shape[2], CLUSTER * config.tokens)
        self.first, self.items, self.step = bidx // CLUSTER, blocks * config.splits, grid // CLUSTER

        smem = SmemAllocator()
        x_layout, term_layout = self.operand_layout(config.tokens), self.operand_layout(config.term_rows)
        self.sX = smem.allocate_tensor(BFloat16, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner)
        memory = smem.allocate(2 * cute.cosize(term_layout.outer), byte_alignment=1024)
        self.sTerms = cute.make_tensor(cute.recast_ptr(memory, term_layout.inner, BFloat16), term_layout.outer)
        # Box after box of phi as it comes, in the slot of the terms
        rows, width = const_expr(config.padded_columns), const_expr(self.phi_box)
        slot_size = const_expr(config.term_rows * TILE_K * 16 // self.phi_type.width)
        boxes = cute.make_layout(
            (rows, width, TILE_K // width, config.stages), stride=(width, 1, rows * width, slot_size)
        )
        self.sPhi = cute.make_tensor(cute.recast_ptr(memory, term_layout.inner, self.phi_type), boxes)
        self.meet(smem, tidx, TILE_K // width, WARPGROUP, CLUSTER * CONSUMERS * 4 + SQUARE_WARPS * WARP_SIZE)

        if warp_index < SPLITTER:
            take_registers(REGISTERS[0], THREADS)
            self.multiply(tiled_mma, partials, tidx)
        else:
            take_registers(REGISTERS[1], THREADS)
            if warp_index < LOADER:
                self.split_phi(norm_weight, tidx - SPLITTER * WARP_SIZE)
            elif warp_index == LOADER:
                self.load(tma_x, mX, tma_phi, mPhi)
            else:
                self.square(partials, tidx - (LOADER + 1) * WARP_SIZE)
        self.part()

    def block_of(self, item):
        """The block of tokens of this CTA's item."""
        return item // self.config.splits * CLUSTER + self.rank

    @cute.jit
    def tiles_of(self, item: Int32):
        """Tiles of an item: tiles s, s + S, ... of K, one at least."""
        splits = const_expr(self.config.splits)
        return cutlass.max(cute.ceil_div(self.config.tiles - item % splits, splits), 1)

    @cute.jit
    def load(self, tma_x: cute.CopyAtom, mX: cute.Tensor, tma_phi: cute.CopyAtom, mPhi: cute.Tensor):
        """One warp: tiles of x, and of phi each CTA every second box for both."""
        config = self.config
        splits, boxes = const_expr(config.splits), const_expr(TILE_K // self.phi_box)
        tile_bytes = const_expr(config.tokens * 128 + config.padded_columns * 128 * boxes)
        num_tokens, last_tokens = mX.shape[0], const_expr(LAST_BYTES // (2 * config.k))
        slot, phase = Int32(0), Int32(0)
        for item in cutlass.range(self.first, self.items, self.step):
            block = self.block_of(item)
            # The last tokens stay for aggregate, which takes them first
            policy = evict_first_if(num_tokens - block * config.tokens > last_tokens)
            for index in cutlass.range(self.tiles_of(item)):
                k = item % splits + index * splits
                wait_in_cluster(self.empty + slot, phase ^ 1)
                full = self.full + slot
                self.expect(full, tile_bytes, boxes)
                for box in cutlass.range_constexpr(boxes):
                    gPhi = cute.local_tile(mPhi, (config.padded_columns, self.phi_box), (0, k * boxes + box))
                    self.load_shared(tma_phi, gPhi, self.sPhi[None, None, box, slot], full, self.rank == box % CLUSTER)
                gX = cute.local_tile(mX, (config.tokens, TILE_K), (block, k))
                load_box(tma_x, gX, self.sX[None, None, slot], full, policy)
                slot, phase = advance(slot, phase, config.stages)

    @cute.jit
    def split_phi(self, norm_weight: Optional[cute.Tensor], thread: Int32):
        """A warpgroup: phi' of a tile as bf16 terms, in its place.

        Eight threads take a row, eight columns each, and write term t to row t N + j. All that they write over is
        theirs: the row's 128 bytes of a box are those of a term.
        """
        config = self.config
        rows, width = const_expr(config.padded_columns), const_expr(self.phi_box)
        splits, first = const_expr(config.splits), thread % 8 * 8
        sPhi, sTerms = self.sPhi, self.sTerms
        slot, phase = Int32(0), Int32(0)
        for item in cutlass.range(self.first, self.items, self.step):
            for index in cutlass.range(self.tiles_of(item)):
                weights = cute.make_rmem_tensor((8,), Float32)
                if const_expr(norm_weight is not None):
                    first_k = (item % splits + index * splits) * TILE_K + first
                    for e in cutlass.range_constexpr(8):
                        weights[e] = norm_weight[cutlass.min(first_k + e, config.k - 1)].to(Float32)
                cute.arch.mbarrier_wait(self.full + slot, phase)
                for turn in cutlass.range_constexpr(-(-rows * 8 // WARPGROUP)):
                    row = turn * (WARPGROUP // 8) + thread // 8
                    values = cute.make_rmem_tensor((8,), self.phi_type)
                    if row < rows:
                        for part in cutlass.range_constexpr(8 * self.phi_type.width // 128):
                            count = const_expr(128 // self.phi_type.width)
                            at = first + part * count
                            place = sPhi.layout((row, at % width, at // width, slot))
                            source = sPhi.iterator + cute.assume(place, divby=count)
                            target = cute.make_tensor(values.iterator + part * count, cute.make_layout(count))
                            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), target)
                    cute.arch.sync_warp()
                    if row < rows:
                        numbers = values.load().to(Float32)
                        if const_expr(norm_weight is not None):
                            numbers = numbers * weights.load()
                        terms = terms_of(numbers, (8,), config.phi_terms)
                        for t in cutlass.range_constexpr(config.phi_terms):
                            place = slot * (config.term_rows * TILE_K) + (t * rows + row) * TILE_K + first
                            target = sTerms.iterator + cute.assume(place, divby=8)
                            cute.autovec_copy(terms[t], cute.make_tensor(target, cute.make_layout(8)))
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.mbarrier_arrive(self.split + slot)
                slot, phase = advance(slot, phase, config.stages)

    @cute.jit
    def square(self, partials: cute.Tensor, thread: Int32):
        """Three warps: the sums of squares, a token a thread at a time; of a tile every eighth column by itself."""
        config, sX = self.config, self.sX
        threads = const_expr(SQUARE_WARPS * WARP_SIZE)
        sums = cute.make_rmem_tensor((-(-config.tokens // threads),), Float32)
        slot, phase = Int32(0), Int32(0)
        for item in cutlass.range(self.first, self.items, self.step):
            sums.fill(0.0)
            for _ in cutlass.range(self.tiles_of(item)):
                cute.arch.mbarrier_wait(self.full + slot, phase)
                for turn in cutlass.range_constexpr(cute.size(sums)):
                    token = turn * threads + thread
                    if token < config.tokens:
                        squares = cute.make_rmem_tensor((8,), Float32)
                        squares.fill(0.0)
                        for part in cutlass.range_constexpr(TILE_K // 8):
                            place = slot * (config.tokens * TILE_K) + token * TILE_K + part * 8
                            source = sX.iterator + cute.assume(place, divby=8)
                            words = cute.make_rmem_tensor((8,), BFloat16)
                            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(8)), words)
                            values = to_fp32(words.load())
                            squares.store(squares.load() + values * values)
                        values = [squares[e] for e in range(8)]
                        while const_expr(len(values) > 1):
                            values = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
                        sums[turn] = sums[turn] + values[0]
                cute.arch.mbarrier_arrive(self.empty + slot)
                slot, phase = advance(slot, phase, config.stages)
            for turn in cutlass.range_constexpr(cute.size(sums)):
                token = turn * threads + thread
                row = self.block_of(item) * config.tokens + token
                if token < config.tokens and row < partials.shape[2]:
                    partials[item % config.splits, config.columns, row] = sums[turn]

    @cute.jit
    def multiply(self, tiled_mma: cute.TiledMma, partials: cute.Tensor, tidx: Int32):
        """Two warpgroups: x times all terms of phi, of every item."""
        config = self.config
        thr_mma = tiled_mma.get_slice(cute.arch.make_warp_uniform(tidx // WARPGROUP) * WARPGROUP)
        tCrX = tiled_mma.make_fragment_A(thr_mma.partition_A(self.sX))
        tCrPhi = tiled_mma.make_fragment_B(thr_mma.partition_B(self.sTerms))
        sums, places = self.sums_of(tiled_mma, tidx, (config.tokens, config.term_rows))
        slot, phase = Int32(0), Int32(0)
        for item in cutlass.range(self.first, self.items, self.step):
            sums.fill(0.0)
            warpgroup.fence()
            for _ in cutlass.range(self.tiles_of(item)):
                cute.arch.mbarrier_wait(self.full + slot, phase)
                cute.arch.mbarrier_wait(self.split + slot, phase)
                for k16 in cutlass.range_constexpr(TILE_K // 16):
                    at = (None, None, k16, slot)
                    cute.gemm(tiled_mma, sums, tCrX[at], tCrPhi[at], sums)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                self.free(self.empty, slot)
                slot, phase = advance(slot, phase, config.stages)
            self.store(sums, places, partials, item)

    @cute.jit
    def store(self, sums: cute.Tensor, places: cute.Tensor, partials: cute.Tensor, item: Int32):
        """The sums of all terms of this thread's products."""
        config = self.config
        octets, per = const_expr(config.padded_columns // 8), const_expr(config.instruction_rows // 8)
        first_row, num_tokens = self.block_of(item) * config.tokens, partials.shape[2]
        for m in cutlass.range_constexpr(cute.size(sums, mode=[1])):
            for octet in cutlass.range_constexpr(octets):
                for half in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        at = places[(e, half, octet), m, 0]
                        row, column = first_row + at[0], at[1]
                        numbers = [t * octets + octet for t in range(config.phi_terms)]
                        terms = [sums[(e, half, i % per), m, i // per] for i in numbers]
                        total = terms[-1]
                        for term in terms[-2::-1]:
                            total = total + term
                        if row < num_tokens and column < config.columns:
                            partials[item % config.splits, column, row] = total


@compiled
def projection_forward_sm90(arch: str, spec: ProjectionSpec, config: WarpgroupProjectionConfig) -> Program:
    """partials (splits, N + 1, M) from bf16 x (M, K), phi (N, K) and norm_weight (K,)."""
    rows, phi = cute.sym_int(), cutlass_dtype(spec.phi)
    shape = config.splits, config.columns + 1, rows
    return Program(
        ProjectionWgmmaForward(config),
        symbolic_streams(BFloat16, rows, config.k, 8),
        symbolic_streams(phi, config.columns, config.k, 16 * 8 // phi.width),
        symbolic_vector(cutlass_dtype(spec.norm_weight), config.k),
        cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=(2, 1, 0), assumed_align=4),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
