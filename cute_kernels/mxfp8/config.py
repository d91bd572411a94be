"""Static choices of the block-scaled quantizers: how a scale follows from a block's largest magnitude, geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    import torch

BLOCK = 32
TILE = 128  # a tile of TILE x TILE elements has one atom of 128 x 4 blocked scales in either orientation
ATOM = 512  # bytes of that atom
FEW_TILES = {1: 2400, 2: 1200}  # by the number of orientations
NARROW_TILES = 1000
NARROW = 64  # columns
RING_TILES = 3000  # two outputs of as many: the ring of kernel_dual.py
RING_CTAS = 8  # of its clusters
TALL = 2  # tiles along A that a CTA of the ring stores together
MOST_PADDING = 1.125  # tiles of whole clusters over tiles
MOST_RING_PADDING = 1.4
# Along A and along B, of dequantize. H200, us, rows and columns of 32768x7168, of 8x7168x2048: (128, 128) 178.5, 178.6,
# 91.0, 89.6; (32, 256) 175.8, 175.3, 89.5, 88.2; (16, 256) 174.6, 173.6, 89.1, 87.8; (8, 256) 182.3, 183.2, 90.6, 96.7
DEQUANTIZE_TILE = (16, 256)
# (tiles along A, along B, experts), as in QuantizeConfig, one of each geometry: fewest, few, more, a ring's, too thin
# for clusters
GRIDS = ((1, 1, 1), (32, 36, 1), (40, 50, 1), (64, 64, 1), (1, 1, 4096))
Mode = Literal["rceil", "floor", "ceil", "even"]
MODES = get_args(Mode)

_FP32_INFINITY = 0x7F800000
# Exponent of the format's largest number, bits of its mantissa
_LARGEST_EXPONENT = {"e4m3": 8, "e5m2": 15}
_MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}


class QuantizeSpec(NamedTuple):
    """x (N, K) or (E, N, K), by its rank, to fp8 elements and scales; sizes and the strides of x are run-time values.

    ``transposed``: N is the contiguous dimension of x, else K. ``along_k``, ``along_n``: which operands are wanted:
    row-major q with blocks along K, column-major q with blocks along N. ``square``: blocks of 32 x 32 serve both.
    """

    x: torch.dtype
    q: torch.dtype
    rank: int
    transposed: bool
    along_k: bool
    along_n: bool
    square: bool
    mode: str
    scale_layout: str

    @property
    def kinds(self) -> tuple[str, str]:
        """How the scales of blocks along k and along n are laid out.

        "columns": (rows, blocks) of a matrix, "rows": (blocks, rows), "square": one scale a square, "blocked": in
        atoms.
        """
        if self.scale_layout == "blocked":
            return "blocked", "blocked"
        return ("square", "square") if self.square else ("columns", "columns" if self.rank == 2 else "rows")

    @property
    def pass_kinds(self) -> tuple[str | None, str | None]:
        """The kinds of the row pass and of the col pass, None where one is not wanted."""
        kinds = self.kinds
        of_k, of_n = kinds[0] if self.along_k else None, kinds[1] if self.along_n else None
        return (of_n, of_k) if self.transposed else (of_k, of_n)


class DequantizeSpec(NamedTuple):
    """q (N, K) or (E, N, K), by its rank, row-major or (``transposed``) column-major, to y of the same strides.

    ``kind``: how the scales of q's rows (columns) lie: "blocked", "columns" (R, C), "rows" (C, R), or one a "square".
    """

    q: torch.dtype
    y: torch.dtype
    rank: int
    transposed: bool
    kind: str


@dataclass(frozen=True)
class ScaleRule:
    """The scale's byte from the fp32 bits of a block's largest magnitude, in integers.

    255 from ``upper`` on, 0 below ``lower``, else ``((bits + add) >> 23) - sub``.
    """

    add: int
    sub: int
    lower: int
    upper: int = _FP32_INFINITY


def scale_rule(mode: str, fmt: str) -> ScaleRule:
    """The rule of a mode for e4m3 or e5m2 elements; tests/mxfp8/test_reference.py holds it to the definition."""
    largest = _LARGEST_EXPONENT[fmt]
    zero = largest << 23
    if mode == "floor":
        return ScaleRule(0, largest, zero)
    if mode == "ceil":
        return ScaleRule(0x7FFFFF, largest, zero + 1)
    if mode == "even":
        half = 1 << (22 - _MANTISSA_BITS[fmt])
        return ScaleRule(half, largest, ((largest + 1) << 23) - half, _FP32_INFINITY - half)
    # rceil: both formats' largest number is 1.75 * 2^largest, mantissa 0x600000. The one amax just above 2^-127 times
    # it has a product with 1 / largest, a subnormal number, that is rounded down to that power of two
    return ScaleRule(0x7FFFFF - 0x600000, largest, zero + 0x600002)


@dataclass(frozen=True)
class QuantizeConfig:
    """Geometry of the quantizer.

    Attributes:
        stages: input tiles in flight a CTA.
        ctas_per_sm: CTAs that an SM holds at once.
        warps: of a CTA.
        persistent: whether resident CTAs walk over the tiles; else a CTA a tile.
        down: whether tiles along the strided dimension come first, else those along the contiguous one.
        cluster: neighbouring tiles, along the strided dimension (A) and the contiguous one (B), whose CTAs put their
            scales together, so that larger parts of sectors are written, or whole ones; (1, 1): none.
        in_place: whether the output along the contiguous dimension takes the place of x, so that more CTAs fit an SM.
        width: of a tile along the contiguous dimension, TILE or NARROW; this only of blocks along the strided one, and
            without clusters.
    """

    stages: int
    ctas_per_sm: int
    warps: int
    persistent: bool
    down: bool
    cluster: tuple[int, int] = (1, 1)
    in_place: bool = False
    width: int = TILE

    def num_ctas(self, tiles: tuple[int, int, int], num_sms: int) -> int:
        """CTAs to launch for tiles of TILE x TILE along A, along B, and of so many experts."""
        a, b, experts = tiles
        padded = [-(-count // size) * size for count, size in zip((a, b), self.cluster, strict=True)]
        num_ctas = padded[0] * padded[1] * (TILE // self.width) * experts
        return min(num_ctas, self.ctas_per_sm * num_sms) if self.persistent else num_ctas


@dataclass(frozen=True)
class DualConfig:
    """Geometry of the quantizer whose resident CTAs, one an SM, write two outputs (kernel_dual.py).

    Attributes:
        ctas: of a cluster, neighbours along the contiguous dimension that store at the same time and put their scales
            together.
    """

    ctas: int

    def num_ctas(self, tiles: tuple[int, int, int], num_sms: int) -> int:
        """CTAs to launch for tiles of TILE x TILE along A, along B, and of so many experts."""
        a, b, experts = tiles
        clusters = -(-a // TALL) * -(-b // self.ctas) * experts
        return min(clusters, max(1, num_sms // self.ctas)) * self.ctas


def tiles_of(shape: Sequence[int], transposed: bool, sizes: tuple[int, int] = (TILE, TILE)) -> tuple[int, int, int]:
    """Tiles of these sizes along the strided dimension, along the contiguous one, and experts."""
    *experts, n, k = shape
    a, b = (k, n) if transposed else (n, k)
    return -(-a // sizes[0]), -(-b // sizes[1]), experts[0] if experts else 1


def _fill(tiles: tuple[int, int, int], sizes: tuple[int, int], most: float) -> bool:
    """Whether pieces of so many tiles along A and along B have no more than ``most`` times the tiles, along both."""
    return all(-(-count // size) * size <= most * count for count, size in zip(tiles, sizes, strict=False))


def quantize_config(
    arch: str, itemsize: int, row_kind: str | None, col_kind: str | None, tiles: tuple[int, int, int]
) -> QuantizeConfig | DualConfig:
    """Geometry for inputs of ``itemsize`` bytes. The bytes written are the same in every geometry.

    Kinds: of the scales along the contiguous and along the strided dimension, None where they are not wanted.
    ``tiles``: of TILE x TILE, along the strided dimension, along the contiguous one, and experts.
    H200, bf16, cold L2, share of the speed of a copy of the same bytes:

    fewest, along A: tiles of 64 columns, 128   3-D 1x7168x2048 0.989, 0.955; 1x8192x5120 0.963, 0.974
    few tiles: resident CTAs or a CTA a tile    dual 8192x2048 0.902, 0.871; colwise 4x2880x2880 0.957, 0.921
    down or along                               colwise 131072x7168 0.965, 0.899; 3-D 8x8192x5120 1.002, 0.992
    clusters or none                            colwise 131072x7168 0.991, 0.965; rowwise 32768x7168 1.012, 0.978
    two outputs, three CTAs an SM               dual 131072x7168 0.826, 8192x7168 0.874; 3-D 8x8192x5120 0.905
    four, of which each writes over its x       0.836, 0.888; 0.896; blocked 4x2880x2880 0.933 for 0.894

    Two outputs in one run (dual 131072x7168, 131072x3584, 131072x1280, 8192x7168; 3-D 64x896x8192, 16x2880x2880):

    ring, clusters of 8         0.926, 0.926, 0.894, 0.922; 0.984, 0.952
    of 4                        0.914, 0.918, 0.929, 0.922; 0.971, 0.939
    of 2                        0.900, 0.909, 0.924, 0.919; 0.959, 0.927
    four CTAs an SM, (2, 2)     0.864, 0.871, 0.920, 0.917; 0.938, 0.975
    """
    outputs = (row_kind is not None) + (col_kind is not None)
    num_tiles = tiles[0] * tiles[1] * tiles[2]
    few = num_tiles <= FEW_TILES[outputs]
    if itemsize == 4:
        return QuantizeConfig(1, ctas_per_sm=2, warps=8, persistent=False, down=row_kind is None)
    if num_tiles <= NARROW_TILES and row_kind is None and col_kind != "square":
        return QuantizeConfig(6, ctas_per_sm=2, warps=4, persistent=True, down=False, width=NARROW)
    if few and (outputs == 1 or row_kind != "blocked" or arch != "sm_90a"):
        return QuantizeConfig(3 if outputs == 1 else 2, ctas_per_sm=2, warps=8, persistent=True, down=False)
    many = num_tiles >= RING_TILES and _fill(tiles, (TALL, RING_CTAS), MOST_RING_PADDING)
    if outputs == 2 and arch == "sm_90a" and many:
        return DualConfig(RING_CTAS)
    cluster = (1, 1)
    if outputs == 1:
        if row_kind == "columns":
            cluster = (1, 8)
        elif col_kind == "columns":
            cluster = (8, 1)
    elif row_kind == "columns" and arch == "sm_90a":
        cluster = (2, 2)
    if not _fill(tiles, cluster, MOST_PADDING):
        cluster = (1, 1)
    if outputs == 1:
        return QuantizeConfig(1, ctas_per_sm=4, warps=8, persistent=False, down=row_kind is None, cluster=cluster)
    if arch != "sm_90a":  # in place is measured on sm_90a alone
        return QuantizeConfig(1, ctas_per_sm=3, warps=8, persistent=False, down=False)
    return QuantizeConfig(1, ctas_per_sm=4, warps=8, persistent=False, down=False, cluster=cluster, in_place=True)
