"""H and the layer input by clusters that hold phi: their Spec, and how they share a token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from cute_kernels.mhc.config.projection import MAX_STAGES, SHARED_MEMORY, order_of, terms_of

if TYPE_CHECKING:
    import torch

    from cute_kernels.mhc.variants import Constants

BLOCK_TOKENS = 16  # that a cluster has at once
MAX_PRODUCT_REGISTERS = 192
MAX_PRE_COLUMNS = 1792  # of a CTA: three blocks in flight fill its shared memory


class PreSpec(NamedTuple):
    """H and mean square of bf16 streams, and their weighted sum: the sublayer's input.

    Args:
        columns: N; n of a head.
        phi, norm_weight, alpha, beta: dtypes.
        constants: None: H and mean square are all that is wanted.
        keeps_h: H and mean square are written.
        writes_pre: of a head.
    """

    n: int
    channels: int
    layout: str
    columns: int
    precision: str
    phi: torch.dtype
    norm_weight: torch.dtype | None
    alpha: torch.dtype | None
    beta: torch.dtype | None
    constants: Constants | None
    keeps_h: bool
    writes_pre: bool


@dataclass(frozen=True)
class PreConfig:
    """How clusters compute H and the layer input of bf16 streams (kernel/projection_cluster.py).

    ``columns``: N; ``cluster`` CTAs share a token, each with ``slice_c`` channels of each of ``n`` streams of
    ``channels``, in memory in the order ``layout``; ``stages`` blocks of tokens have a place; where nothing is mixed
    ``lead`` at most are loaded beyond the last whose H is known, and ``flight`` pieces of them at most are on their way
    at once (0: any number), one more in clusters that have a block more than others; ``phi_terms``: bf16 numbers whose
    sum stands for an element of phi.
    """

    n: int
    channels: int
    layout: str
    columns: int
    cluster: int
    slice_c: int
    stages: int
    flight: int
    lead: int
    phi_terms: int

    @property
    def k(self) -> int:
        """Elements of a token."""
        return self.n * self.channels

    @property
    def owned(self) -> int:
        """Tokens of a block whose coefficients a CTA computes."""
        return BLOCK_TOKENS // self.cluster

    @property
    def boxes(self) -> int:
        """Boxes of 64 columns that a CTA has of a token."""
        return self.n * self.slice_c // 64

    @property
    def piece(self) -> int:
        """Boxes that are asked for together: a stream's, or 512 bytes of a token.

        Neighbours within 512 bytes asked for at other times presumably cost DRAM more. H200, projection, 2048x4x5120,
        us, boxes a piece: streams 5 (a stream's) 29.0, 4 30.8, 4 and 6 31.1; channels 4 28.5, 5 28.9, 4 and 6 30.2.
        """
        return self.boxes // self.n if self.layout == "streams" else math.gcd(self.boxes, 4)

    @property
    def steps(self) -> int:
        """Steps of 16 columns that each of eight warps multiplies."""
        return self.boxes // 2

    @property
    def width(self) -> int:
        """Numbers of a token's sums, H and mean square, in shared memory: an odd number of quads, to use all banks."""
        return -(-(self.columns + 1) // 4) // 2 * 8 + 4

    @property
    def octets(self) -> int:
        """Octets of rows of phi."""
        return -(-self.columns // 8)

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows that the terms of phi fill."""
        return -(-self.octets * self.phi_terms // 2)

    @property
    def product_registers(self) -> int:
        """Registers of a thread that multiplies: terms of phi, and sums."""
        return self.row_tiles * (4 * self.steps + 8)

    def registers(self, has_layer_input: bool) -> tuple[int, int, int]:
        """Registers of a thread that multiplies, of one that makes the layer input, of one that helps.

        Together at most what a CTA of 512 threads, or of 384 that mixes nothing, starts with: 128 or 168 a thread.
        H200, pre, 4096x4x7168, us: 224, 40, 24 102.1, 216, 48, 32 91.5.
        """
        products = max(128, min(216, self.product_registers + 40))
        if not has_layer_input:
            return products, 0, min(104, 504 - 2 * products)
        helps = 56 if products <= 208 else 32
        return products, min(144, (512 - 2 * products - helps) // 8 * 8), helps

    def num_clusters(self, num_tokens: int, num_sms: int) -> int:
        """One for each block of tokens, no more than are resident."""
        return min(-(-num_tokens // BLOCK_TOKENS), self.resident(num_sms))

    def resident(self, num_sms: int) -> int:
        """Clusters that are resident at once, at most: SMs of a GPC that do not make up a cluster stay empty.

        H200, one CTA an SM: 66 clusters of 2, 30 of 4, 15 of 8, 7 of 16 are; of 8 this asks for 14, which are as fast.
        """
        clusters = num_sms // self.cluster
        return max(1, clusters if self.cluster <= 2 else clusters * 10 // 11)


def pre_config(spec: PreSpec) -> PreConfig | None:
    """The smallest cluster whose registers hold phi; None where 16 CTAs are not enough: too wide, or eight streams.

    Clusters of 16 load more slowly: loads of x alone take
    77.5 us at 8192x4x4096 (H200), by the same 112 CTAs without clusters 71.5.

    ``lead``: 112 KB of x on their way, 128 in clusters of more than four: more keep the cluster's slowest waiting for
    the memory. H200, projection, us: 16384x4x1280, in clusters of 4, with 2, 3, 4 blocks of 40 KB 60.3, 50.9, 51.3;
    2048x4x5120, of 16, with 3, 4 of 40 KB 31.3, 30.2; 8192x4x4096, of 16, with 3, 4, 5 of 32 KB 83.2, 74.6, 76.6.

    ``flight``: 64 KB that have not arrived, in clusters of 16. 2048x4x5120, 4 to 7 of 10 KB: 30.5, 29.4, 29.0, 29.3;
    order of channels, 6 to 8 of 8 KB: 29.0, 28.6, 28.7; smaller clusters are 1 % slower so (8192x4x2560, by blocks,
    48.9 -> 49.3).
    """
    n, channels, columns = spec.n, spec.channels, spec.columns
    terms = terms_of(spec.phi, spec.norm_weight)
    phi_terms = min(terms, order_of(spec.precision))
    layout = "streams" if n == 1 else spec.layout
    unit = max(64, 128 // n)  # whole boxes of each stream, an even number of them
    for cluster in (2, 4, 8, 16):
        slice_c = -(-channels // (cluster * unit)) * unit
        config = PreConfig(n, channels, layout, columns, cluster, slice_c, 0, 0, 0, phi_terms)
        fits = config.product_registers <= MAX_PRODUCT_REGISTERS and n * slice_c <= MAX_PRE_COLUMNS
        if fits and n * config.owned <= 32:  # a lane has one gate
            sums = 2 * 8 * BLOCK_TOKENS * 4 * config.width
            stage = BLOCK_TOKENS * (config.boxes * 128 + 4 * (config.width + n))
            stages = min(MAX_STAGES, (SHARED_MEMORY - sums - 4096) // stage)
            phi_bytes = 8 * config.octets * (2 if terms == 1 else 4)  # a column, as it comes through the ring
            block = BLOCK_TOKENS * config.boxes * 128
            lead = min(stages, -(-(112 if cluster <= 4 else 128) * 1024 // block))
            piece = block * config.piece // config.boxes
            flight = max(2, round(64 * 1024 / piece)) if cluster == 16 else 0
            config = replace(config, stages=stages, flight=flight, lead=lead)
            return config if phi_bytes <= 2 * BLOCK_TOKENS * stages else None
    return None
