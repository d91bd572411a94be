"""Static choices of attention: pure functions of head size, dtype and architecture, never of lengths or the batch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

LOG2E = math.log2(math.e)
# Head sizes of q and k, and of v, that kernels have; others run as the first one that is as large
HEAD_SIZES = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
WARPGROUP_ROWS = 64  # rows of queries of a warpgroup
SM100_ROWS = 128  # rows of queries of a tile on SM100: the lanes of tensor memory
UNBOUNDED = 2**30 - 2**16  # of a window: farther than any sequence is long
SHORT = 1024  # keys
# A row's maximum moves, and its sums are rescaled, when a weight exceeds it by more than 2^4. The largest weight is
# then rounded, which it is not where it is 1: the error is 1.14 times that of an exact maximum; with 2^8 it was 1.20,
# with 2^2 1.07 (1000 keys, scores of spread 2, CPU). 2^4 costs 0 to 3 % of a forward, 2^2 2 to 5 % (H200).
THRESHOLD = 4.0


class Grid(NamedTuple):
    """The absolute grid of keys, a part of the contract: keys of a softmax step, keys of a split."""

    block: int
    split: int


def kernel_sizes(head_size: int, head_size_v: int) -> tuple[int, int]:
    """The head sizes that a kernel computes with; channels that are not there are zero."""
    return next(sizes for sizes in HEAD_SIZES if head_size <= sizes[0] and head_size_v <= sizes[1])


@functools.cache
def grid_for(head_size: int, head_size_v: int | None = None) -> Grid:
    """The grid of a head size of q and k, and of v. It follows from nothing else: another grid gives other bits."""
    d, dv = kernel_sizes(head_size, head_size_v or head_size)
    if d <= 128:
        return Grid(128, 2048)
    return Grid(128 if dv <= 128 else 64, 4096)


def contract_of(head_size: int, head_size_v: int) -> str:
    """The contract's name and grid, for ``provenance``."""
    return f"kv_grid {tuple(grid_for(head_size, head_size_v))}"


class ForwardSpec(NamedTuple):
    """A forward kernel is compiled for these facts. Lengths, batch, heads and strides are run-time values.

    Attributes:
        dtype: of q, k, v and out.
        head_size: of q and k; with that of v a pair of FORWARD_CONFIGS.
        causal: rows see no key behind their place, and all before.
        head_size_v: of v and out; 0: that of q.
        window: rows see from one run-time distance before their place to another one behind it; not causal then.
        softcap: scores go through tanh.
        sinks: each head has one more logit.
        packed_q: sequences of queries are packed, cu_seqlens_q says where.
        packed_k: sequences of keys are packed, cu_seqlens_k says where.
        used_k: seqused_k says how many keys there are.
        padded: tensors have fewer channels than the kernel computes with.
        cached: keys and values are a cache's; seqused_k counts them, without the new ones.
        page_rows: rows of a page of the cache that one copy brings; 0: the cache is contiguous.
    """

    dtype: torch.dtype
    head_size: int
    causal: bool
    head_size_v: int = 0
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    packed_q: bool = False
    packed_k: bool = False
    used_k: bool = False
    padded: bool = False
    cached: bool = False
    page_rows: int = 0

    @property
    def sizes(self) -> tuple[int, int]:
        return self.head_size, self.head_size_v or self.head_size


@dataclass(frozen=True)
class ForwardConfig:
    """Choices that change no bit.

    Attributes:
        warpgroups: that multiply, of 64 rows of queries each: a tile has all their rows.
        stages: blocks of keys, and of values, in flight.
        ping_pong: warpgroups issue their products in turn, so that one's softmax runs beside the others' products.
        scores_ahead: scores of the next block are computed under this block's product with the values; else behind it,
            in its registers.
        q_stages: tiles of queries in shared memory; with 2 the next tile's come while this one is computed.
        masks_by_side: keys of a window's blocks are compared with the bound, left or right, that some rows do not see
            across; else with both.
        last_first: tiles of windows are taken as causal ones are, the last ones of all heads first; else head by head.
        q_steps: steps of 16 channels of q that a warpgroup's scores take from registers; the others from shared memory.
    """

    warpgroups: int
    stages: int
    ping_pong: bool = True
    scores_ahead: bool = True
    q_stages: int = 1
    masks_by_side: bool = False
    last_first: bool = False
    q_steps: int = 0

    @property
    def tile_rows(self) -> int:
        return self.warpgroups * WARPGROUP_ROWS

    def workspace_numbers(self, spec: ForwardSpec) -> int:
        """fp32 numbers of a CTA's merged splits in global memory."""
        return self.tile_rows * spec.sizes[1] if merges_in_workspace(spec.head_size) else 0


