"""The choice for some tokens, 17 to 512, on SM90: of these kernels the one whose estimated time is least.

Such a product makes one wave of tiles, or a few, and shapes differ in what its CTAs wait for: ``estimate`` adds that up
from the sizes, with a handful of measured constants. A TMA box takes longer for each row beyond a matrix's end than for
one that is read. H200, us, 4096 weights, K of 14336, pairs of tiles of 64 weights x 128 tokens: 129, 160, 192, 224, 256
tokens 104.6, 92.9, 77.1, 60.5, 47.4. So tiles overlap where they would end beyond, and tokens lie along an
instruction's columns, whose number goes by 16: then a single tile has few too many.
"""

from __future__ import annotations

import math

from cute_kernels.common.gemm_config import BLOCK, SHARED_MEMORY, GemmConfig

Kernel = tuple[GemmConfig, bool]  # and whether tokens lie along its columns, not its rows

FEWEST, MOST = 17, 512
# Measured, by least squares and least loss over 270 shapes and 119 kernels (bench/experiments/gemm.md).
# Cycles of TMA for BLOCK elements of a row, and for a row beyond the matrix's end; of an instruction's products, to its
# nominal ones; between a warpgroup's products of two tiles of K
ROW, ROW_BEYOND, PRODUCT, DEPTH = 0.832, 4.09, 0.961, 15.0
CYCLES = 1800.0  # in a microsecond
# Bytes in a microsecond: from DRAM; weights from L2, tokens from L2; of a CTA's first tile
DRAM, WEIGHTS, TOKENS, FIRST = 5.5e6, 8.28e6, 69.0e6, 0.05e6
LATENCY = 0.753  # microseconds from a free slot to its next tile
# Microseconds: of a kernel beside its products; for each doubling of its cluster; of each further tile of a CTA; of
# storing an element of a tile, and of one that leaves transposed by TMA
LAUNCH, CLUSTER, TILE, STORE, STORE_TRANSPOSED = 4.19, 0.157, 0.261, 3.58e-05, 2.8e-05
TURN = 0.02  # of TILE, where warpgroups take tiles in turn
NORM = 2.24  # of the times that overlap: more is closer to the longest of them
RESIDENT = 0.92  # share of the SMs that clusters of four find room on: 30 of them on an H200


