"""Which block of keys a CTA of attention's backward takes, and which tiles of queries see it.

Blocks are handed out by an atomic ticket, in the order in which they add: see kernel_backward_sm90.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cute_kernels.attention.kernel_sequences import Sequences, find_tile, rows_of
from cute_kernels.attention.kernel_threads import opaque

# Blocks of a head that come before those of its group's next head, for each head of the group: the more heads, the more
# adds in turn. Simulated, 132 SMs, 32 heads on 8 of 128, causal: CTAs wait for the group's sums 1.4 % of the time at
# 2x8192, 3.4 % at 1x4096 with 1 block in all; 0.1 and 0.6 % with 8. 64 heads on 8 of 64, an add of 8 us: 8.5 % at
# 2x8192, 22 % at 4x4096 with 8; 3.5 and 13 % with 16 (bench/experiments/attention.md)
AHEAD = 2


class Block(NamedTuple):
    """A block of keys of a head, and its sequence.

    Attributes:
        n: which block of the sequence.
        head: of q.
        sequence: which one.
        len_q, len_k: its rows.
        first, end: tiles of queries that see the block.
        exists: whether the sequence has it.
    """

    n: Int32
    head: Int32
    sequence: Int32
    len_q: Int32
    len_k: Int32
    first: Int32
    end: Int32
    exists: Boolean


def in_turn(index: Int32, blocks: Int32, heads: Int32, group: Int32, minimum: Callable) -> tuple:
    """(Which block, which head) of groups of heads comes in a turn; ``blocks``: of each head.

    Blocks of a head come in the order of adding, of a block a group's heads in ascending order. Those add to the same
    sums when they end, and who starts together ends together: so a head is ``AHEAD * group`` blocks ahead of the next.
    """
    pairs, ahead = heads // group, AHEAD * group
    first = index // (ahead * heads) * ahead
    index -= first * heads
    of_head = minimum(blocks - first, ahead) * pairs
    return first + index % of_head // pairs, index % of_head % pairs * group + index // of_head


class BackwardBlocks:
    """The part of ``BackwardSm90`` that every warp needs: tickets, blocks, sequences."""

    def schedule(
        self, sizes: tuple, lengths: tuple, counters: cute.Tensor, num_tiles: Int32, num_blocks: Int32, together: Int32
    ):
        """Lengths and heads; counters: the ticket, those of dq's tiles, those of dk's blocks."""
        batch, len_q, self.heads, len_k, self.pairs = sizes
        starts_q, starts_k, used_k = lengths
        if const_expr(starts_q is not None):
            batch = starts_q.shape[0] - 1
        self.queries = Sequences(len_q, batch, starts_q, None)
        self.keys = Sequences(len_k, batch, starts_k, used_k)
        self.num_tiles, self.heads_together = num_tiles, together
        self.tickets = num_blocks * self.heads
        self.counters = counters.iterator

    @cute.jit
    def block_of(self, ticket: Int32) -> tuple:
        """A ticket's ``Block``; see ``in_turn``. Heads that fit into L2 come together; of packed keys all heads."""
        heads = opaque(self.heads)  # else what divides by it is kept in registers along the walk
        if const_expr(self.spec.packed_k):
            sequence, _ = find_tile(self.keys, ticket // heads, self.block)
            line = self.keys.first_tile(sequence, self.block)
            first, together, blocks = Int32(0), heads, self.keys.first_tile(sequence + 1, self.block) - line
            index = cutlass.min(ticket - line * heads, blocks * heads - 1)
        else:
            together = opaque(self.heads_together)
            blocks = cute.ceil_div(self.keys.length, self.block)
            section = ticket // (blocks * together)
            first = section * together
            together = cutlass.min(together, heads * self.keys.number - first)
            index = ticket - first * blocks
        n, head = index // together, index % together
        if const_expr(self.spec.grouped):
            n, head = in_turn(index, blocks, together, self.group(), cutlass.min)
        if const_expr(not self.spec.packed_k):
            sequence, head = (first + head) // heads, (first + head) % heads
        if const_expr(self.descends):
            n = blocks - 1 - n
        len_q, len_k = self.queries.rows(sequence), self.keys.rows(sequence)
        exists = (n >= 0) & (n * self.block < len_k)
        if const_expr(self.spec.packed_k):
            exists = exists & (ticket < (line + blocks) * heads)  # not a line behind all sequences

        behind = len_k - len_q  # query i has the place i + behind
        first, end = Int32(0), cute.ceil_div(len_q, self.tile_rows)
        if const_expr(self.spec.causal):
            first = cutlass.max(n * self.block - behind, 0) // self.tile_rows
        if const_expr(self.spec.window):
            first = cutlass.max(n * self.block - self.right - behind, 0) // self.tile_rows
            last_row = cutlass.min((n + 1) * self.block, len_k) - 1 + self.left - behind
            end = cutlass.min(cutlass.max(last_row + self.tile_rows, 0) // self.tile_rows, end)
        if not exists:
            end = first
        return n, head, sequence, len_q, len_k, first, end, exists

    def has_tiles(self, block: Block) -> Boolean:
        """Whether a query sees the block; without a window every one that exists is seen, if there are queries."""
        return block.first < block.end if const_expr(self.spec.window or self.spec.packed_q) else block.exists

    @cute.jit
    def sees_whole(self, reach: tuple, m: Int32):
        """Whether all queries of a tile see all of a block, and it is full; ``reach``: see ``walk``."""
        own, keys = reach
        first, last = m * self.tile_rows, (m + 1) * self.tile_rows - 1
        whole = keys >= self.block
        if const_expr(self.spec.causal):
            whole = whole & (first >= own + self.block - 1)
        if const_expr(self.spec.window):
            whole = whole & (first + self.right >= own + self.block - 1) & (last - self.left <= own)
        return whole

    @cute.jit
    def turn_of(self, block: tuple, m: Int32):
        """How many blocks of keys are added to a tile of dq before this one."""
        turn = block.n
        if const_expr(self.descends):
            right = self.right if self.spec.window else 0
            end = cutlass.min((m + 1) * self.tile_rows, block.len_q) + block.len_k - block.len_q + right
            turn = (cutlass.min(end, block.len_k) - 1) // self.block - block.n
        return turn

    @cute.jit
    def take_ticket(self, count: Int32):
        """The warp that loads: a ticket, for all warps of the CTA; ``count``: how many it took before."""
        ticket, shared = Int32(0), self.sTicket
        if cute.arch.lane_idx() == 0:
            ticket = cute.arch.atomic_add(self.counters, Int32(1))
        ticket = cute.arch.shuffle_sync(ticket, 0)
        cute.arch.mbarrier_wait(self.ticket_empty, count % 2 ^ 1)
        if cute.arch.lane_idx() == 0:
            shared[0] = ticket
            cute.arch.mbarrier_arrive(self.ticket_full)
        return ticket

    @cute.jit
    def read_ticket(self, count: Int32, one_thread: cutlass.Constexpr[bool]):
        """All other warps, or one thread of one: the ticket that was taken."""
        cute.arch.mbarrier_wait(self.ticket_full, count % 2)
        ticket, shared = Int32(0), self.sTicket
        if const_expr(one_thread):
            ticket = shared[0]
            cute.arch.mbarrier_arrive(self.ticket_empty)
        else:
            if cute.arch.lane_idx() == 0:
                ticket = shared[0]
                cute.arch.mbarrier_arrive(self.ticket_empty)
            ticket = cute.arch.shuffle_sync(ticket, 0)
        return ticket

    def group(self) -> Int32:
        """Query heads of a head of keys."""
        return opaque(self.heads) // opaque(self.pairs) if self.spec.grouped else Int32(1)

    def queries_of(self, matrix: cute.Tensor, block: Block) -> cute.Tensor:
        """A sequence's rows of a matrix of queries."""
        i = block.sequence
        where = self.queries.matrix(i), self.queries.first(i), block.len_q
        return rows_of(matrix, self.ragged_q, block.head, *where)

    def keys_of(self, matrix: cute.Tensor, block: Block) -> cute.Tensor:
        """A sequence's rows of a matrix of keys."""
        i = block.sequence
        where = self.keys.matrix(i), self.keys.first(i), block.len_k
        return rows_of(matrix, self.ragged_k, block.head // self.group(), *where)
