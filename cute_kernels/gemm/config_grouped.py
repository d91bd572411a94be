"""Static choices of grouped products: which kernel serves a call. Every candidate keeps ``serial_k16``.

The rows of a group have its own matrix (``rows``), or are summed over into its own result (``sums``). Groups are told
by their ends, on the device; what the host knows to choose by is how many there are, and their rows together.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cute_kernels.common.gemm_config import GemmConfig

if TYPE_CHECKING:
    import torch

MAX_GROUPS = 1024
MAX_TILES = 2**31 - 2**16


class GroupedSpec(NamedTuple):
    """A product of groups of rows.

    Attributes:
        dtype, out: of a and b; of d.
        ragged: "rows": d (R, N), of rows a (R, K) and a matrix b (N, K) for each group. "sums": d (M, N) for each
            group, of a (M, R) and b (N, R), summed over the group's rows.
        accumulate: of sums: the accumulators start from d (fp32); of a group without rows it stays as it is.
        a_major, b_major: the dimension whose elements are neighbours, "m" or "k", "n" or "k"; None: the operands are
            such that TMA does not read both, or cannot write d.
    """

    dtype: torch.dtype
    out: torch.dtype
    ragged: str
    accumulate: bool = False
    a_major: str | None = "k"
    b_major: str | None = "k"

    @property
    def majors(self) -> tuple[str | None, str | None]:
        return self.a_major, self.b_major


@dataclass(frozen=True)
class SumsConfig(GemmConfig):
    """Geometry of a kernel of sums.

    Attributes:
        prefetches: SM90: who begins a tile of sums that are accumulated into brings those of the next one to L2.
        most_rows_first: groups are walked by their rows, those of most rows first.
    """

    prefetches: bool = False
    most_rows_first: bool = False


def begins_anywhere(ragged: str, a_major: str | None, b_major: str | None) -> bool:
    """Whether a group may begin at any row: TMA's boxes do, but along neighbouring elements at 16 bytes alone.

    Elsewhere they are an illegal instruction.
    """
    return a_major == "k" if ragged == "rows" else (a_major, b_major) == ("m", "n")


def grouped_arguments(arch: str, spec: GroupedSpec, k: int, config: GemmConfig | None, transposed: bool) -> tuple:
    """The arguments of the builder ``grouped`` for products of ``k``; for sums nobody knows ``k``."""
    if config is None:
        return arch, spec._replace(a_major=None, b_major=None), None, False, False
    whole = spec.ragged == "rows" and config.multi_block_tma(arch, spec.majors, k)
    return arch, spec, config, transposed, whole


# Rows of a group along M: the last tile is partly empty, so none has more than 128 rows, and pairs are along N. H200,
# us, up of Qwen3-30B, gpt-oss-120b, T=8192, random groups, a probe: 636, 1919; of a cooperative 128 x 256 691, 2482
PING_PONG_192 = GemmConfig((128, 192, 64), (1, 2), 4, 8, ping_pong=True)
PING_PONG_160 = GemmConfig((128, 160, 64), (1, 2), 5, 8, ping_pong=True)
PING_PONG_128 = GemmConfig((128, 128, 64), (1, 2), 5, 8, ping_pong=True)
ROWS = (PING_PONG_192, PING_PONG_160, PING_PONG_128)
# The price of a column, by a tile's columns, where an SM has tiles of many rows. H200, time by that with 192 columns:
# 160, N=2880 (0.938 as many), gpt-oss-120b, random and skew, means of 256 to 512 rows 0.927 to 0.966, 128 rows 1.04,
# equal groups 0.92; N=4096 (0.985), DeepSeek-V3, 128 to 512 rows 0.975 to 0.986. 128, N=4096 (0.970), DeepSeek-V3, 256
# to 512 rows 0.963 to 0.976, Qwen3-235B 0.972 to 0.975, Mixtral 1.003, 1.006. Of N=14336 160 have 0.987: not measured.
# But matrices along n, from which TMA reads 160 columns by 32, are not read that way a few times each: dA of up of
# gpt-oss-120b, 256 rows, the bench's time by bmm's 1.30 with 192 columns, 1.37 with 160, equal groups 1.05, 1.19; of
# gpt-oss-20b, 1024 rows, 1.14, 1.07 and 1.09, 1.00
COLUMN_PRICE = {192: 1.0, 160: 1.015, 128: 1.02}
# Sums; a tile of fp32 that is read and written is worth hiding. H200, into fp32, time with prefetches by that without:
# 128 columns, up of Qwen3-30B, T=2048, 8192, of 64 experts of DeepSeek-V3, T=2048, a down of 1408 columns 0.90, 0.96,
# 0.92, 1.00; 192 columns, whose sums take half as much again of L2, down of Qwen3-30B, up of gpt-oss-120b, Mixtral,
# T=8192, 1.17, 1.05, 1.06
SUMS = (
    SumsConfig((128, 192, 64), (2, 1), 4, 8, ping_pong=True),
    SumsConfig((128, 128, 64), (2, 1), 5, 8, ping_pong=True, prefetches=True),
    SumsConfig((128, 192, 64), (2, 1), 4, 8, ping_pong=True, most_rows_first=True),
)
# Tiles of pairs, of a group, up to which a pair of 132 SMs has tiles of every second group at most: it may be of those
# with many rows alone. H200, time with most rows first by that without: Qwen3-30B's down, T=8192, 32 tiles, random and
# skew, dW 0.90, 0.90, into fp32 0.98, 0.95; where groups have 64 tiles and more 1.00 to 1.07
FEW_TILES = 33
# Mean of a group's rows from which on the products of sums take longer than what the sums start from
MANY_ROWS = 1024
# Few rows a group, along N, the product transposed: the bytes of the weights are what counts. Mean of a group's rows up
# to -> kernel. A tile is wider than the mean, since random groups have more, and a second tile reads the weights again.
# H200, us, (64, 8), (64, 16), (64, 32), 128 rows; bmm of equal groups, random groups (0.3), up:
#     mean 4   Qwen3-30B 180, 184, 185, -; 183   Mixtral 440, 442, 451, -; 438
#     mean 8   Qwen3-30B 217, 195, 199, -; 196   gpt-oss-120b 1160, 967, 959, -; 941
#     mean 16  Qwen3-30B 312, 239, 204, -; 203   Mixtral 1038, 683, 449, -; 446
#     mean 32  Mixtral -, 996, 645, 492; 447     64 experts of DeepSeek-V3 -, 1771, 1155, 935; 879
# With a depth of 256, or tiles of 16 or 32 weights: within 2 %, or slower. (64, 48), (64, 64): slower everywhere
DECODE = {
    4: GemmConfig((64, 8, 128), (1, 1), 11, 1),
    7: GemmConfig((64, 16, 128), (1, 1), 10, 1),
    24: GemmConfig((64, 32, 128), (1, 1), 8, 1),
}
# More rows, along M again, of SM90; up to a mean of so many a group has one tile as a rule. H200, time by bmm's of the
# mean, and by the fastest of 128 rows: 32, 33 rows, Mixtral up 1.03, 0.99, and 0.96, down 1.02, 0.99, and 0.94, 0.92;
# DeepSeek-V3, Qwen3, gpt-oss-120b 0.99 to 1.02, and 0.94 to 0.97; 40 rows 0.95 to 1.11 of the fastest, 64 1.04 to 1.28.
# 16 rows, by tiles of 32 along N: Mixtral up 0.95, down 1.01
SOME = 36
SOME_ROWS = GemmConfig((64, 128, 128), (1, 1), 4, 1)
# Mean of a group's rows up to which it has one tile of 128 as a rule
ONE_TILE = 64


def many_rows(arch: str) -> tuple[GemmConfig, ...]:
    """Tiles of 128 rows of a group."""
    return ROWS if arch == "sm_90a" else _together((PING_PONG_192, PING_PONG_128))


def rows_kernels(arch: str) -> tuple[tuple[GemmConfig, bool], ...]:
    """(config, transposed) of all kernels of rows, but for that of any strides."""
    some = ((SOME_ROWS, False),) if arch == "sm_90a" else ()
    few = ((config, True) for config in DECODE.values())
    return (*((config, False) for config in many_rows(arch)), *some, *few)


def sums(arch: str) -> tuple[SumsConfig, ...]:
    """Tiles of sums."""
    if arch == "sm_90a":
        return SUMS
    return tuple(dataclasses.replace(config, ping_pong=False, prefetches=False) for config in SUMS)


def _together(configs: tuple[GemmConfig, ...]) -> tuple[GemmConfig, ...]:
    """The same for SM100, whose kernel hides what is done with a tile's sums anyway. Not measured."""
    return tuple(dataclasses.replace(config, ping_pong=False) for config in configs)


