"""A token's projection, its mean square and its layer input from one reading of x, by clusters that hold phi.

    H = x phi'^T,   pre = sigmoid(alpha H / rms + beta) + pre_eps,   layer_input[c] = sum_i pre_i x_i[c]

The CTAs of a cluster share K: each has ``slice_c`` channels of every stream, and phi' for them in the registers of its
multiplying warps, as bf16 terms (see projection_split.py), for as long as it lives. Clusters walk over blocks of 16
tokens. A block comes to shared memory once and stays there until the cluster knows its coefficients:

    gmem x --TMA--> ring in smem --ldmatrix--> mma with phi: a warp's sums --smem--> a CTA's sums
    --st.async--> the CTA that owns the token: H, mean_square, pre --st.async--> all CTAs: smem x --> layer_input

while the ring's other slots load, multiply and wait for the cluster's messages. For H alone a CTA loads at most
``lead`` blocks beyond the last whose H it knows: the CTAs of a cluster wait for their slowest anyway, and who is ahead
of it takes its share of the memory (4096x4x7168 72.2 -> 67.9 us, 2048x4x5120 32.1 -> 30.2, 8192x4x4096 79.2 -> 74.6).
In clusters of 16 a block comes in pieces, of which ``flight`` at most are on their way at once: what is beyond need
only puts bytes out of L2 that DRAM has yet to get. Clusters that have a block more than others may have one piece
more: all end together, and the memory is busy to the end. A piece is multiplied as soon as it has come, so that little
is left to do after the last one (2048x4x5120, blocks -> pieces, 29.0 -> 28.8).

Within a CTA warp w has the steps w, w + 8, ... of 16 columns; the warps' sums are added in ascending order, the CTAs'
as a tree: a token's bits depend on nothing but C, n, the order of the streams and the dtypes.

Profile: ncu --clock-control none -k regex:ProjectionCluster python -m bench.bench_mhc --filter pre.fwd.8192x4x4096
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.memory import SmemAllocator

from cute_kernels.common.cache_hints import EVICT_NORMAL, LAST_BYTES, evict_first_if
from cute_kernels.common.convert import to_fp32
from cute_kernels.common.dtypes import cutlass_dtype
from cute_kernels.common.reduce import float_bits
from cute_kernels.common.rows import symbolic_vector
from cute_kernels.mhc.config import BLOCK_TOKENS, PreConfig, PreSpec, StreamLayout
from cute_kernels.mhc.kernel.coefficients import Coefficients, sigmoid
from cute_kernels.mhc.kernel.streams import (
    WARP_SIZE,
    store_channels,
    symbolic_streams,
    take_registers,
    weighted_sum,
)
from cute_kernels.mhc.kernel.tile_ring import advance, by_stream, load_box
from cute_kernels.mhc.variants import Constants
from jit_cache import Program, compiled

Dtype = type[cutlass.Numeric]
BOX = 64  # columns that a TMA copy brings, 128 bytes of each token
PRODUCT_WARPS = 8
AHEAD = 4  # steps whose x a warp has asked for
MIX_WARPS = 4  # that make the layer input
SUM_WARPS = 2


def last_steps(config: PreConfig, start: int, step_bytes: int) -> dict[int, int]:
    """Slot of the ring -> the last step of phi of which it holds a part; phi begins at byte ``start`` of the ring."""
    slot_bytes = BLOCK_TOKENS * 128 * config.boxes
    first = start // slot_bytes
    steps = {slot: -(-((slot + 1) * slot_bytes - start) // step_bytes) for slot in range(first, config.stages)}
    return {slot: min(count, config.steps) - 1 for slot, count in steps.items()}


def row_of(lane):
    """A lane's row of an octet of phi: the even ones first, so that half a warp reads pairs of fp32 from all banks.

    Rows 2r and 2r + 1 have the same 32 bytes of a column in the same banks: the swizzle moves 16 bytes at a time.
    """
    return lane // 4 % 4 * 2 + lane // 16


class ProjectionClusterForward:
    """See the module; arguments as in the builder ``pre_forward``."""

    def __init__(self, config: PreConfig, constants: Optional[Constants]):
        self.config = config
        self.has_layer_input = constants is not None
        self.math = Coefficients(config.n, constants, True) if constants is not None else None
        self.paced = config.flight > 0 and not self.has_layer_input
        self.pieces = config.boxes // config.piece if self.paced else 1  # of a block
        self.gates = config.n if constants is not None else 1  # messages to every CTA for a token
        self.threads = (PRODUCT_WARPS + MIX_WARPS * self.has_layer_input + 4) * WARP_SIZE
        vec = 8 if config.layout == "streams" else 8 // config.n
        self.streams = StreamLayout(config.n, config.channels, config.layout, vec, vec, 1)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        phi: cute.Tensor,
        norm_weight: Optional[cute.Tensor],
        alpha: Optional[cute.Tensor],
        beta: Optional[cute.Tensor],
        h: Optional[cute.Tensor],
        mean_square: Optional[cute.Tensor],
        pre: Optional[cute.Tensor],
        layer_input: Optional[cute.Tensor],
        num_clusters: Int32,
        stream,
    ):
        config = self.config
        box = cute.make_layout((BLOCK_TOKENS, BOX), stride=(BOX, 1))
        box = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, box)
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_x, mX = cpasync.make_tiled_tma_atom(load, by_stream(config, x), box, (BLOCK_TOKENS, BOX))
        self.phi_type = phi.element_type
        self.phi_box = const_expr(128 * 8 // phi.element_type.width)
        rows = const_expr(8 * config.octets)
        box = cute.make_layout((rows, self.phi_box), stride=(self.phi_box, 1))
        box = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, box)
        tma_phi, mPhi = cpasync.make_tiled_tma_atom(load, by_stream(config, phi), box, (rows, self.phi_box))
        op = warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, 16))
        tiled_mma = cute.make_tiled_mma(op, permutation_mnk=(16, BLOCK_TOKENS, 16))
        self.kernel(
            tiled_mma, tma_x, mX, tma_phi, mPhi, norm_weight, alpha, beta, h, mean_square, pre, layer_input
        ).launch(
            grid=[num_clusters * config.cluster, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[config.cluster, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        tma_x: cute.CopyAtom,
        mX: cute.Tensor,
        tma_phi: cute.CopyAtom,
        mPhi: cute.Tensor,
        norm_weight: Optional[cute.Tensor],
        alpha: Optional[cute.Tensor],
        beta: Optional[cute.Tensor],
        h: Optional[cute.Tensor],
        mean_square: Optional[cute.Tensor],
        pre: Optional[cute.Tensor],
        layer_input: Optional[cute.Tensor],
    ):
        config = self.config
        stages, cluster = const_expr(config.stages), const_expr(config.cluster)
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane, warp_index = tidx % WARP_SIZE, cute.arch.make_warp_uniform(tidx // WARP_SIZE)
        rank = bidx % cluster
        self.num_tokens = mX.shape[0]

        smem = SmemAllocator()
        self.x_full = smem.allocate_array(Int64, self.pieces * stages)
        self.x_empty, self.h_full, self.gates_full = (smem.allocate_array(Int64, stages) for _ in range(3))
        self.sums_full, self.sums_empty = (smem.allocate_array(Int64, 2) for _ in range(2))
        self.phi_full, self.phi_empty = (smem.allocate_array(Int64, count) for count in (config.steps, stages))
        ring = cute.make_layout(
            (BLOCK_TOKENS, BOX, config.boxes, stages),
            stride=(BOX, 1, BLOCK_TOKENS * BOX, BLOCK_TOKENS * BOX * config.boxes),
        )
        memory = smem.allocate(2 * cute.cosize(ring), byte_alignment=1024)
        self.sX = cute.make_tensor(cute.recast_ptr(memory, cute.make_swizzle(3, 4, 3), BFloat16), ring)
        self.x_memory = cute.recast_ptr(memory, dtype=BFloat16)  # for those that swizzle once
        # Until it is in registers phi fills the end of the ring, a step of all warps after the other
        rows, boxes = const_expr(8 * config.octets), const_expr(config.boxes * BOX // self.phi_box)
        slices = cute.make_layout((rows, self.phi_box, boxes), stride=(self.phi_box, 1, rows * self.phi_box))
        start = const_expr(2 * cute.cosize(ring) - 128 * rows * boxes)
        self.sPhi = cute.make_tensor(cute.recast_ptr(memory + start, cute.make_swizzle(3, 4, 3), self.phi_type), slices)
        self.phi_memory = cute.recast_ptr(memory + start, dtype=self.phi_type)
        self.last_steps = last_steps(config, start, 128 * rows * boxes // config.steps)
        self.has_room = const_expr(0 not in self.last_steps)  # for a block beside phi
        sums = cute.make_layout((config.width, BLOCK_TOKENS, PRODUCT_WARPS, 2))
        self.sSums = smem.allocate_tensor(Float32, sums, byte_alignment=16)
        messages = cute.make_layout((config.width, config.owned, cluster, stages))
        self.sMessages = smem.allocate_tensor(Float32, messages, byte_alignment=16)
        gates = cute.make_layout((self.gates, BLOCK_TOKENS, stages))
        self.sGates = smem.allocate_tensor(Float32, gates, byte_alignment=16)
        loader = const_expr(PRODUCT_WARPS + MIX_WARPS * self.has_layer_input)
        registers = const_expr(config.registers(self.has_layer_input))
        self.blocks = cute.ceil_div(self.num_tokens, BLOCK_TOKENS)
        if tidx == 0:
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(self.x_empty + stage, loader * WARP_SIZE)
                cute.arch.mbarrier_init(self.h_full + stage, 1)
                cute.arch.mbarrier_init(self.gates_full + stage, SUM_WARPS)
                cute.arch.mbarrier_init(self.phi_empty + stage, PRODUCT_WARPS * WARP_SIZE)
            for piece in cutlass.range_constexpr(self.pieces * stages):
                cute.arch.mbarrier_init(self.x_full + piece, 1)
            for buffer in cutlass.range_constexpr(2):
                cute.arch.mbarrier_init(self.sums_full + buffer, PRODUCT_WARPS * WARP_SIZE)
                cute.arch.mbarrier_init(self.sums_empty + buffer, SUM_WARPS * WARP_SIZE)
            for s in cutlass.range_constexpr(config.steps):
                cute.arch.mbarrier_init(self.phi_full + s, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()
        cute.arch.barrier()
        cute.arch.cluster_arrive_relaxed()
        if warp_index == loader:
            # On its way while the cluster meets
            self.load_first(tma_x, mX, tma_phi, mPhi, rank, bidx // cluster, grid // cluster)
        cute.arch.cluster_wait()

        first, step = bidx // cluster, grid // cluster  # computed before, they spill (pre, 4x7168)
        rounds = cute.ceil_div(self.blocks - first, step)
        if warp_index < PRODUCT_WARPS:
            take_registers(registers[0], self.threads)
            self.multiply(tiled_mma, norm_weight, rank, rounds, warp_index, lane)
        elif warp_index < loader:
            if const_expr(self.has_layer_input):
                take_registers(registers[1], self.threads)
                self.mix(layer_input, rank, first, step, rounds, tidx - PRODUCT_WARPS * WARP_SIZE)
        else:
            take_registers(registers[2], self.threads)
            if warp_index == loader:
                self.load(tma_x, mX, rank, first, step, rounds)
            elif warp_index <= loader + SUM_WARPS:
                self.add_up(rank, rounds, warp_index - (loader + 1), lane)
            else:
                self.own(alpha, beta, h, mean_square, pre, rank, first, step, rounds, lane)

    @cute.jit
    def load_first(
        self,
        tma_x: cute.CopyAtom,
        mX: cute.Tensor,
        tma_phi: cute.CopyAtom,
        mPhi: cute.Tensor,
        rank: Int32,
        first: Int32,
        step: Int32,
    ):
        """The loading warp: a CTA's columns of phi, a step of all warps after the other; zeros beyond its edges.

        Amid them, if it is ``early``, the first block, which is on its way longer: it comes from DRAM.
        """
        rows, boxes = const_expr(self.sPhi.shape[0]), const_expr(self.sPhi.shape[2] // self.config.steps)  # of a step
        for s in cutlass.range_constexpr(self.config.steps):
            if const_expr(s == self.config.steps // 2 and self.has_room):
                if self.early(first, step):
                    self.load_block(tma_x, mX, rank, first * BLOCK_TOKENS, Int32(0), Int32(-self.pieces))
            full = self.phi_full + s
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, 128 * rows * boxes)
            for box in cutlass.range_constexpr(s * boxes, (s + 1) * boxes):
                self.copy_box(tma_phi, mPhi, Int32(0), rank, box, self.sPhi[None, None, box], full, Int64(EVICT_NORMAL))

    @cute.jit
    def early(self, first: Int32, step: Int32):
        """Whether the first block comes amid phi: where others wait for its slot (2048x4x5120 30.1 -> 29.8 us).

        Elsewhere it would only hold phi up (a token's layer input, 4x5120, 13.1 -> 13.6).
        """
        return self.has_room and self.blocks - first > self.config.stages * step

    @cute.jit
    def load(self, tma_x: cute.CopyAtom, mX: cute.Tensor, rank: Int32, first: Int32, step: Int32, rounds: Int32):
        """The loading warp: the other blocks, one after the other, to the ring."""
        config = self.config
        begins = Int32(self.early(first, step))
        slot, phase = begins, Int32(0)
        # One piece more where there is a block more than in other clusters, so that all end together
        flight = config.flight + Int32(rounds * step > self.blocks)
        for index in cutlass.range(begins, rounds):
            if index >= min(self.last_steps) and index < config.stages:
                cute.arch.mbarrier_wait(self.phi_empty + index, 0)
            cute.arch.mbarrier_wait(self.x_empty + slot, phase ^ 1)
            if const_expr(not self.has_layer_input):  # who makes the layer input has waited for them
                if index >= config.lead:
                    before = index - config.lead
                    cute.arch.mbarrier_wait(self.gates_full + before % config.stages, before // config.stages % 2)
            self.load_block(tma_x, mX, rank, (first + index * step) * BLOCK_TOKENS, slot, index * self.pieces - flight)
            slot, phase = advance(slot, phase, config.stages)

    @cute.jit
    def load_block(self, tma_x: cute.CopyAtom, mX: cute.Tensor, rank: Int32, row: Int32, slot: Int32, arrived: Int32):
        """Ask for a CTA's part of a block; where blocks are paced, for its first piece when piece ``arrived`` has come.

        In a loop: all copies one after the other took 30.5 us, not 29.0 (projection, 2048x4x5120).
        """
        config = self.config
        policy, ring = Int64(EVICT_NORMAL), const_expr(self.pieces * config.stages)
        if const_expr(not self.has_layer_input):  # the last tokens stay for aggregate, which takes them first
            policy = evict_first_if(self.num_tokens - row > LAST_BYTES // (2 * config.k))
        lane, full = cute.arch.lane_idx(), self.x_full + slot * self.pieces
        if const_expr(not self.paced):
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, config.boxes * BLOCK_TOKENS * BOX * 2)
        for piece in cutlass.range(config.boxes // config.piece, unroll=1):
            if const_expr(self.paced):
                before, full = arrived + piece, self.x_full + (slot * self.pieces + piece)
                if before >= 0:
                    cute.arch.mbarrier_wait(self.x_full + before % ring, before // ring % 2)
                if lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(full, config.piece * BLOCK_TOKENS * BOX * 2)
            for b in cutlass.range_constexpr(config.piece):
                box = piece * config.piece + b
                self.copy_box(tma_x, mX, row, rank, box, self.sX[None, None, box, slot], full, policy)

    @cute.jit
    def copy_box(
        self,
        atom,
        matrix,
        row: Int32,
        rank: Int32,
        box,
        target: cute.Tensor,
        mbar: cute.Pointer,
        policy: Int64,
    ):
        """A CTA's ``box``-th box of 128 bytes a row, the first row ``row``; zeros beyond the matrix.

        By an offset: a tile beyond the only one of its mode would be that one.
        """
        rows, width = const_expr(target.shape[0]), const_expr(target.shape[1])
        index, stream = self.box_coordinate(rank, box * width // BOX)
        corner = (row, index * BOX + box * width % BOX, stream)
        tile = cute.local_tile(cute.domain_offset(corner, matrix), (rows, width), (0, 0, 0))
        load_box(atom, tile, target, mbar, policy)

    def box_coordinate(self, rank, box):
        """(box of columns, stream) of a CTA's box."""
        config = self.config
        if config.layout == "streams":
            boxes = config.boxes // config.n  # of a stream
            return rank * boxes + box % boxes, box // boxes
        return rank * config.boxes + box, 0

    @cute.jit
    def multiply(
        self,
        tiled_mma: cute.TiledMma,
        norm_weight: Optional[cute.Tensor],
        rank: Int32,
        rounds: Int32,
        mine: Int32,
        lane: Int32,
    ):
        """A warp's products with phi and sums of squares, for every block."""
        config = self.config
        rPhi = self.terms_of_phi(tiled_mma, norm_weight, rank, mine, lane)
        sums = cute.make_rmem_tensor(tiled_mma.partition_shape_C((16 * config.row_tiles, BLOCK_TOKENS)), Float32)
        # A lane's row of a matrix that ldmatrix brings, as it lies in shared memory, in the ring's first slot; steps
        # and slots are whole turns of the swizzle away
        chunk = (mine % 4 * 2 + lane // 8 % 2) ^ (lane % 8)
        place = mine // 4 * (BLOCK_TOKENS * BOX) + (lane // 16 * 8 + lane % 8) * BOX + chunk * 8
        slot, phase = Int32(0), Int32(0)
        for index in cutlass.range(rounds):
            sums.fill(0.0)
            squares = [Float32(0.0), Float32(0.0)]
            start = slot * (config.boxes * BLOCK_TOKENS * BOX) + place
            for piece, steps in enumerate(self.steps_by_piece()):
                cute.arch.mbarrier_wait(self.x_full + (slot * self.pieces + piece), phase)
                operands = [self.operand(start, s) for s in steps[:AHEAD]]
                for at, s in enumerate(steps):
                    rX = operands[at]
                    if const_expr(at + AHEAD < len(steps)):
                        operands.append(self.operand(start, steps[at + AHEAD]))
                    cute.gemm(tiled_mma, sums, rPhi[None, None, s], rX[None, None, 0], sums)
                    values = to_fp32(rX.load())
                    for t in cutlass.range_constexpr(2):
                        for e in cutlass.range_constexpr(4):
                            squares[t] = squares[t] + values[t * 4 + e] * values[t * 4 + e]
            cute.arch.mbarrier_arrive(self.x_empty + slot)
            slot, phase = advance(slot, phase, config.stages)
            buffer, use = index % 2, index // 2 % 2
            cute.arch.mbarrier_wait(self.sums_empty + buffer, use ^ 1)
            self.put(sums, squares, self.sSums[None, None, mine, buffer], lane)
            cute.arch.mbarrier_arrive(self.sums_full + buffer)

    def steps_by_piece(self) -> list[list[int]]:
        """For each piece of a block, the steps that can be multiplied when it has come and those before it have."""
        boxes = self.config.boxes // self.pieces
        steps = range(self.config.steps)
        return [[s for s in steps if (2 * s + 1) // boxes == piece] for piece in range(self.pieces)]

    @cute.jit
    def operand(self, start: Int32, s: cutlass.Constexpr[int]):
        """A block's 16 columns of a warp's step as operand B; eight warps' steps are two boxes."""
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), BFloat16)
        place = cute.assume(start + s * (2 * BLOCK_TOKENS * BOX), divby=8)
        operand = cute.make_rmem_tensor(((2, 2), 2, 1), BFloat16)  # (column, token, 1)
        source = cute.make_tensor((self.x_memory + place).align(16), cute.make_layout((8, 1)))
        cute.copy(atom, source, cute.make_tensor(operand.iterator, cute.make_layout((8, 1))))
        return operand

    @cute.jit
    def put(self, sums: cute.Tensor, squares, target: cute.Tensor, lane: Int32):
        """A warp's sums, its terms of phi added, to shared memory (column, token)."""
        config = self.config
        for octet in cutlass.range_constexpr(config.octets):
            column = octet * 8 + row_of(lane)
            for t in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    total = sums[(e, octet % 2), octet // 2, t]
                    for b in cutlass.range_constexpr(1, config.phi_terms):
                        row = const_expr(b * config.octets + octet)
                        total = total + sums[(e, row % 2), row // 2, t]
                    if column < config.columns:
                        target[column, t * 8 + lane % 4 * 2 + e] = total
        for t in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(squares[t], threads_in_group=4)
            if lane % 4 == 0:
                target[config.columns, t * 8 + lane // 4] = total

    @cute.jit
    def terms_of_phi(self, tiled_mma, norm_weight, rank: Int32, mine: Int32, lane: Int32):
        """A warp's columns of phi' as operand A: octets of rows of term 0, then of term 1."""
        config = self.config
        shape = tiled_mma.partition_shape_A((16 * config.row_tiles, 16 * config.steps))
        rPhi = cute.make_rmem_tensor(shape, BFloat16)
        if const_expr(config.octets * config.phi_terms < 2 * config.row_tiles):
            rPhi.fill(0.0)
        words = cute.recast_tensor(rPhi, Int32)
        per_box, rows = const_expr(self.phi_box // 16), const_expr(8 * config.octets)
        # A lane's pairs of columns of step 0, as they lie in shared memory, in the first octet; others by constants
        width = const_expr(self.phi_type.width // 8)
        row = mine // per_box * rows + row_of(lane)
        columns = [mine % per_box * 16 + half * 8 + lane % 4 * 2 for half in range(2)]
        places = [row * self.phi_box + (column * width ^ row_of(lane) * 16) // width for column in columns]
        for s in cutlass.range_constexpr(config.steps):
            cute.arch.mbarrier_wait(self.phi_full + s, 0)
            step = s * PRODUCT_WARPS + mine
            weights = cute.make_rmem_tensor((2, 2), Float32)
            if const_expr(norm_weight is not None):
                weights.fill(0.0)
                for half in cutlass.range_constexpr(2):
                    inside, column = self.column_of(rank, 2 * step + half)
                    if inside:
                        for e in cutlass.range_constexpr(2):
                            weights[e, half] = norm_weight[column + lane % 4 * 2 + e].to(Float32)
            for octet in cutlass.range_constexpr(config.octets):
                for half in cutlass.range_constexpr(2):
                    beyond = const_expr((s * (PRODUCT_WARPS // per_box) * rows + octet * 8) * self.phi_box)
                    pair = cute.make_rmem_tensor((2,), self.phi_type)
                    source = self.phi_memory + cute.assume(places[half] + beyond, divby=2)
                    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), pair)
                    values = pair.load().to(Float32)
                    if const_expr(norm_weight is not None):
                        values = values * weights[None, half].load()
                    for b in cutlass.range_constexpr(config.phi_terms):
                        row = const_expr(b * config.octets + octet)
                        # As a word: two halves that wait to be packed would fill twice the registers
                        term = cute.make_rmem_tensor((2,), BFloat16)
                        word = cute.recast_tensor(term, Int32)
                        word[0] = cute.arch.inline_ptx(
                            "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};",
                            write_only_types=[Int32],
                            read_only_args=[values[1], values[0]],
                        )
                        words[(0, row % 2, half), row // 2, s] = word[0]
                        values = values - to_fp32(term.load())
            for slot in [slot for slot, last in self.last_steps.items() if last == s]:
                cute.arch.mbarrier_arrive(self.phi_empty + slot)
        return rPhi

    @cute.jit
    def column_of(self, rank: Int32, octet: Int32):
        """(whether it is inside, column of x) of the first of eight of a CTA's columns."""
        config = self.config
        tile, stream = self.box_coordinate(rank, octet // (BOX // 8))
        column = tile * BOX + octet % (BOX // 8) * 8
        if const_expr(config.layout == "streams"):
            inside = column < config.channels
            column = column + stream * config.channels
        else:
            inside = column < config.k
        return inside, column

    @cute.jit
    def add_up(self, rank: Int32, rounds: Int32, mine: Int32, lane: Int32):
        """Two warps: the sums of a CTA's warps in ascending order, each token's to the CTA that owns it."""
        config = self.config
        token, owned, quads = lane % 16, const_expr(config.owned), const_expr(config.width // 4)
        quad = mine * 2 + lane // 16
        source = token * config.width + quad * 4
        slot, phase = Int32(0), Int32(0)
        for index in cutlass.range(rounds):
            buffer, use = index % 2, index // 2 % 2
            cute.arch.mbarrier_wait(self.sums_full + buffer, use)
            # The slot's messages of the ring's turn before have been read by those that made these gates of them
            cute.arch.mbarrier_wait(self.gates_full + slot, phase ^ 1)
            # Both arrive: of few columns one sends nothing, and this turn could end before it has seen that one's end
            if lane == 0 and self.awaited(index, rounds):
                if mine == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(self.gates_full + slot, 4 * self.gates * BLOCK_TOKENS)
                else:
                    cute.arch.mbarrier_arrive(self.gates_full + slot)
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(-(-quads // (2 * SUM_WARPS))):
                if quad + i * 2 * SUM_WARPS < quads:
                    parts = cute.make_rmem_tensor((4, PRODUCT_WARPS), Float32)
                    for w in cutlass.range_constexpr(PRODUCT_WARPS):
                        place = self.sSums.layout((0, 0, w, buffer)) + (source + i * 8 * SUM_WARPS)
                        values = self.sSums.iterator + cute.assume(place, divby=4)
                        cute.autovec_copy(cute.make_tensor(values, cute.make_layout(4)), parts[None, w])
                    total = parts[None, 0].load()
                    for w in cutlass.range_constexpr(1, PRODUCT_WARPS):
                        total = total + parts[None, w].load()
                    place = self.sMessages.layout((0, token % owned, rank, slot)) + (quad * 4 + i * 8 * SUM_WARPS)
                    cute.arch.store_async_dsmem(
                        self.sMessages.iterator + cute.assume(place, divby=4),
                        tuple(float_bits(total[e]) for e in range(4)),
                        self.h_full + slot,
                        token // owned,
                    )
            cute.arch.mbarrier_arrive(self.sums_empty + buffer)
            slot, phase = advance(slot, phase, config.stages)
        # Nothing may arrive after a CTA's end
        last = rounds if self.has_layer_input else rounds - config.lead
        for stage in cutlass.range(cutlass.min(last, config.stages)):
            slot = (last + config.stages - 1 - stage) % config.stages
            cute.arch.mbarrier_wait(self.gates_full + slot, (last - 1 - stage) // config.stages % 2)

    @cute.jit
    def awaited(self, index: Int32, rounds: Int32):
        """Whether anybody waits for what follows from a block's sums: to mix, or to load ``lead`` blocks later."""
        return self.has_layer_input or index < rounds - self.config.lead

    @cute.jit
    def own(self, alpha, beta, h, mean_square, pre, rank: Int32, first: Int32, step: Int32, rounds: Int32, lane: Int32):
        """One warp: the sums of the CTA's own tokens, and what follows from them, to every CTA."""
        config = self.config
        columns, gates, owned = const_expr(config.columns), const_expr(self.gates), const_expr(config.owned)
        # A lane has some of the sums, one gate, and some of the messages
        sMessages = self.sMessages
        sums = const_expr((columns + 1) * owned)
        token, gate = lane // gates % owned, lane % gates
        if const_expr(self.has_layer_input):
            a, b = alpha[0].to(Float32), beta[gate].to(Float32)
        slot, phase = Int32(0), Int32(0)
        for index in cutlass.range(rounds):
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(self.h_full + slot, 4 * config.width * BLOCK_TOKENS)
            cute.arch.mbarrier_wait(self.h_full + slot, phase)
            first_row = (first + index * step) * BLOCK_TOKENS + rank * owned
            totals = cute.make_rmem_tensor((-(-sums // WARP_SIZE),), Float32)
            totals.fill(0.0)
            for part in cutlass.range_constexpr(cute.size(totals)):
                at = part * WARP_SIZE + lane
                if at < sums:
                    column, t = at % (columns + 1), at // (columns + 1)
                    values = [sMessages[column, t, source, slot] for source in range(config.cluster)]
                    while const_expr(len(values) > 1):
                        values = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
                    total = values[0]
                    if column == columns:
                        total = total * (1.0 / config.k)
                    totals[part] = total
            cute.arch.sync_warp()  # all have read the slot: what is told next lets others write to it
            value = Float32(0.0)
            if const_expr(self.has_layer_input):
                own_h = self.from_lane(totals, token * (columns + 1) + gate)
                own_square = self.from_lane(totals, token * (columns + 1) + columns)
                value = sigmoid(a * (own_h * self.math.inverse_rms(own_square)) + b) + self.math.constants.pre_eps
                if const_expr(pre is not None):
                    if first_row + token < self.num_tokens and lane < gates * owned:
                        pre[first_row + token, gate] = value
            for part in cutlass.range_constexpr(-(-gates * BLOCK_TOKENS // WARP_SIZE)):
                at = part * WARP_SIZE + lane
                message = cute.arch.shuffle_sync(value, at % (gates * owned))
                if at < gates * BLOCK_TOKENS and self.awaited(index, rounds):
                    t = at % (gates * owned) // gates
                    target = self.sGates.layout((at % gates, rank * owned + t, slot))
                    cute.arch.store_async_dsmem(
                        self.sGates.iterator + target,
                        float_bits(message),
                        self.gates_full + slot,
                        at // (gates * owned),
                    )
            if const_expr(h is not None):  # now that nobody waits
                for part in cutlass.range_constexpr(cute.size(totals)):
                    at = part * WARP_SIZE + lane
                    column, t = at % (columns + 1), at // (columns + 1)
                    if at < sums and first_row + t < self.num_tokens:
                        if column < columns:
                            h[first_row + t, column] = totals[part]
                        else:
                            mean_square[first_row + t] = totals[part]
            slot, phase = advance(slot, phase, config.stages)

    @cute.jit
    def from_lane(self, values: cute.Tensor, index: Int32):
        """The ``index``-th of the values of a warp's lanes, of which each has every 32nd."""
        found = Float32(0.0)
        for part in cutlass.range_constexpr(cute.size(values)):
            value = cute.arch.shuffle_sync(values[part], index % WARP_SIZE)
            found = value if index // WARP_SIZE == part else found
        return found

    @cute.jit
    def mix(self, layer_input, rank: Int32, first: Int32, step: Int32, rounds: Int32, thread: Int32):
        """Layer input of the CTA's channels, eight a thread."""
        config, s = self.config, self.streams
        token = thread // 8
        slot, phase = Int32(0), Int32(0)
        for index in cutlass.range(rounds):
            cute.arch.mbarrier_wait(self.x_full + slot, phase)
            cute.arch.mbarrier_wait(self.gates_full + slot, phase)
            row = (first + index * step) * BLOCK_TOKENS + token
            weights = cute.make_rmem_tensor((config.n,), Float32)
            cute.autovec_copy(self.sGates[None, token, slot], weights)
            for p in cutlass.range_constexpr(config.slice_c // BOX):
                streams = self.channels(slot, token, p, thread % 8)
                for part in cutlass.range_constexpr(8 // s.vec):
                    channel = rank * config.slice_c + self.channel(p, part, thread % 8)
                    if row < self.num_tokens and channel < config.channels:
                        view = cute.make_layout((s.vec, config.n), stride=(config.n, 1))
                        values = cute.make_tensor(streams.iterator + part * s.vec * config.n, view)
                        store_channels(weighted_sum(values, weights, s), layer_input, row, channel, True, s)
            cute.arch.mbarrier_arrive(self.x_empty + slot)
            slot, phase = advance(slot, phase, config.stages)

    @cute.jit
    def channels(self, slot: Int32, token: Int32, p: cutlass.Constexpr[int], thread: Int32):
        """Eight channels of all streams of a block's token, in fp32 (channel, stream); eight threads have 64."""
        config = self.config
        n = const_expr(config.n)
        fragment = cute.make_rmem_tensor(cute.make_layout((8, n), stride=(n, 1)), Float32)
        start = slot * (config.boxes * BLOCK_TOKENS * BOX) + token * BOX + thread * 8
        for i in cutlass.range_constexpr(n):
            if const_expr(config.layout == "streams"):
                box = i * (config.boxes // n) + p
            else:
                box = p * n + i
            place = cute.assume(start + box * (BLOCK_TOKENS * BOX), divby=8)
            words = cute.make_rmem_tensor((8,), BFloat16)
            cute.autovec_copy(cute.make_tensor(self.sX.iterator + place, cute.make_layout(8)), words)
            values = to_fp32(words.load())
            for e in cutlass.range_constexpr(8):
                if const_expr(config.layout == "streams"):
                    fragment[e, i] = values[e]
                else:
                    fragment[i * (8 // n) + e // n, e % n] = values[e]
        return fragment

    def channel(self, p: int, part: int, thread):
        """The first of this thread's channels of a part."""
        config = self.config
        if config.layout == "streams":
            return p * BOX + thread * 8
        return p * BOX + part * (BOX // config.n) + thread * (8 // config.n)


@compiled
def pre_forward(arch: str, spec: PreSpec, config: PreConfig) -> Program:
    """H (M, N) and mean_square (M,) where it keeps them, from bf16 x (M, K), phi (N, K) and norm_weight (K,).

    With constants there are layer_input (M, C) and, where it writes it, pre (M, n), too.
    """
    rows, n, phi = cute.sym_int(), config.n, cutlass_dtype(spec.phi)
    return Program(
        ProjectionClusterForward(config, spec.constants),
        symbolic_streams(BFloat16, rows, config.k, 8),
        symbolic_streams(phi, config.columns, config.k, 16 * 8 // phi.width),
        symbolic_vector(cutlass_dtype(spec.norm_weight), config.k),
        symbolic_vector(cutlass_dtype(spec.alpha), 3 if config.columns > n else 1),
        symbolic_vector(cutlass_dtype(spec.beta), config.columns),
        symbolic_streams(Float32, rows, config.columns, 1) if spec.keeps_h else None,
        symbolic_vector(Float32, rows) if spec.keeps_h else None,
        symbolic_streams(Float32, rows, n, 1) if spec.writes_pre else None,
        None if spec.constants is None else symbolic_streams(BFloat16, rows, config.channels, 8),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
