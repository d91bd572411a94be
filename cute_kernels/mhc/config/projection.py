"""The projection by parts of K: its Spec, and how CTAs of warps or of warpgroups multiply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

PROJECTION_TOKENS = 128  # of a CTA whose warps multiply
MAX_WARP_COLUMNS = 32  # whose sums for 64 tokens a warp's registers hold
SLICE = 4096
# Terms of 8 bits that an element needs to be exact
TERMS = {"torch.bfloat16": 1, "torch.float16": 2, "torch.float32": 3}
SHARED_MEMORY = 227 * 1024  # of a CTA
MAX_STAGES = 8
TILE_K = 64  # columns of x that come at once where warpgroups multiply


def terms_of(dtype: torch.dtype, norm_weight: torch.dtype | None = None) -> int:
    """bf16 numbers whose sum is an element, or its product with one of ``norm_weight``, which is fp32."""
    return 3 if norm_weight is not None else TERMS[str(dtype)]


def order_of(precision: str) -> int:
    """Products of term a and term b are taken where a + b is less: "tf32" to 2^-16 of the largest, "fp32" to 2^-24."""
    return 2 if precision == "tf32" else 3


class ProjectionSpec(NamedTuple):
    """H and mean square of x (M, ``k``) and phi (``columns``, ``k``), by parts of K.

    ``x``, ``phi``, ``norm_weight``: dtypes. ``tma``: rows start and end on 16 bytes.
    """

    columns: int
    k: int
    x: torch.dtype
    phi: torch.dtype
    norm_weight: torch.dtype | None
    precision: str
    tma: bool


def by_warpgroups(arch: str, x: torch.dtype, columns: int) -> bool:
    """Whether there are kernels with warpgroup MMA for phi of so many rows."""
    return arch == "sm_90a" and columns > MAX_WARP_COLUMNS and str(x) == "torch.bfloat16"


@dataclass(frozen=True)
class ProjectionConfig:
    """How the products of tokens with phi are computed.

    ``columns``: N; ``k``: n C; ``splits``: parts of K that are added by themselves; ``tile_k``: columns of x that come
    at once, ``stages`` tiles in flight, ``ctas_per_sm`` times; ``warps_k``: warps that share a token's columns;
    ``x_terms``, ``phi_terms``: bf16 numbers whose sum stands for an element; products of term a and term b are taken
    where a + b < ``order``. ``tma``: rows start and end on 16 bytes.
    """

    columns: int
    k: int
    splits: int
    tile_k: int
    stages: int
    ctas_per_sm: int
    warps_k: int
    x_terms: int
    phi_terms: int
    order: int
    tma: bool

    @property
    def padded_columns(self) -> int:
        """Columns in whole tiles of the tensor cores."""
        return -(-self.columns // 8) * 8

    @property
    def tiles(self) -> int:
        """Tiles of K; every ``splits``-th belongs to one part."""
        return -(-self.k // self.tile_k)

    def grid(self, num_tokens: int, num_sms: int) -> int:
        """CTAs: one for each block of tokens and part of K, as many as fit."""
        return min(-(-num_tokens // PROJECTION_TOKENS) * self.splits, num_sms * self.ctas_per_sm)


def splits_of(k: int) -> int:
    """Parts of K, of up to SLICE columns each: a power of two as tokens come in, so that all CTAs have the same to do.

    H200, projection, share of the same-bytes copy, for parts of 4096 and a rest: 16384x4x1280 0.59 -> 0.70, 8192x4x2560
    0.63 -> 0.72, 2048x4x5120 0.53 -> 0.62; twice as many parts: 4096x4x4096 0.69 -> 0.71, 4096x4x7168 0.78 -> 0.67.
    """
    return 1 << (-(-k // SLICE) - 1).bit_length()


def projection_config(spec: ProjectionSpec) -> ProjectionConfig:
    """H200, 8192x4x4096, share of the same-bytes copy: two CTAs of two stages of 128 columns 0.84, of four of 64 0.82,
    three CTAs of two of 64 0.80.
    """
    order, itemsize = order_of(spec.precision), spec.x.itemsize
    light = spec.columns <= MAX_WARP_COLUMNS and terms_of(spec.x) == 1
    return ProjectionConfig(
        columns=spec.columns,
        k=spec.k,
        splits=splits_of(spec.k),
        tile_k=128 if light else 32 if itemsize == 4 else 64,
        stages=2 if light else 3,
        ctas_per_sm=2,
        warps_k=2 if light else 1,
        x_terms=min(terms_of(spec.x), order),
        phi_terms=min(terms_of(spec.phi, spec.norm_weight), order),
        order=order,
        tma=spec.tma,
    )


@dataclass(frozen=True)
class WarpgroupProjectionConfig:
    """How warpgroups compute the products of bf16 tokens with many rows of phi (kernel/projection_wgmma.py).

    ``columns``: N; ``k``: n C; ``splits``: as in ProjectionConfig; ``tokens`` of a CTA; ``stages`` tiles in flight;
    ``phi_terms``: bf16 numbers whose sum stands for an element of phi.
    """

    columns: int
    k: int
    splits: int
    tokens: int
    stages: int
    phi_terms: int

    @property
    def padded_columns(self) -> int:
        """Columns in whole octets."""
        return -(-self.columns // 8) * 8

    @property
    def term_rows(self) -> int:
        """Rows that the terms of phi fill."""
        return self.padded_columns * self.phi_terms

    @property
    def instruction_rows(self) -> int:
        """Rows that one instruction multiplies: all ``term_rows`` if sums fit the 128 registers of a thread of 512.

        240 would need 146, says ptxas, whatever `setmaxnreg` adds later.
        """
        return self.term_rows if self.term_rows <= 160 else self.padded_columns

    @property
    def tiles(self) -> int:
        """Tiles of K; every ``splits``-th belongs to one part."""
        return -(-self.k // TILE_K)

    def grid(self, num_tokens: int, num_sms: int) -> int:
        """Pairs of CTAs: one for each two blocks of tokens and part of K, as many as fit."""
        return min(-(-num_tokens // (2 * self.tokens)) * self.splits, max(1, num_sms // 2))


def warpgroup_projection_config(spec: ProjectionSpec) -> WarpgroupProjectionConfig:
    """A thread has up to 160 sums."""
    phi_terms = min(terms_of(spec.phi, spec.norm_weight), order_of(spec.precision))
    config = WarpgroupProjectionConfig(spec.columns, spec.k, splits_of(spec.k), 0, 0, phi_terms)
    tokens = 256 if config.term_rows <= 160 else 128
    tile = 2 * TILE_K * (tokens + config.term_rows)
    return replace(config, tokens=tokens, stages=min(MAX_STAGES, (SHARED_MEMORY - 2048) // tile))