@dataclass(frozen=True)
class ForwardSm100Config:
    """The same of SM100.

    Attributes:
        tiles: of 128 rows of queries each, which share blocks of keys.
        stages: blocks of keys, and of values, in flight.
    """

    tiles: int
    stages: int

    @property
    def tile_rows(self) -> int:
        return self.tiles * SM100_ROWS

    def workspace_numbers(self, spec: ForwardSpec) -> int:
        """fp32 numbers of a CTA's merged splits in global memory: 16 bytes and an output of each row."""
        return self.tile_rows * (spec.sizes[1] + 4)


def configs_for(arch: str, spec: ForwardSpec) -> tuple[ForwardConfig | ForwardSm100Config, ...]:
    """The configs that calls on an architecture may take."""
    if arch == "sm_90a":
        return tuple(dict.fromkeys((forward_config(spec), forward_config(spec, SHORT))))
    return (FORWARD_SM100_CONFIGS[spec.sizes],)


def forward_config(spec: ForwardSpec, seen: int = UNBOUNDED) -> ForwardConfig:
    """The config of a call whose rows see at most so many keys.

    At 128 channels S, P and O need the 240 registers of a thread of two warpgroups; with three it has 160.

    A tile of 128 rows of 64 channels is faster than one of 192 where rows see few keys: all rows of a tile walk over
    the keys of each, and with two tiles of queries in shared memory one begins before the other one ends. H200, us, 192
    rows, 128, and these with two tiles: a window of 128, 2x8192, 64 heads on 8: 371, 325, 277; 16k tokens of 512 keys,
    full: 203, 210, 192; of 1024: 346, 368, 344; causal, 128 rows, one tile and two: 161, 150; 234, 230.

    A window of 4096 at 128 channels, 1x16384, 32 heads on 8: 1751 us; the last tiles first 1677, with masks by side,
    too, 1634; q in registers besides, another run, 1698 -> 1613. Masks by side, the last tiles first and two tiles are
    not timed, and not taken, of packed sequences and over a cache.

    With q in registers, us, causal and full: 96 channels 417 -> 393, 775 -> 753 (4x4096, 16 heads), 128 913 -> 898,
    1815 -> 1759 (2x8192, 16), 192/128 864 -> 832 (4x4096, 24), 192/192 893 -> 835, 1680 -> 1557 (2x8192, 10), 256
    917 -> 901, 1742 -> 1716 (2x8192, 8). 128 channels, causal: softcap 1116 -> 1077, sinks 937 -> 919 (2x8192, 16), but
    packed 360 -> 364 (16k tokens, 16 heads). Not timed: at 128 seqused_k and fewer channels, which take q so; caches,
    and other sizes with other options, which do not. fp16 with softcap would spill at 128, 88 to 112 bytes.
    """
    configs, dense = FORWARD_CONFIGS[spec.sizes], not (spec.packed_q or spec.cached)
    if spec.head_size == 64:
        if seen > SHORT:
            return configs[0]
        if dense:
            return configs[2]
        return configs[1] if spec.causal or spec.window else configs[0]
    if spec.head_size == 128:
        spills = spec.softcap and str(spec.dtype) == "torch.float16"
        in_registers = dense and not spec.packed_k and not spills
        if spec.window and dense:
            return configs[-2 if in_registers else 1]
        return configs[-1 if in_registers else 0]
    others = spec.window or not dense or spec.packed_k or spec.used_k or spec.softcap or spec.sinks or spec.padded
    return configs[0] if others else configs[-1]


def pairs_tiles(spec: ForwardSpec, num_tiles: int, num_sms: int, kv_heads: int, len_k: int) -> bool:
    """Whether a CTA takes tiles of a head in pairs, so that few heads at a time are in L2, or the longest of all first.

    H200, 16k tokens, 16 heads of 128, causal: 656 and 633 TFLOP/s at 8192 keys, 553 and 455 at 2048; at 16384, where
    more CTAs share a head either way, 605 and 622; 24 heads of 192/128, 4096 keys: 561 and 546; 8 of 256, 512 keys: 307
    and 259. ``kv_heads``: of all sequences.
    """
    if not spec.causal or num_tiles < 4 * num_sms:
        return False
    return len_k <= 4096 if spec.head_size == 64 else 8 * kv_heads > num_sms