def candidates(arch: str, ragged: str) -> tuple[tuple[GemmConfig | None, bool], ...]:
    """(config, transposed) of all kernels that a call may be given to; None: the one for operands of any stride."""
    if ragged == "sums":
        return ((None, False), *((config, False) for config in sums(arch)))
    return ((None, False), *rows_kernels(arch))


def choose_rows(
    arch: str, rows: int, groups: int, n: int, num_sms: int, b_major: str | None = "k"
) -> tuple[GemmConfig, bool]:
    """(kernel, whether it computes the transposed product) for ``rows`` of ``groups`` groups with matrices of n.

    Up to ONE_TILE rows a group on the mean the host knows how many tiles there are, and the columns of the busiest SM
    count; at equal counts narrow tiles win. H200, 64 rows, 160 and 128 columns, time by that with 192: Mixtral up
    0.94, 0.96, down 0.88, 0.84; DeepSeek-V3 up 0.95, 0.99, down 0.98, 0.99; Qwen3-30B up 0.98, 0.96, down 1.00, 0.97;
    gpt-oss-120b up 0.98, 1.00, down 0.95, 1.01. Beyond, it is the columns of all tiles, each at its price.
    """
    mean = -(-rows // max(min(groups, rows), 1))
    for most, config in DECODE.items():
        if mean <= most:
            return config, True
    if arch == "sm_90a" and mean <= SOME:
        return SOME_ROWS, False

    def cost(config: GemmConfig) -> tuple[float, int]:
        columns = config.tile[1]
        if mean <= ONE_TILE:
            return _busiest(n, groups, config, num_sms), columns
        return _padded(n, config) * COLUMN_PRICE[columns], columns

    configs = many_rows(arch)
    if b_major == "n" and ONE_TILE < mean < MANY_ROWS:
        configs = tuple(config for config in configs if config.tile[1] % 64 == 0)
    return min(configs, key=cost), False


def choose_sums(arch: str, m: int, n: int, rows: int, groups: int, accumulate: bool) -> tuple[GemmConfig, bool]:
    """(kernel, False) for sums of (m, n) a group, over ``rows`` of all groups.

    Each tile reads its rows of a and b, so those of a narrow one are dear. H200, us, 192 and 128 columns, T=8192,
    (2048, 1408), for which 192 have 9 % of columns too many: 516, 580. Where sums are accumulated into, and products of
    few rows do not take longer, tiles that do not overhang go first: means of 512 rows, (1536, 2048) 1266, 1182; of
    256, (5760, 2880), which 192 divides, 5627, 5767; of 2048, (28672, 4096) 5734, 6096.
    """
    few = rows < MANY_ROWS * groups

    def tiles(config: GemmConfig) -> int:
        return math.prod(-(-(m, n)[i] // (config.tile[i] * config.cluster[i])) for i in range(2))

    def cost(config: SumsConfig) -> tuple[bool, bool, int, bool]:
        overhangs = accumulate and few and n % config.tile[1] > 0
        is_late = config.most_rows_first and tiles(config) > FEW_TILES
        return is_late, overhangs, tiles(config) * sum(config.tile[:2]), not config.most_rows_first

    return min(sums(arch), key=cost), False


def _busiest(size: int, groups: int, config: GemmConfig, num_sms: int) -> int:
    """Columns that the busiest SM computes of a size, where each group has one tile along its rows."""
    _, cluster = config.cluster
    tiles = groups * (_padded(size, config) // (config.tile[1] * cluster))
    return -(-tiles // max(num_sms // cluster, 1)) * config.tile[1]


def _padded(size: int, config: GemmConfig) -> int:
    """Columns that tiles of a size have."""
    tile = config.tile[1] * config.cluster[1]
    return -(-size // tile) * tile


def tiles_bound(rows: int, groups: int, n: int, config: GemmConfig | None, transposed: bool) -> int:
    """Clusters' tiles that rows in so many groups have at most."""
    tile_rows, tile_n = 64, 64
    if config is not None:
        (tile_m, tile_n, _), (cluster_m, cluster_n) = config.tile, config.cluster
        tile_rows, tile_n = (tile_n, tile_m * cluster_m) if transposed else (tile_m, tile_n * cluster_n)
    return (rows // tile_rows + min(groups, rows)) * -(-n // tile_n)