def _kernel(
    rows: int,
    columns: int,
    depth: int,
    cluster: tuple[int, int],
    tokens_along_n: bool = True,
    ping_pong: bool = False,
) -> Kernel:
    """A kernel with as many stages as fit.

    Parts of a tile on their way out need room, too, and of 128 rows always: tokens may be the other operand. Where one
    warpgroup stores such a tile transposed results leave by TMA, too: 1 to 4 % less of 3 to 6 shapes for each kernel.
    Of 64 rows it is within 1 %, and a stage less costs 2 to 4 %.
    """
    room = SHARED_MEMORY - (2 * rows * 64 if rows == 128 or not tokens_along_n else 0)
    stages = min(room // ((rows + columns) * depth * 2), 16)
    group = 1 if tokens_along_n else 8
    by_tma = tokens_along_n and ping_pong and rows == 128
    return GemmConfig((rows, columns, depth), cluster, stages, group, ping_pong, True, by_tma), tokens_along_n


SOME_TOKENS: tuple[Kernel, ...] = (
    _kernel(32, 16, 256, (1, 2)),
    _kernel(32, 32, 128, (1, 2)),
    _kernel(32, 48, 256, (1, 1)),
    _kernel(64, 16, 256, (1, 2)),
    _kernel(64, 32, 128, (1, 1)),
    _kernel(64, 32, 128, (2, 2)),
    _kernel(64, 48, 128, (1, 2)),
    _kernel(64, 48, 128, (2, 1)),
    _kernel(64, 48, 128, (2, 2)),
    _kernel(64, 64, 128, (1, 2)),
    _kernel(64, 80, 64, (1, 2)),
    _kernel(64, 80, 128, (2, 1)),
    _kernel(64, 96, 64, (1, 2), ping_pong=True),
    _kernel(64, 112, 64, (1, 2), ping_pong=True),
    _kernel(64, 128, 64, (1, 2)),
    _kernel(64, 160, 64, (1, 2), ping_pong=True),
    _kernel(128, 80, 64, (1, 2), ping_pong=True),
    _kernel(128, 80, 64, (2, 1), ping_pong=True),
    _kernel(128, 96, 64, (1, 2), ping_pong=True),
    _kernel(128, 112, 64, (1, 2), ping_pong=True),
    _kernel(128, 112, 128, (1, 1)),
    _kernel(128, 128, 64, (1, 2), ping_pong=True),
    _kernel(128, 160, 64, (1, 2), ping_pong=True),
    _kernel(128, 192, 64, (1, 2), ping_pong=True),
    _kernel(64, 32, 128, (2, 1), tokens_along_n=False),
    _kernel(64, 80, 128, (2, 1), tokens_along_n=False),
    _kernel(64, 96, 64, (2, 1), tokens_along_n=False, ping_pong=True),
    _kernel(64, 96, 64, (4, 1), tokens_along_n=False, ping_pong=True),
    _kernel(64, 144, 64, (2, 1), tokens_along_n=False, ping_pong=True),
    _kernel(128, 80, 128, (2, 1), tokens_along_n=False),
    _kernel(128, 112, 64, (2, 1), tokens_along_n=False),
    _kernel(128, 128, 64, (1, 2), tokens_along_n=False, ping_pong=True),
    _kernel(128, 144, 64, (2, 1), tokens_along_n=False),
    _kernel(128, 160, 64, (2, 1), tokens_along_n=False, ping_pong=True),
    _kernel(128, 192, 64, (2, 1), tokens_along_n=False),
    _kernel(128, 208, 64, (2, 1), tokens_along_n=False),
    _kernel(128, 224, 64, (2, 1), tokens_along_n=False),
    _kernel(128, 256, 64, (2, 1), tokens_along_n=False),
    _kernel(192, 144, 64, (1, 2), tokens_along_n=False),
)


# The others spill where an activation is computed of sums that leave by no part of a tile
ACTIVATED = tuple((config, n) for config, n in SOME_TOKENS if not config.ping_pong and config.tile[1] <= 192)


def choose_for_tokens(tokens: int, weights: int, k: int, num_sms: int, activated: bool = False) -> Kernel:
    """The kernel of the least estimated time, the first of equals."""
    kernels = ACTIVATED if activated else SOME_TOKENS
    return min(kernels, key=lambda kernel: estimate(kernel, tokens, weights, k, num_sms))


def resident_clusters(size: int, num_sms: int) -> int:
    """Clusters of so many CTAs that run at once."""
    return max((num_sms if size < 4 else int(RESIDENT * num_sms)) // size, 1)


def estimate(kernel: Kernel, tokens: int, weights: int, k: int, num_sms: int) -> float:
    """Microseconds that a product takes with an empty L2.

    The longest of these, and something of the others: TMA's rows, of which a CTA asks for its share of what a cluster
    needs; a warpgroup's products, one after the other; all bytes from DRAM; from L2 the weights, once for each cluster
    along the tokens, and the tokens; the tiles of K, as many at a time as a CTA has slots.
    """
    config, tokens_along_n = kernel
    (rows, columns, depth), (cluster_m, cluster_n) = config.tile, config.cluster
    m, n = (weights, tokens) if tokens_along_n else (tokens, weights)
    clusters_m, clusters_n = -(-m // (rows * cluster_m)), -(-n // (columns * cluster_n))
    size = cluster_m * cluster_n
    waves = -(-clusters_m * clusters_n // resident_clusters(size, num_sms))
    k_tiles = -(-k // depth)

    # A CTA's shares of both operands' tiles; of the tokens that of the last rows, beyond the end of a single tile alone
    share_m, share_n = rows // cluster_n, columns // cluster_m
    of_weights, of_tokens, tile = (share_m, share_n, columns) if tokens_along_n else (share_n, share_m, rows)
    beyond = min(max(tile - tokens, 0), of_tokens)
    cycles = (of_weights + of_tokens - beyond) * ROW + beyond * ROW_BEYOND
    tma = waves * k_tiles * depth / BLOCK * cycles / CYCLES

    instructions = max(rows // 64, 1)
    alone = instructions == 1 or config.ping_pong  # one warpgroup multiplies at a time
    cycles = depth / 16 * instructions * max(columns / 2, (64 + columns) / 4) * PRODUCT
    products = waves * k_tiles * (cycles + (DEPTH if alone else 0.0)) / CYCLES

    dram = 2 * (weights * k + tokens * k + tokens * weights) / DRAM
    along_tokens, along_weights = (clusters_n, clusters_m) if tokens_along_n else (clusters_m, clusters_n)
    l2 = 2 * weights * k * along_tokens / WEIGHTS + 2 * tokens * k * along_weights / TOKENS
    slots = config.stages - (1.0 if alone else 0.5)  # it holds a slot longer
    latency = waves * k_tiles / slots * LATENCY

    first = 2 * (rows + columns) * depth / FIRST
    store = STORE_TRANSPOSED if tokens_along_n and config.transposed_store else STORE
    further, stored = (TURN * TILE, 1) if config.ping_pong else (TILE, waves)  # the other warpgroup hides the rest
    beside = LAUNCH + CLUSTER * math.log2(size) + first + further * (waves - 1) + store * rows * columns * stored
    return beside + sum(time**NORM for time in (tma, products, dram, l2, latency)) ** (1 / NORM)
