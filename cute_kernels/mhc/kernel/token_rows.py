"""The operands beside x of ``projection_backward``'s tokens: from global memory to a ring in shared memory."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from cute_kernels.mhc.config import ProjectionBackwardConfig
from cute_kernels.mhc.kernel.streams import WARP_SIZE


class TokenRows:
    """By slot of the ring: dH (as terms), R, pre and the factor of x. A warp fetches a tile's rows, then puts them."""

    def __init__(self, config: ProjectionBackwardConfig, smem, orientation: Optional[str], has_layer_grad: bool):
        self.config = config
        self.orientation = orientation
        self.has_layer_grad = has_layer_grad
        n, tile_m, stages = config.n, config.tile_m, config.stages
        self.pitch = n * n + 4 if n >= 4 else n * n
        self.unit = 1 if config.columns % 2 else 2  # numbers of dH that a lane has side by side
        width = config.terms_columns
        layout = cute.make_layout((tile_m, width, stages), stride=(width + 8, 1, tile_m * (width + 8)))
        self.sH = smem.allocate_tensor(BFloat16, layout, byte_alignment=16)
        self.sScale = smem.allocate_tensor(Float32, cute.make_layout((tile_m, stages)), byte_alignment=16)
        if orientation is not None:
            layout = cute.make_layout((tile_m, n * n, stages), stride=(self.pitch, 1, tile_m * self.pitch))
            self.sRes = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        if has_layer_grad:
            layout = cute.make_layout((tile_m, n, stages), stride=(n, 1, tile_m * n))
            self.sPre = smem.allocate_tensor(Float32, layout, byte_alignment=16)

    @cute.jit
    def clear(self, tidx: Int32, threads: cutlass.Constexpr[int]):
        """Zeros where no term of dH will be written, but columns of phi be multiplied, if there are such columns."""
        pointer = self.sH.iterator
        if const_expr(self.config.order * self.config.columns < self.config.terms_columns):
            for index in cutlass.range(tidx, cute.cosize(self.sH.layout), threads):
                pointer[index] = BFloat16(0.0)

    def fetch(self, dh, dmean_square, res, pre, first_row: Int32, num_tokens: Int32, lane: Int32) -> tuple:
        """A lane's share of the rows of a tile, zeros beyond the last token: of dH, dmean_square, res and pre."""
        n, tile_m = self.config.n, self.config.tile_m
        return (
            fetch_rows(dh, self.config.columns, tile_m, first_row, num_tokens, lane, self.unit),
            fetch_rows(dmean_square, 1, tile_m, first_row, num_tokens, lane, 1),
            None if self.orientation is None else fetch_rows(res, n * n, tile_m, first_row, num_tokens, lane, 1),
            fetch_rows(pre, n, tile_m, first_row, num_tokens, lane, 1) if self.has_layer_grad else None,
        )

    @cute.jit
    def put(self, rows, slot: Int32, lane: Int32):
        """Store what was fetched to a slot: dH in terms side by side, res as R(i, o) by rows of i."""
        config = self.config
        n, tile_m = const_expr(config.n), const_expr(config.tile_m)
        dh, dmean_square, res, pre = rows
        sH, sScale = self.sH, self.sScale
        unit = const_expr(self.unit)
        for v in cutlass.range_constexpr(cute.size(dh) // unit):
            token, j = (v * WARP_SIZE + lane) * unit // config.columns, (v * WARP_SIZE + lane) * unit % config.columns
            if token < tile_m:
                values = dh[None, v].load()
                for a in cutlass.range_constexpr(config.order):
                    term = cute.make_rmem_tensor((unit,), BFloat16)
                    term.store(values.to(BFloat16))
                    values = values - term.load().to(Float32)
                    place = cute.assume(sH.layout((token, a * config.padded_columns + j, slot)), divby=unit)
                    cute.autovec_copy(term, cute.make_tensor(sH.iterator + place, cute.make_layout(unit)))
        for v in cutlass.range_constexpr(cute.size(dmean_square)):
            if v * WARP_SIZE + lane < tile_m:
                sScale[v * WARP_SIZE + lane, slot] = dmean_square[v] * (2.0 / config.k)
        if const_expr(self.orientation is not None):
            sRes = self.sRes
            for v in cutlass.range_constexpr(cute.size(res)):
                token, at = (v * WARP_SIZE + lane) // (n * n), (v * WARP_SIZE + lane) % (n * n)
                if const_expr(self.orientation == "oi"):
                    at = at % n * n + at // n
                if token < tile_m:
                    sRes[token, at, slot] = res[v]
        if const_expr(self.has_layer_grad):
            sPre = self.sPre
            for v in cutlass.range_constexpr(cute.size(pre)):
                if v * WARP_SIZE + lane < tile_m * n:
                    sPre[(v * WARP_SIZE + lane) // n, (v * WARP_SIZE + lane) % n, slot] = pre[v]

    @cute.jit
    def scale(self, slot: Int32, token: Int32):
        """The factor of x: 2 dmean_square / K."""
        return self.sScale[token, slot]

    @cute.jit
    def weights(self, slot: Int32, token: Int32):
        """R(i, o) of a token."""
        values = cute.make_rmem_tensor((self.config.n**2,), Float32)
        if const_expr(self.orientation is not None):
            cute.autovec_copy(self.sRes[token, None, slot], values)
        return values

    @cute.jit
    def row(self, slot: Int32, token: Int32, i: Int32):
        """R(i, o) of a token for one i."""
        n = const_expr(self.config.n)
        values = cute.make_rmem_tensor((n,), Float32)
        start = self.sRes.iterator + (slot * (self.config.tile_m * self.pitch) + token * self.pitch + i * n)
        start = start.align(min(16, 4 * n))
        cute.autovec_copy(cute.make_tensor(start, cute.make_layout(n)), values)
        return values

    @cute.jit
    def gates(self, slot: Int32, token: Int32):
        """pre of a token."""
        values = cute.make_rmem_tensor((self.config.n,), Float32)
        if const_expr(self.has_layer_grad):
            cute.autovec_copy(self.sPre[token, None, slot], values)
        return values

    @cute.jit
    def gate(self, slot: Int32, token: Int32, i: Int32):
        """pre of one stream of a token."""
        return self.sPre[token, i, slot]


@cute.jit
def fetch_rows(
    source: cute.Tensor,
    width: cutlass.Constexpr[int],
    rows: cutlass.Constexpr[int],
    first_row: Int32,
    num_rows: Int32,
    lane: Int32,
    unit: cutlass.Constexpr[int],
):
    """A lane's share of ``rows`` contiguous rows of ``width`` fp32 values, ``unit`` (a divisor of it) side by side;
    zeros beyond the last row.
    """
    values = cute.make_rmem_tensor((unit, -(-rows * width // (unit * WARP_SIZE))), Float32)
    values.fill(0.0)
    start = source.iterator + (Int64(first_row) * width + unit * lane)
    left = cutlass.min(num_rows - first_row, rows) * width - unit * lane
    for v in cutlass.range_constexpr(cute.size(values) // unit):
        if v * unit * WARP_SIZE < left:
            for e in cutlass.range_constexpr(unit):
                values[e, v] = start[v * unit * WARP_SIZE + e]
    return values
