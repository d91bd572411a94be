"""The gradients of the streams, phi and its norm's weight: Specs, and how CTAs of warps or of warpgroups multiply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from cute_kernels.mhc.config.projection import (
    MAX_STAGES,
    MAX_WARP_COLUMNS,
    SHARED_MEMORY,
    by_warpgroups,
    order_of,
    terms_of,
)

if TYPE_CHECKING:
    import torch

CHUNK = 512  # tokens
GROUP = 4  # chunks
MAX_BOX = 64  # columns of x that one copy of the projection's backward brings
TILE_TOKENS = 64  # that come at once where warpgroups compute the backward
SLICE_CHANNELS = 16  # of each stream, that a CTA owns there if it adds what reaches x by other ways than the projection


class ProjectionBackwardSpec(NamedTuple):
    """dx and partial sums of dphi.

    Args:
        columns: N.
        x, phi, norm_weight: dtypes.
        orientation: how res leads the gradient of the new residual to x; None: there is none.
        has_layer_grad: there is a gradient of the layer input, which pre leads to x.
        rows_on_16: rows of x and of the other matrices of its dtype start on 16 bytes, as do their channels end.
        all_on_16: those of phi, dH and the coefficients, too; told where warpgroups might multiply.
    """

    n: int
    channels: int
    layout: str
    columns: int
    precision: str
    x: torch.dtype
    phi: torch.dtype
    norm_weight: torch.dtype | None
    needs_dx: bool
    needs_dphi: bool
    orientation: str | None
    has_layer_grad: bool
    rows_on_16: bool
    all_on_16: bool

    @property
    def k(self) -> int:
        """n C."""
        return self.n * self.channels

    @property
    def has_residual_grad(self) -> bool:
        """Whether dx has what comes by way of res."""
        return self.orientation is not None


class PhiGradientSpec(NamedTuple):
    """dphi and dnorm_weight of partial sums, and dbeta and dalpha of those that ``coefficients_backward`` leaves.

    ``phi`` to ``dalpha``: dtypes; None: it is not there. ``alphas``: elements of dalpha.
    """

    columns: int
    k: int
    alphas: int
    phi: torch.dtype
    norm_weight: torch.dtype | None
    dphi: torch.dtype | None
    dnorm_weight: torch.dtype | None
    dbeta: torch.dtype | None
    dalpha: torch.dtype | None
    accumulate_phi: bool
    accumulate_norm_weight: bool
    accumulate_beta: bool
    accumulate_alpha: bool


@dataclass(frozen=True)
class ProjectionBackwardConfig:
    """How the gradients of the streams and of phi are computed.

    ``columns``: N. A CTA owns ``slice_c`` channels of each of ``n`` streams of ``channels``, in memory in the order
    ``layout``, and walks over tokens ``tile_m`` at a time, ``stages`` tiles in flight. dphi is summed over chunks of
    ``chunk`` tokens, then over ``group`` chunks, then over groups. ``parts`` warps share their columns, each with one
    term of dH. A warp that adds up has ``sum_groups`` times the columns of one that computes dx. ``x_terms``,
    ``phi_terms``, ``order``, ``tma``: as in ProjectionConfig; dH has ``order`` terms.
    """

    columns: int
    n: int
    channels: int
    layout: str
    slice_c: int
    tile_m: int
    chunk: int
    group: int
    stages: int
    parts: int
    sum_groups: int
    x_terms: int
    phi_terms: int
    order: int
    tma: bool

    @property
    def k(self) -> int:
        """Elements of a token."""
        return self.n * self.channels

    @property
    def slices(self) -> int:
        """How many CTAs share a token."""
        return -(-self.channels // self.slice_c)

    @property
    def groups(self) -> int:
        """Warps that have columns of their own: eight channels of every stream."""
        return self.slice_c // 8

    @property
    def warps(self) -> int:
        """Warps of a CTA that compute dx."""
        return self.groups * self.parts

    @property
    def sum_warps(self) -> int:
        """Warps of a CTA that add up the gradient of phi."""
        return self.warps // self.sum_groups

    @property
    def padded_columns(self) -> int:
        """Columns in whole octets."""
        return -(-self.columns // 8) * 8

    @property
    def terms_columns(self) -> int:
        """Columns of all terms of dH, in whole steps of the tensor cores."""
        return -(-self.order * self.padded_columns // 16) * 16

    def block_rows(self, b: int) -> int:
        """Rows that term b of phi takes: once for each term of dH that it is multiplied with."""
        return -(-(self.order - b) * self.padded_columns // 16) * 16

    @property
    def phi_rows(self) -> int:
        """Rows of all terms of phi."""
        return sum(self.block_rows(b) for b in range(self.phi_terms))

    @property
    def scratch(self) -> int:
        """Bytes of shared memory for the sums of a group of chunks so far."""
        return 4 * self.padded_columns * self.n * self.slice_c if self.group > 1 else 0

    def schedule(self, num_tokens: int, num_sms: int) -> tuple[int, int]:
        """(chunks of an item, CTAs): items of a whole group where that takes no longer."""
        found = []
        for chunks in (self.group, 1):
            items = -(-num_tokens // (chunks * self.chunk)) * self.slices
            ctas = self._num_ctas(items, num_sms)
            found.append((-(-items // ctas) * chunks, chunks, ctas))
        groups, single = found
        return groups[1:] if groups[0] <= single[0] else single[1:]

    def _num_ctas(self, items: int, num_sms: int) -> int:
        """As few as need no more rounds, so that most end together; or those that keep their slices, and so phi, even
        if one round in eight is for that.

        H200, 4096x4x7168: 112 CTAs 128.5 us, 128 139; a layer's backward 419, 430.
        """
        rounds, whole = -(-items // num_sms), num_sms // self.slices * self.slices
        if whole and -(-items // whole) - rounds <= rounds // 7:
            return min(items, whole)
        return -(-items // rounds)

    def partials(self, num_tokens: int, chunks: int) -> int:
        """Partial sums of the gradient of phi, of items of so many chunks."""
        return -(-num_tokens // (chunks * self.chunk)) * self.parts


@dataclass(frozen=True)
class WarpgroupBackwardConfig:
    """How warpgroups compute dx and the sums of dphi (kernel/projection_backward_wgmma.py).

    ``columns``: N; ``k``: n C. A CTA owns ``slice_k`` columns of x, as many of each of ``runs`` equal parts of K, with
    phi in ``phi_terms`` terms, and adds ``chunk`` tokens; in flight are ``stages`` tiles of dH and R, which a pair of
    CTAs shares, and ``x_stages`` of x, dout and dlayer. ``sharers``: warpgroups that share a tile's dx; one: they take
    turns.
    """

    columns: int
    k: int
    slice_k: int
    runs: int
    chunk: int
    phi_terms: int
    stages: int
    x_stages: int
    sharers: int

    @property
    def run(self) -> int:
        """Columns of a slice that follow each other."""
        return self.slice_k // self.runs

    @property
    def box(self) -> int:
        """Columns of x that a copy brings: 128 bytes of each token, or a run."""
        return min(MAX_BOX, self.run)

    @property
    def boxes(self) -> int:
        """Boxes of a tile."""
        return self.slice_k // self.box

    @property
    def pairs(self) -> int:
        """Pairs of CTAs that share a token."""
        return -(-self.k // self.runs // (2 * self.run))

    def chunks(self, num_tokens: int) -> int:
        """Partial sums of a column."""
        return -(-num_tokens // self.chunk)

    def grid(self, num_tokens: int, num_sms: int) -> int:
        """Pairs of CTAs: as few as need no more rounds."""
        items = self.chunks(num_tokens) * self.pairs
        return -(-items // -(-items // max(1, num_sms // 2)))


def backward_by_warpgroups(arch: str, spec: ProjectionBackwardSpec) -> bool:
    """Whether warpgroups compute it.

    Of a matrix that is one box wide, boxes beyond its end would have the coordinate of the first.
    """
    wide = spec.k > MAX_BOX
    if (spec.has_residual_grad or spec.has_layer_grad) and spec.layout == "streams":
        wide = spec.channels > SLICE_CHANNELS
    multiplies = spec.precision == "tf32" and spec.columns % 16 == 0
    return by_warpgroups(arch, spec.x, spec.columns) and wide and multiplies and spec.all_on_16


def warpgroup_backward_config(spec: ProjectionBackwardSpec) -> WarpgroupBackwardConfig:
    """The config of warpgroups; for a residual or layer gradient a slice has SLICE_CHANNELS of every stream."""
    n, columns = spec.n, spec.columns
    residual, layer = spec.has_residual_grad, spec.has_layer_grad
    phi_terms, stages = min(terms_of(spec.phi, spec.norm_weight), 2), 2
    more = residual or layer
    slice_k = SLICE_CHANNELS * n if more else 256
    fixed = 2 * phi_terms * columns * slice_k + stages * 4 * TILE_TOKENS * (columns + residual * n * n) + 2048
    tile = 2 * TILE_TOKENS * (slice_k * (1 + residual) + SLICE_CHANNELS * layer)
    return WarpgroupBackwardConfig(
        columns=columns,
        k=spec.k,
        slice_k=slice_k,
        runs=n if more and spec.layout == "streams" else 1,
        chunk=1024,
        phi_terms=phi_terms,
        stages=stages,
        x_stages=min(MAX_STAGES, (SHARED_MEMORY - fixed) // tile),
        sharers=1 if more else 2,
    )


def projection_backward_config(spec: ProjectionBackwardSpec) -> ProjectionBackwardConfig:
    """128 bytes of a stream's row a CTA; of "fp32" products half, since three terms of dH fill the registers.

    Of 8 streams less, since the terms of phi fill the shared memory. With dout of four streams tiles of 16 tokens,
    beside whose ring a group's sums fit.

    H200, dx and partials with dout, 64 channels, 32: 8192x4x4096 228 us, 239; 2048x4x5120 89, 88. A layer's backward,
    8192x4x4096, with tiles of 16 tokens 460 us, of 32, three of them in flight, 482; projection, tiles of 32, 147, of
    16 160. Tiles of 32 in flight, 5, 8: projection 4096x4x7168 136, 128; 8192x4x2560 112, 109; 8192x4x4096 146, 153.
    """
    n, columns, itemsize = spec.n, spec.columns, spec.x.itemsize
    residual, layer = spec.has_residual_grad, spec.has_layer_grad
    order = order_of(spec.precision)
    many_boxes = spec.k > MAX_BOX or n == 1 or spec.layout == "streams"
    wide = columns > MAX_WARP_COLUMNS
    slice_c = (16 if order == 2 else 8) if wide else (32 if itemsize == 4 or order == 3 else 64)
    parts = order if wide else 1
    config = ProjectionBackwardConfig(
        columns=columns,
        n=n,
        channels=spec.channels,
        layout="streams" if n == 1 else spec.layout,
        slice_c=slice_c,
        tile_m=16 * parts if wide else 16 if residual and n == 4 else 32,
        chunk=CHUNK if parts < 3 else 480,
        group=1 if wide else GROUP,
        stages=0,
        parts=parts,
        sum_groups=slice_c // 32 if not wide else 1,
        x_terms=min(terms_of(spec.x), order),
        phi_terms=min(terms_of(spec.phi, spec.norm_weight), order),
        order=order,
        tma=spec.rows_on_16 and many_boxes,
    )
    boxes = n * (1 + residual) + layer
    numbers = 1 + residual * (n * n + 4) + layer * n  # of a token, fp32: its factor of x, R, pre
    tile = config.tile_m * (slice_c * itemsize * boxes + 2 * (config.terms_columns + 8) + 4 * numbers)
    fixed = 2 * config.phi_rows * (n * slice_c + 8) + config.scratch + 4096
    return replace(config, stages=min(MAX_STAGES, (SHARED_MEMORY - fixed) // tile))