# The configs for each pair of head sizes. Calls take the first one and the last one, of 64 channels only the first
# three, of 128 the first two and the last two; others are for tests. That of 80, which runs as 96, is a candidate:
# bench/experiments/attention.md
FORWARD_CONFIGS = {
    (64, 64): (
        ForwardConfig(3, 4),
        ForwardConfig(2, 4),
        ForwardConfig(2, 4, q_stages=2, masks_by_side=True),
        ForwardConfig(1, 4),
        ForwardConfig(3, 2, False),
    ),
    (80, 80): (ForwardConfig(3, 2, False, False),),
    (96, 96): (
        ForwardConfig(2, 3),
        ForwardConfig(1, 2),
        ForwardConfig(2, 3, q_steps=6),
    ),
    (128, 128): (
        ForwardConfig(2, 2),
        ForwardConfig(2, 2, masks_by_side=True, last_first=True),
        ForwardConfig(1, 2),
        ForwardConfig(2, 2, False),
        ForwardConfig(2, 2, masks_by_side=True, last_first=True, q_steps=8),
        ForwardConfig(2, 2, q_steps=8),
    ),
    (192, 128): (
        ForwardConfig(2, 2),
        ForwardConfig(1, 2),
        ForwardConfig(2, 2, False),
        ForwardConfig(2, 2, q_steps=8),
    ),
    (192, 192): (
        ForwardConfig(2, 3, False),
        ForwardConfig(1, 2),
        ForwardConfig(2, 2),
        ForwardConfig(2, 3, False, q_steps=8),
    ),
    (256, 256): (
        ForwardConfig(2, 2, False),
        ForwardConfig(1, 2),
        ForwardConfig(2, 2),
        ForwardConfig(2, 2, False, q_steps=4),
    ),
}


# Tensor memory has 512 columns for S and O of all tiles, shared memory 227 KB for their q, the stages, one tile's out
FORWARD_SM100_CONFIGS = {
    (64, 64): ForwardSm100Config(2, 4),
    (96, 96): ForwardSm100Config(2, 3),
    (128, 128): ForwardSm100Config(2, 2),
    (192, 128): ForwardSm100Config(2, 1),
    (192, 192): ForwardSm100Config(2, 1),
    (256, 256): ForwardSm100Config(1, 1),
}


def panel_columns(size: int) -> int:
    """Channels that lie together in shared memory, which the swizzle spans."""
    return next(columns for columns in (64, 32, 16) if size % columns == 0)


def merges_in_workspace(head_size: int) -> bool:
    """Whether a CTA's merged splits have no place in shared memory."""
    return head_size > 128


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """(What a score is multiplied with before its tanh, 0 without a softcap; what is to be the exponent of 2 then).

    With a softcap the kernels' scores are tanh(s scale / softcap), their scale is softcap.
    """
    return (scale / softcap, softcap * LOG2E) if softcap else (0.0, scale * LOG2E)


