"""Static choices of attention: pure functions of head size, dtype and architecture, never of lengths or the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

LOG2E = math.log2(math.e)
HEAD_SIZES = (64, 128)
WARPGROUP_ROWS = 64  # rows of queries of a warpgroup
# Bytes of keys and values that are walked over together: they shall stay in the 50 MB of an H100's L2
L2_BYTES = 32 << 20
UNBOUNDED = 2**30 - 2**16  # of a window: farther than any sequence is long
THRESHOLD = 8.0  # a row's maximum moves, and its sums are rescaled, when a score exceeds it by more than 2^8


class Grid(NamedTuple):
    """The absolute grid of keys, a part of the contract: keys of a softmax step, keys of a split."""

    block: int
    split: int


def grid_for(head_size: int, head_size_v: int | None = None) -> Grid:
    """The grid of a head size of q and k, and of v. It follows from nothing else: another grid gives other bits."""
    if head_size <= 128 and (head_size_v or head_size) <= 128:
        return Grid(128, 2048)
    if head_size <= 192 and (head_size_v or head_size) <= 128:
        return Grid(128, 4096)
    return Grid(64, 4096)


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


@dataclass(frozen=True)
class ForwardSm100Config:
    """Choices on SM100 that change no bit.

    Attributes:
        stages: blocks of keys, and of values, in flight.
    """

    stages: int

    @property
    def tile_rows(self) -> int:
        """Two tiles of 128 rows, which take turns."""
        return 256


def forward_sm100_config(spec: ForwardSpec) -> ForwardSm100Config:
    """As many stages as leave room for q of both tiles and a tile's out in 227 KB."""
    return ForwardSm100Config(4 if spec.head_size <= 64 else 2)


def config_for(arch: str, spec: ForwardSpec) -> ForwardConfig | ForwardSm100Config:
    """The config of the kernel that an architecture has."""
    return forward_config(spec) if arch == "sm_90a" else forward_sm100_config(spec)


def workspace_numbers(head_size: int) -> int:
    """fp32 numbers of a CTA's workspace on SM100: 16 bytes and an output of each of its rows."""
    return 256 * (head_size + 4)


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """(What a score is multiplied with before its tanh, 0 without a softcap; what is to be the exponent of 2 then).

    With a softcap the kernels' scores are tanh(s scale / softcap), their scale is softcap.
    """
    return (scale / softcap, softcap * LOG2E) if softcap else (0.0, scale * LOG2E)


def window_bounds(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """(left, right): a row at place p sees keys from p - left to p + right; ``UNBOUNDED`` where there is no bound."""
    left, right = (UNBOUNDED if w is None or w < 0 else min(w, UNBOUNDED) for w in window or (None, None))
    return left, 0 if causal else right


def heads_together(head_size: int, itemsize: int, len_k: int, group: int) -> int:
    """Query heads, of all sequences, whose keys and values are walked over at the same time; ``group``: of one pair."""
    pairs = L2_BYTES // max(2 * len_k * head_size * itemsize, 1)
    return max(pairs, 1) * group
