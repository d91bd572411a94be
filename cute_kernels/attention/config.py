"""Static choices of attention: pure functions of head size, dtype and architecture, never of lengths or the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

HEAD_SIZES = (64, 128)
WARPGROUP_ROWS = 64  # rows of queries of a warpgroup
# Bytes of keys and values that are walked over together: they shall stay in the 50 MB of an H100's L2
L2_BYTES = 32 << 20
THRESHOLD = 8.0  # a row's maximum moves, and its sums are rescaled, when a score exceeds it by more than 2^8


class Grid(NamedTuple):
    """The absolute grid of keys, a part of the contract: keys of a softmax step, keys of a split."""

    block: int
    split: int


def grid_for(head_size: int) -> Grid:
    """The grid of a head size. It follows from nothing else: another grid gives other bits."""
    if head_size > 128:
        raise ValueError(f"there is no grid of head size {head_size} yet")
    return Grid(128, 2048)


class ForwardSpec(NamedTuple):
    """The forward of heads of ``head_size`` channels. Lengths, batch, heads and strides are run-time values."""

    dtype: torch.dtype
    head_size: int
    causal: bool


@dataclass(frozen=True)
class ForwardConfig:
    """Choices that change no bit.

    Attributes:
        warpgroups: that multiply, of 64 rows of queries each: a tile has all their rows.
        stages: blocks of keys, and of values, in flight.
        ping_pong: warpgroups issue their products in turn, so that one's softmax runs beside the others' products.
    """

    warpgroups: int
    stages: int
    ping_pong: bool = True

    @property
    def tile_rows(self) -> int:
        return self.warpgroups * WARPGROUP_ROWS


def forward_config(spec: ForwardSpec) -> ForwardConfig:
    """At 128 channels S, P and O need the 240 registers of a thread of two warpgroups; with three it has 160."""
    return FORWARD_CONFIGS[spec.head_size][0]


# Of each head size, the first one first
FORWARD_CONFIGS = {
    64: (ForwardConfig(3, 4), ForwardConfig(2, 4), ForwardConfig(1, 4), ForwardConfig(3, 2, False)),
    128: (ForwardConfig(2, 2), ForwardConfig(1, 2), ForwardConfig(2, 2, False)),
}


def heads_together(head_size: int, itemsize: int, len_k: int, group: int) -> int:
    """Query heads, of all sequences, whose keys and values are walked over at the same time; ``group``: of one pair."""
    pairs = L2_BYTES // max(2 * len_k * head_size * itemsize, 1)
    return max(pairs, 1) * group


class BackwardSpec(NamedTuple):
    """The backward of heads of ``head_size`` channels; ``grouped``: query heads share heads of keys and values."""

    dtype: torch.dtype
    head_size: int
    causal: bool
    grouped: bool


class DeltaSpec(NamedTuple):
    """What the backward needs of each row of the output."""

    dtype: torch.dtype
    head_size: int
    has_lse_grad: bool


@dataclass(frozen=True)
class BackwardConfig:
    """Choices that change no bit.

    Attributes:
        tile_rows: queries of a step, 64 or 128.
        stages: tiles of q, and of the output's gradient, in flight.
        dv_first: p dout is issued before ds is found, which then runs beside it.
        scores_ahead: scores of the next tile are issued before this one's dk is waited for.
    """

    tile_rows: int
    stages: int
    dv_first: bool = True
    scores_ahead: bool = False


def backward_config(spec: BackwardSpec) -> BackwardConfig:
    return BACKWARD_CONFIGS[spec.head_size][0]


# At 128 channels the sums of dK and dV take 128 registers of a thread, which leaves scores of 64 queries
BACKWARD_CONFIGS = {
    64: (
        BackwardConfig(128, 2, False),
        BackwardConfig(128, 2, False, True),
        BackwardConfig(64, 4, True, True),
        BackwardConfig(64, 2),
    ),
    128: (
        BackwardConfig(64, 2),
        BackwardConfig(64, 2, True, True),
        BackwardConfig(64, 2, False, False),
        BackwardConfig(64, 3, True, True),
    ),
}
PADDED_ROWS = 128  # what is known of each row has lines of a multiple of this many rows
# Bytes of queries, their gradients and the sums of dq that the backward walks over together
BACKWARD_L2_BYTES = 40 << 20


def backward_heads_together(head_size: int, itemsize: int, len_q: int, group: int) -> int:
    """Query heads, of all sequences, whose rows the backward walks over at the same time; a multiple of a group."""
    heads = BACKWARD_L2_BYTES // max(len_q * head_size * (2 * itemsize + 4), 1)
    return max(heads // group, 1) * group
