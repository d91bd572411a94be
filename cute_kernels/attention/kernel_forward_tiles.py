"""Which tiles of queries a CTA of the forward takes, in which order, and which blocks of keys a tile walks over."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import select_

from cute_kernels.attention.kernel_matrices import RAGGED_ROWS
from cute_kernels.attention.kernel_threads import WARP_SIZE, WARPGROUP, sum_to_lane


class Tile(NamedTuple):
    """A tile of queries of a head, and its sequence.

    Attributes:
        m: which tile of the sequence; -1: none.
        head: of q.
        batch_q, batch_k: in the first dimension of q, of k and v.
        first_q, first_k: the sequence's first rows there.
        len_q, len_k: its rows.
    """

    m: Int32
    head: Int32
    batch_q: Int32
    batch_k: Int32
    first_q: Int32
    first_k: Int32
    len_q: Int32
    len_k: Int32


class Blocks(NamedTuple):
    """Blocks of keys of a tile: first, end; of a warpgroup, from where to where all its rows see them as a whole."""

    first: Int32
    end: Int32
    seen_first: Int32
    seen_end: Int32


class ForwardTiles:
    """A part of a kernel of the forward.

    It has ``spec``, ``last_first``, ``causal``, ``window``, ``rows`` (of a warpgroup), ``tile_rows``, ``block``,
    ``warpgroups`` (that write), and of a call ``left``, ``right``, ``cu_seqlens_q``, ``cu_seqlens_k``, ``seqused_k``,
    over a cache ``appended`` and ``page_table``, and the divisors ``by_heads``, ``by_all_heads``, ``by_m_tiles``,
    ``by_pairs``.
    """

    def schedule(self, mQ: cute.Tensor, mK: cute.Tensor, num_tiles: Int32, paired: Int32):
        """Lengths and heads; how many turns this CTA has."""
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        self.bidx, self.grid, self.paired = bidx, grid, paired
        self.len_q, self.heads, self.len_k = mQ.shape[0], mQ.shape[2], mK.shape[0]
        if const_expr(self.spec.page_rows > 0):
            self.len_k *= self.page_table.shape[1]
        self.group = self.heads // mK.shape[2]
        self.m_tiles = cute.ceil_div(self.len_q, self.tile_rows)
        self.all_heads = self.heads * mQ.shape[3]
        last_first = self.causal or (self.window and self.last_first)
        self.longest_first = last_first and not self.spec.packed_q
        rounds, rest = num_tiles // grid, num_tiles % grid
        self.turns = rounds + Int32(select_(self.place(rounds) < rest, Int32(1), Int32(0)))
        if const_expr(self.longest_first and self.causal):
            units = cute.ceil_div(self.m_tiles, 2) * self.all_heads
            of_pairs = 2 * (units // grid + Int32(select_(bidx < units % grid, Int32(1), Int32(0))))
            self.turns = Int32(select_(paired != 0, of_pairs, self.turns))

    def place(self, turn: Int32) -> Int32:
        """The tile of this CTA in a round; every second round goes back: the longest tile, then the shortest."""
        if const_expr(self.longest_first):
            return Int32(select_(turn % 2 == 0, self.bidx, self.grid - 1 - self.bidx))
        return self.bidx

    def tile_at(self, turn: Int32) -> Tile:
        """Tiles of a head are neighbours, for its keys to stay in L2.

        Where rows see unequally many keys, two turns of a CTA are the last tile and the first one of a head, and so on:
        each two see the same number (``paired``). Otherwise the longest tiles of all heads are the first.
        """
        if const_expr(self.spec.packed_q):
            tile, head = divided(turn * self.grid + self.bidx, self.by_heads)
            sequence, m = self.find_sequence(tile)
        elif const_expr(self.longest_first):
            sequence, head, m = self.causal_tile(turn)
        else:
            head, m = divided(turn * self.grid + self.bidx, self.by_m_tiles)
            sequence, head = divided(head, self.by_heads)
        batch_q = batch_k = sequence
        first_q = first_k = Int32(0)
        len_q, len_k = self.len_q, self.len_k
        if const_expr(self.spec.packed_q):
            first_q = self.cu_seqlens_q[sequence]
            batch_q, len_q = Int32(0), self.cu_seqlens_q[sequence + 1] - first_q
        if const_expr(self.spec.packed_k):
            first_k = self.cu_seqlens_k[sequence]
            batch_k, len_k = Int32(0), self.cu_seqlens_k[sequence + 1] - first_k
        if const_expr(self.spec.used_k):
            used = self.seqused_k[sequence]
            if const_expr(self.spec.cached):
                used += self.appended * len_q
            len_k = cutlass.min(used, len_k)
        return Tile(m, head, batch_q, batch_k, first_q, first_k, len_q, len_k)

    @cute.jit
    def causal_tile(self, turn: Int32):
        """(Sequence, head, tile; -1: none)"""
        head, m = Int32(0), Int32(0)
        paired = False
        if const_expr(self.causal):
            paired = self.paired != 0
        if paired:
            head, m = divided(turn // 2 * self.grid + self.bidx, self.by_pairs)
            if turn % 2 == 0:
                m = self.m_tiles - 1 - m
            else:  # of an odd number the last tile is alone
                m -= self.m_tiles % 2
        else:
            m, head = divided(turn * self.grid + self.place(turn), self.by_all_heads)
            m = self.m_tiles - 1 - m
        sequence, head = divided(head, self.by_heads)
        return sequence, head, m

    @cute.jit
    def find_sequence(self, index: Int32):
        """(Sequence, its tile) of a tile of all sequences, the longest of a sequence first; tile -1: there is none."""
        lane = cute.arch.lane_idx()
        number = self.cu_seqlens_q.shape[0] - 1
        sequence, m, before, base = Int32(0), Int32(-1), Int32(0), Int32(0)
        while (m < 0) & (base < number):  # a lane a sequence
            tiles = Int32(0)
            if base + lane < number:
                rows = self.cu_seqlens_q[base + lane + 1] - self.cu_seqlens_q[base + lane]
                tiles = cute.ceil_div(rows, self.tile_rows)
            end = sum_to_lane(tiles, lane)
            found = cute.arch.vote_ballot_sync(index < before + end)
            if found != 0:
                source = cute.arch.popc((found - 1) & ~found)  # the first of them
                sequence = base + source
                m = before + cute.arch.shuffle_sync(end, source) - 1 - index
            before += cute.arch.shuffle_sync(end, WARP_SIZE - 1)
            base += WARP_SIZE
        return cute.arch.make_warp_uniform(sequence), cute.arch.make_warp_uniform(m)

    @cute.jit
    def blocks_of(self, tile: tuple, first_row: Int32) -> tuple:
        """Blocks that a tile walks over, none or one at least, which all its rows may not see; see ``Blocks``.

        ``first_row``: of a warpgroup.
        """
        offset = tile.len_k - tile.len_q  # a row's place is its number and this
        first, end = Int32(0), tile.len_k  # in keys
        seen_first, seen_end = Int32(0), tile.len_k
        last_row = cutlass.min((tile.m + 1) * self.tile_rows, tile.len_q) - 1
        if const_expr(self.causal or self.window):
            right = self.right if self.window else 0
            end = cutlass.min(last_row + offset + right + 1, end)
            seen_end = cutlass.min(first_row + offset + right + 1, seen_end)
        end = cute.ceil_div(cutlass.max(end, 1), self.block)
        seen_end = cutlass.min(cutlass.max(seen_end, 0) // self.block, end)
        if const_expr(self.window):
            first = cutlass.max(tile.m * self.tile_rows + offset - self.left, 0) // self.block
            first = cutlass.min(first, end - 1)
            seen_first = cutlass.max(first_row + self.rows - 1 + offset - self.left, 0)
            seen_first = cute.ceil_div(seen_first, self.block)
        if tile.m < 0:
            first, end = Int32(0), Int32(0)
        return first, end, seen_first, seen_end

    def output_of(self, mO: cute.Tensor, tile: Tile) -> cute.Tensor:
        """A sequence's rows of out; behind its end nothing is written."""
        if const_expr(self.spec.packed_q):
            of_sequence = mO[None, None, tile.head, tile.batch_q, tile.first_q + tile.len_q]
            return cute.domain_offset((RAGGED_ROWS - tile.len_q, 0), of_sequence)
        return mO[None, None, tile.head, tile.batch_q]

    def first_of_lse(self, lse: cute.Tensor, tile: Tile) -> Int64:
        """(heads, all rows) of packed sequences, else (batch, heads, rows)."""
        if const_expr(self.spec.packed_q):
            return Int64(tile.head) * lse.shape[1] + tile.first_q
        return Int64(tile.batch_q * self.heads + tile.head) * tile.len_q

    @cute.jit
    def fill_rest(self, out: cute.Tensor, lse: cute.Tensor, tidx: Int32):
        """Rows behind the last sequence's: 0, and lse of -inf. ``tidx``: among the threads that compute."""
        threads = const_expr(self.warpgroups * WARPGROUP)
        used = self.cu_seqlens_q[self.cu_seqlens_q.shape[0] - 1]
        channels = out.shape[3]
        for row in cutlass.range(used + self.bidx, out.shape[1], self.grid, unroll=1):
            for i in cutlass.range(tidx, self.heads * channels, threads, unroll=1):
                out[0, row, i // channels, i % channels] = self.dtype(0.0)
            for head in cutlass.range(tidx, self.heads, threads, unroll=1):
                lse[head, row] = -Float32.inf


def divided(x: Int32, divisor: Int32 | cute.FastDivmodDivisorV2) -> tuple:
    """(Quotient, rest)"""
    return (x // divisor, x % divisor) if isinstance(divisor, Int32) else divmod(x, divisor)
