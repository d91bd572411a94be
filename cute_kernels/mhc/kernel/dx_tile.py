"""The epilogue of a tile of dx: warpgroups add to its products and store it (projection_backward_wgmma.py).

    dx[m, k] = sum_j dH[m, j] phi'[j, k] + 2 x[m, k] dmean_square[m] / K
             + pre_i dlayer[m, c] + sum_o R(i, o) dout_o[m, c]

The sums are those of a wgmma: a thread has two neighbouring columns of every octet, of two tokens eight rows apart.
In a slice with sixteen channels of eight streams it has two channels of all streams (order of streams), or two streams
of all channels (order of channels), whose others it reads where they lie.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from cute_kernels.common.convert import to_fp32
from cute_kernels.mhc.config import SLICE_CHANNELS, TILE_TOKENS, WarpgroupBackwardConfig
from cute_kernels.mhc.kernel.streams import WARP_SIZE
from cute_kernels.mhc.kernel.wgmma_products import WARPGROUP

OCTET = 8  # columns of 16 bytes of bf16, of which a thread has two
RES_BOX = 32  # numbers of R that a copy brings, 128 bytes of each token


class DxTile:
    """``rings``: x in boxes, where dx goes, too; dout in the same, dlayer, R, or None where there is none of them."""

    def __init__(self, config: WarpgroupBackwardConfig, n: int, orientation: Optional[str], rings: tuple):
        self.config = config
        self.n = n
        self.orientation = orientation
        self.sX, self.sOut, self.sLayer, self.sRes = rings

    @cute.jit
    def load_gates(self, pre, row: Int32, tidx: Int32):
        """pre of a token: of all streams, or where these are side by side of the two that a thread has."""
        first, count = 0, const_expr(self.n)
        if const_expr(self.config.runs == 1):
            first, count = tidx % 4 * 2, const_expr(2)
        gates = cute.make_rmem_tensor((count,), Float32)
        if const_expr(self.sLayer is not None):
            source = pre.iterator + cute.assume(row * self.n + first, divby=count)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), gates)
        return gates

    @cute.jit
    def finish(self, sums: cute.Tensor, scales: list, gates: list, slot: Int32, res_slot: Int32, thread: Int32):
        """Add what comes by way of the mean square, and what else there is, and put dx in the place of x.

        The swizzle exchanges a row's units of 16 bytes, eight rows on it does the same again: so an element's address
        is one of as many as a box has units, found once, and constants.
        """
        config = self.config
        row, units = thread % WARPGROUP // WARP_SIZE * 16 + thread % WARP_SIZE // 4, const_expr(config.box // OCTET)
        boxes, size = const_expr(config.boxes // config.sharers), const_expr(TILE_TOKENS * config.box)
        start = (slot * config.boxes + thread // WARPGROUP * boxes) * size + row * config.box
        starts = [start + (unit ^ row * units // 8 % units) * OCTET for unit in range(units)]
        tile = plain_pointer(self.sX)
        for half in cutlass.range_constexpr(2):
            octets = range(boxes * units)
            places = [starts[octet % units] + (octet // units * size + half * 8 * config.box) for octet in octets]
            pairs = []
            for octet in cutlass.range_constexpr(boxes * units):
                own = tile + cute.assume(places[octet] + thread % 4 * 2, divby=2)
                pairs.append(cute.make_tensor(own, cute.make_layout(2)))
                words = cute.make_rmem_tensor((2,), BFloat16)
                cute.autovec_copy(pairs[octet], words)
                values = to_fp32(words.load())
                for e in cutlass.range_constexpr(2):
                    at = (e, half, octet), 0, 0
                    sums[at] = sums[at] + scales[half] * values[e]
            if const_expr(self.sLayer is not None):
                self.gather(sums, gates[half], slot, row + 8 * half, half)
            if const_expr(self.sOut is not None):
                self.combine(sums, places, res_slot, row + 8 * half, half, thread)
            for octet in cutlass.range_constexpr(boxes * units):
                words = cute.make_rmem_tensor((2,), BFloat16)
                for e in cutlass.range_constexpr(2):
                    words[e] = sums[(e, half, octet), 0, 0].to(BFloat16)
                cute.autovec_copy(words, pairs[octet])

    @cute.jit
    def gather(self, sums: cute.Tensor, gates: cute.Tensor, slot: Int32, row: Int32, half: cutlass.Constexpr[int]):
        """Add a token's pre_i dlayer."""
        n, layer = const_expr(self.n), plain_pointer(self.sLayer)
        start, swap = (slot * TILE_TOKENS + row) * SLICE_CHANNELS, row // 4 % 2
        for unit in cutlass.range_constexpr(2):
            at = start + (unit ^ swap) * OCTET
            if const_expr(self.config.runs == 1):
                channels = load_fp32(layer + cute.assume(at, divby=OCTET), OCTET)
                for channel in cutlass.range_constexpr(OCTET):
                    for e in cutlass.range_constexpr(2):
                        place = (e, half, unit * OCTET + channel), 0, 0
                        sums[place] = sums[place] + gates[e] * channels[channel]
            else:
                pair = cute.arch.lane_idx() % 4 * 2
                channels = load_fp32(layer + cute.assume(at + pair, divby=2), 2)
                for i in cutlass.range_constexpr(n):
                    for e in cutlass.range_constexpr(2):
                        place = (e, half, i * 2 + unit), 0, 0
                        sums[place] = sums[place] + gates[i] * channels[e]

    @cute.jit
    def combine(
        self, sums: cute.Tensor, places: list, slot: Int32, row: Int32, half: cutlass.Constexpr[int], thread: Int32
    ):
        """Add a token's sum over o of R(i, o) dout_o, o ascending.

        ``places``: where its octets are in a slot of x's ring, and of dout's.
        """
        n, outs = const_expr(self.n), plain_pointer(self.sOut)
        if const_expr(self.config.runs == 1):
            first = thread % 4 * 2
            weights = [[None] * n, [None] * n]
            for o in cutlass.range_constexpr(n):
                if const_expr(self.orientation == "oi"):
                    pair = self.load_res(slot, row, o * n + first, 2)
                    weights[0][o], weights[1][o] = pair[0], pair[1]
                elif const_expr(o % 4 == 0):
                    for e in cutlass.range_constexpr(2):
                        four = self.load_res(slot, row, (first + e) * n + o, 4)
                        for v in cutlass.range_constexpr(4):
                            weights[e][o + v] = four[v]
            for octet in cutlass.range_constexpr(len(places)):
                streams = load_fp32(outs + cute.assume(places[octet], divby=OCTET), OCTET)
                for o in cutlass.range_constexpr(n):
                    for e in cutlass.range_constexpr(2):
                        place = (e, half, octet), 0, 0
                        sums[place] = sums[place] + weights[e][o] * streams[o]
        else:
            for o in cutlass.range_constexpr(0, n, 4):
                pair = thread % 4 * 2
                streams = [load_fp32(outs + cute.assume(places[o * 2 + v] + pair, divby=2), 2) for v in range(8)]
                for i in cutlass.range_constexpr(0, n, 4):
                    io = const_expr(self.orientation == "io")
                    fours = [self.load_res(slot, row, (i + v) * n + o if io else (o + v) * n + i, 4) for v in range(4)]
                    for v in cutlass.range_constexpr(4):
                        for u in cutlass.range_constexpr(4):
                            weight = fours[u][v] if const_expr(io) else fours[v][u]
                            for unit in cutlass.range_constexpr(2):
                                for e in cutlass.range_constexpr(2):
                                    place = (e, half, (i + u) * 2 + unit), 0, 0
                                    sums[place] = sums[place] + weight * streams[v * 2 + unit][e]

    @cute.jit
    def load_res(self, slot: Int32, row: Int32, index, count: cutlass.Constexpr[int]):
        """``count`` neighbouring numbers of a token's R, in memory from ``index`` on."""
        size, per_row = const_expr(TILE_TOKENS * RES_BOX), const_expr(RES_BOX // 4)
        start = (slot * (self.n**2 // RES_BOX) + index // RES_BOX) * size + row * RES_BOX
        place = start + (index % RES_BOX // 4 ^ row % per_row) * 4 + index % 4
        values = cute.make_rmem_tensor((count,), Float32)
        source = plain_pointer(self.sRes) + cute.assume(place, divby=count)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), values)
        return values


def plain_pointer(ring: cute.Tensor) -> cute.Pointer:
    """Where a ring begins, for addresses that have the swizzle in them."""
    return cute.make_ptr(ring.element_type, ring.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)


@cute.jit
def load_fp32(source: cute.Pointer, count: cutlass.Constexpr[int]):
    """``count`` bf16 numbers as fp32."""
    words = cute.make_rmem_tensor((count,), BFloat16)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), words)
    return to_fp32(words.load())