def window_bounds(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """(left, right): a row at place p sees keys from p - left to p + right; ``UNBOUNDED`` where there is no bound."""
    if window is None:
        return UNBOUNDED, 0 if causal else UNBOUNDED
    left, right = (UNBOUNDED if w is None or w < 0 else min(w, UNBOUNDED) for w in window)
    return left, 0 if causal else right


class DecodeSpec(NamedTuple):
    """A kernel over a cache is compiled for these facts. Lengths, batch, heads, strides, windows are run-time values.

    Attributes:
        dtype: of q, the cache and out.
        head_size, head_size_v: of q and k, of v and out.
        packed: sequences of queries are packed.
        page_rows: rows of a page that one copy brings; 0: the cache is contiguous.
        softcap: scores go through tanh.
        sinks: dtype of one more logit of each head.
    """

    dtype: torch.dtype
    head_size: int
    head_size_v: int
    packed: bool
    page_rows: int
    softcap: bool = False
    sinks: torch.dtype | None = None


FEW_ROWS = 8  # (query, head of the group): a thread's other row is 8 below


@dataclass(frozen=True)
class DecodeConfig:
    """Choices that change no bit.

    Attributes:
        sequential: a CTA walks over all splits of its rows, and merges them on its way; else one CTA has one split.
        few_rows: a tile has at most ``FEW_ROWS``: of its two rows a thread computes the first one alone.
        merges_late: splits are merged when no item is left, a row by a warp, by all CTAs; else a tile's by the CTA that
            keeps the last one of it. Not with ``sequential``.
    """

    sequential: bool = False
    few_rows: bool = False
    merges_late: bool = False


class AppendSpec(NamedTuple):
    """New keys and values behind those of a cache."""

    dtype: torch.dtype
    head_size: int
    head_size_v: int
    packed: bool
    paged: bool


COLUMNS = 64  # channels that a copy of a block brings: 128 bytes, which the swizzle spans
MAX_SLOTS = 12
QUERY_STAGES = 2  # the tile that is computed, and the next one
SM_SHARED_MEMORY, RESERVED = 228 << 10, 1 << 10  # the latter of each CTA, by the system
BESIDE_RING = 1 << 10  # barriers, items, alignment


def width_of(head_size: int) -> int:
    """Channels in shared memory; those that are not there are zero."""
    return -(-head_size // COLUMNS) * COLUMNS


def decode_slots(head_size: int, head_size_v: int) -> int:
    """Blocks of keys or values in flight: as many as shared memory has room for."""
    widths = width_of(head_size), width_of(head_size_v)
    room = SM_SHARED_MEMORY - RESERVED - BESIDE_RING - 2 * QUERY_STAGES * WARPGROUP_ROWS * widths[0]
    return min(room // (2 * grid_for(head_size, head_size_v).block * max(widths)), MAX_SLOTS)


def page_rows(page_size: int, block: int) -> int:
    """Rows of a page that one copy brings: a page, or a block of a larger page."""
    return min(page_size, block)


def decode_config(head_size_v: int, rows: int, most_rows: int, tiles: int, splits: int, num_sms: int) -> DecodeConfig:
    """``rows``: (query, head of the group) of a sequence, on average; ``most_rows``: of any.

    Late merges where there are many splits: a merge by one CTA keeps those of later tiles from being counted. 8 heads
    on 1 of 128, 64 splits, 1, 4 and 16 sequences: 43, 102 and 324 us, late 37, 84 and 270; 16 sequences of 16 splits 85
    and 84; 64 of 4 splits, 32 heads on 8, 502 and 519, since merges beside loads cost nothing there (H200).

    One CTA for all splits of a tile where a sequence has whole tiles of ``rows`` and tiles are many: less workspace.

    Not in decode, however many sequences there are: of lengths that differ, the longest is waited for (64 sequences of
    300 to 16000 keys, 32 heads on 8 of 128: 466 us with a CTA for a split, 601 with one for all; H200). With 256
    channels of O it spills.
    """
    whole = rows >= WARPGROUP_ROWS and tiles >= 4 * num_sms
    sequential = splits > 1 and whole and head_size_v <= 192
    return DecodeConfig(sequential, most_rows <= FEW_ROWS, splits > MANY_SPLITS and not sequential)


MANY_SPLITS = 16  # of the longest sequence: with more they are merged late


# Time of a block of keys of the decode kernel's tile, of 64 rows, where the forward's, of 128, takes 1. 32768 keys, 32
# heads on 8 of 128, H200: 2048 queries 2433 us by the one, 1628 by the other (0.75); 512 queries 841 and 432 (0.95)
DECODE_TILE = 0.8


def prefills(
    head_size_v: int, queries: int, sequences: int, max_seqlen_q: int, heads: int, splits: int, num_sms: int
) -> bool:
    """Whether the forward's kernel serves a call over a cache: tiles of a head's queries, all their splits in a CTA.

    Where a sequence has whole tiles on average, and waves of these take less time than waves of the decode kernel's
    tiles and splits: few tiles leave SMs idle, since the forward does not split keys. The estimate takes all sequences
    as long as the longest, without a window, and arithmetic as the limit. With 256 channels and pages the forward
    spills.
    """
    rows = 2 * WARPGROUP_ROWS
    if max_seqlen_q < rows or queries < rows * sequences or head_size_v > 192:
        return False
    tiles = queries // rows * heads  # the decode kernel has two of each
    forward, decode = -(-tiles // num_sms) * splits, -(-2 * tiles * splits // num_sms)
    return forward <= DECODE_TILE * decode


def prefill_spec(spec: DecodeSpec, left: int = UNBOUNDED, right: int = 0) -> ForwardSpec:
    """The Spec of the forward's kernel that serves the same calls; ``left``, ``right``: see ``window_bounds``."""
    sizes = spec.head_size, spec.head_size_v
    d, dv = kernel_sizes(*sizes)
    window = left != UNBOUNDED or right not in (0, UNBOUNDED)
    return ForwardSpec(
        spec.dtype,
        d,
        right == 0 and not window,
        dv,
        window,
        spec.softcap,
        spec.sinks is not None,
        packed_q=spec.packed,
        used_k=True,
        padded=sizes != (d, dv),
        cached=True,
        page_rows=spec.page_rows,
    )


class BackwardSpec(NamedTuple):
    """A backward kernel is compiled for these facts; see ``ForwardSpec``.

    Attributes:
        head_size: of q and k; with that of v a pair of BACKWARD_CONFIGS. Tensors of fewer channels are ``padded``.
        grouped: query heads share heads of keys and values.
        head_size_v: of v and the output's gradient; 0: that of q.
        steps_of_80: a sequence has so many queries that steps of 80 take less time, see ``takes_steps_of_80``.
    """

    dtype: torch.dtype
    head_size: int
    causal: bool
    grouped: bool
    window: bool = False
    softcap: bool = False
    packed_q: bool = False
    packed_k: bool = False
    used_k: bool = False
    padded: bool = False
    head_size_v: int = 0
    steps_of_80: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        return self.head_size, self.head_size_v or self.head_size


def finish_dq_spec(spec: BackwardSpec) -> BackwardSpec:
    """The Spec for the kernel that rounds dq: options that it does not depend on are off."""
    return spec._replace(grouped=False, softcap=False, steps_of_80=False)


def finish_dkv_spec(spec: BackwardSpec) -> BackwardSpec:
    """The Spec for the kernel that rounds dk and dv of groups: options that it does not depend on are off."""
    return spec._replace(causal=False, window=False, softcap=False, packed_q=False, steps_of_80=False)


PADDED_ROWS = 128  # of lines of what is known of each row, a multiple; see ``padded_rows`` of a config


class DeltaSpec(NamedTuple):
    """The Spec of the kernel that computes delta from each row of the output and of its gradient."""

    dtype: torch.dtype
    head_size: int
    has_lse_grad: bool
    packed_q: bool = False
    padded: bool = False
    padded_rows: int = PADDED_ROWS


def backward_sizes(head_size: int, head_size_v: int) -> tuple[int, int]:
    """The head sizes that the backward's kernels compute with; channels that are not there are zero."""
    return next(sizes for sizes in BACKWARD_CONFIGS if head_size <= sizes[0] and head_size_v <= sizes[1])


def backward_block(head_size: int) -> int:
    """Keys of a partial of dq, at their multiples in a sequence: a part of the contract."""
    return 128 if head_size <= 128 else 64


def backward_panel(channels: int, halved: bool) -> int:
    """Channels that a row's swizzle spans in the backward's shared memory, and that a copy brings: 64, 32 or 16.

    ``halved``: a warpgroup has half of them, which are whole panels; half of 64 lies in one. It always has half of k
    and dq, and of the others beyond 128 channels.
    """
    own = channels // 2 if halved and channels > COLUMNS else channels
    return next(width for width in (COLUMNS, 32, 16) if own % width == 0)


def lacks_a_box(channels: int, kernel_channels: int) -> bool:
    """Whether the backward copies a box of channels of a row none of which the tensor has; see ``backward_panel``."""
    return kernel_channels - channels >= backward_panel(kernel_channels, True)


def delta_spec(spec: BackwardSpec, has_lse_grad: bool, config: BackwardConfig) -> DeltaSpec:
    """The Spec for the kernel that computes delta; its head size is a power of two, as the lanes of a row are."""
    _, channels = spec.sizes
    width = 1 << (channels - 1).bit_length()
    padded = spec.padded or width != channels
    return DeltaSpec(spec.dtype, width, has_lse_grad, spec.packed_q, padded, config.padded_rows)


@dataclass(frozen=True)
class BackwardConfig:
    """Choices that change no bit.

    Attributes:
        tile_rows: queries of a step, 64 or 128, or 80 up to 128 channels; dq's partials lie across then.
        stages: tiles of q in flight.
        dv_first: p dout is issued before ds is found, which then runs beside it; not beyond 128 channels.
        scores_ahead: scores of the next tile are issued before this one's dk is waited for; beyond 128 channels they
            always are, and with this before its dq has left the registers.
        dout_stages: tiles of the output's gradient in flight.
        adders: threads that add partials of dq in turn.
        dq_buffers: partials of dq in shared memory, no more than adders. With fewer an adder waits for its sum to be in
            memory while another one has the buffer.
        dq_parts: in which a partial of dq goes through its buffer; more than one only where each adder has a buffer, or
            all share one.
    """

    tile_rows: int
    stages: int
    dv_first: bool = True
    scores_ahead: bool = True
    dout_stages: int = 2
    adders: int = 2
    dq_buffers: int = 2
    dq_parts: int = 1

    def __post_init__(self) -> None:
        fewer = self.dq_buffers < self.adders and 1 in (self.dq_buffers, self.dq_parts)
        if not (self.dq_buffers == self.adders or fewer):
            raise ValueError(f"expected a buffer for each adder, one, or fewer and whole partials of dq, got {self}")

    @property
    def padded_rows(self) -> int:
        """Lines of delta and lse have a multiple of this many rows, whole tiles."""
        return PADDED_ROWS if PADDED_ROWS % self.tile_rows == 0 else self.tile_rows


def backward_config(spec: BackwardSpec) -> BackwardConfig:
    """The first one for the head sizes, or that of ``steps_of_80``; with a softcap, which takes p's rounded values
    before ds is found, the first that has ``dv_first``.
    """
    if spec.steps_of_80:
        return STEPS_OF_80
    configs = BACKWARD_CONFIGS[spec.sizes]
    return next(config for config in configs if config.dv_first or not spec.softcap)


STEPS_OF_80 = BackwardConfig(80, 2, False, False, dq_buffers=1)
# Time of a query of theirs at 128 channels where one of steps of 64 takes 1: 0.95 to 0.97 full, 0.95 to 0.99 causal, of
# 1024 to 32768 queries (H200; bench/experiments/attention.md)
STEPS_OF_80_TIME = 0.96


def takes_steps_of_80(spec: BackwardSpec, queries: int) -> bool:
    """Whether steps of 80 queries take less time for a sequence, the last of them not full.

    Not measured, and not taken: windows, softcap, packed sequences, used keys, fewer channels than 128.
    """
    others = spec.window or spec.softcap or spec.packed_q or spec.packed_k or spec.used_k or spec.padded
    of_80, of_64 = (-(-queries // rows) * rows for rows in (80, 64))
    return spec.sizes == (128, 128) and not others and STEPS_OF_80_TIME * of_80 < of_64


# At 128 channels the first three are in the order of their times (bench/experiments/attention.md), for few queries.
# The sums of dK and dV take 128 registers of a thread, which leaves scores of 64 queries, and of 80 where nothing is
# ahead and dv is last; shared memory has room for one partial of dq then, which two adders take in turn. Beyond 128
# channels, too, and at 256 for half of one, two tiles of q and one of dout
BACKWARD_CONFIGS = {
    (64, 64): (
        BackwardConfig(128, 2, False, False),
        BackwardConfig(128, 2, False),
        BackwardConfig(64, 3, dout_stages=3),
    ),
    (96, 96): (
        BackwardConfig(64, 3, False, False, dout_stages=3),
        BackwardConfig(64, 3, True, False, dout_stages=3),
    ),
    (128, 128): (
        BackwardConfig(64, 2, False, False),
        BackwardConfig(64, 2, True, False),
        BackwardConfig(64, 2),
        STEPS_OF_80,
    ),
    (192, 128): (
        BackwardConfig(64, 2, scores_ahead=False, dq_buffers=1),
        BackwardConfig(64, 3, scores_ahead=False, dq_buffers=1),
        BackwardConfig(64, 3, dq_buffers=1),
    ),
    (192, 192): (
        BackwardConfig(64, 2, scores_ahead=False, dq_buffers=1),
        BackwardConfig(64, 2, dq_buffers=1),
    ),
    (256, 256): (BackwardConfig(64, 2, scores_ahead=False, dout_stages=1, dq_buffers=1, dq_parts=2),),
}
# Bytes of queries, their gradients and the sums of dq that the backward walks over together
BACKWARD_L2_BYTES = 16 << 20


def backward_heads_together(head_size: int, itemsize: int, len_q: int, group: int, left: int, right: int) -> int:
    """Query heads, of all sequences, whose rows the backward walks over at the same time; a multiple of a group.

    A head counts with as many rows as see a block of keys; ``left``, ``right``: see ``window_bounds``. With a short
    window that is many heads, whose sums depend on nothing of one another. Few heads wait for their group's sums:
    simulated, a window of 128, 64 heads on 8 of 64 channels, 132 SMs, more than half of the time with 8 together, none
    with 128 (bench/experiments/attention.md).
    """
    rows = min(len_q, left + right + backward_block(head_size))
    heads = BACKWARD_L2_BYTES // max(rows * head_size * (2 * itemsize + 4), 1)
    return max(heads // group, 1) * group
