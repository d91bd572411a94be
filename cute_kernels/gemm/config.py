"""Static choices of the matrix products: which kernel serves a call. Every candidate keeps ``serial_k16``.

One fp32 accumulator an element, over the whole K, ascending, in steps of 16, from zero or from what is accumulated
into: then the tile's shape, the stages, the cluster, the operands' order and the instruction change no bit, and the
choice may depend on M. tests/gpu/gemm/test_invariance.py holds every pair of candidates together, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

CONTRACT = "serial_k16"


@dataclass(frozen=True)
class GemmConfig:
    """Geometry of a kernel.

    Attributes:
        tile: (M, N, K) of a CTA. On SM90 each consumer warpgroup multiplies 64 rows of it.
        cluster: CTAs along M and N that share tiles of B and A by multicast.
        stages: tiles of A and B in flight.
        group: clusters along M that are walked before the next ones along N, so that their B tiles stay in L2.
    """

    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    stages: int
    group: int

    def stores_by_tma(self, transposed: bool) -> bool:
        """Whether aligned results leave by TMA: of whole tiles of 128 rows, where they lie as the tile does."""
        return self.tile[0] >= 128 and not transposed


# Tokens along M, for many of them; the first of equal cost is taken
PREFILL = (
    GemmConfig((128, 256, 64), (2, 1), 4, 8),
    GemmConfig((128, 192, 64), (2, 1), 4, 8),
    GemmConfig((128, 128, 64), (2, 1), 6, 8),
    GemmConfig((128, 128, 64), (1, 2), 6, 8),
    GemmConfig((128, 64, 64), (2, 1), 8, 8),
)
# Tokens along N, the product transposed: a warpgroup's instruction may be as narrow as 8 there, so no arithmetic is
# spent on tokens that are not. As many stages as fit: a stream of weights needs some 64 KB in flight an SM
DECODE_8 = GemmConfig((64, 8, 128), (1, 1), 11, 1)
DECODE_8_DEEP = GemmConfig((64, 8, 256), (1, 1), 6, 1)
DECODE_16 = GemmConfig((64, 16, 128), (1, 1), 10, 1)
DECODE_32 = GemmConfig((64, 32, 128), (1, 1), 8, 1)
DECODE_32_PAIR = GemmConfig((64, 32, 128), (1, 2), 8, 1)
DECODE_64 = GemmConfig((64, 64, 128), (1, 1), 7, 1)
DECODE_64_PAIR = GemmConfig((64, 64, 128), (1, 2), 7, 1)
DECODE_128_PAIR = GemmConfig((64, 128, 64), (1, 2), 9, 1)
# Tokens along M, narrow weights: as many tiles as there are SMs
DECODE_8_TOKENS_M = GemmConfig((64, 8, 128), (1, 1), 12, 8)
DECODE_16_TOKENS_M = GemmConfig((64, 16, 128), (1, 1), 11, 8)
DECODE_32_TOKENS_M = GemmConfig((64, 32, 128), (2, 1), 9, 8)
# Tokens along M, up to 256 of them, SM90: widths that cut the weights into no more tiles than there are SMs
DECODE_WIDE = (
    GemmConfig((128, 192, 64), (2, 1), 5, 8),
    GemmConfig((128, 224, 64), (2, 1), 4, 8),
    GemmConfig((128, 128, 128), (1, 2), 3, 8),
    GemmConfig((128, 112, 128), (1, 1), 3, 8),
    GemmConfig((128, 96, 128), (1, 2), 3, 8),
)


def candidates(arch: str) -> tuple[GemmConfig | None, ...]:
    """All kernels that a call may be given to; None: the one for operands of any stride."""
    one = (DECODE_8, DECODE_8_DEEP, DECODE_16, DECODE_32, DECODE_64)
    shared = (DECODE_32_PAIR, DECODE_64_PAIR, DECODE_128_PAIR)
    tokens_m = (DECODE_8_TOKENS_M, DECODE_16_TOKENS_M, DECODE_32_TOKENS_M)
    return (None, *PREFILL, *_wide(arch), *one, *shared, *tokens_m)


def choose(arch: str, m: int, n: int, k: int, num_sms: int) -> tuple[GemmConfig, bool]:
    """(kernel, whether it computes the transposed product) for aligned operands of m and n rows.

    ``tokens`` is the smaller of the two, ``weights`` the other. H200, bf16, cold L2, us (cuBLAS), tokens x weights x K:
    8x4096x14336 DECODE_8_DEEP 40.9, DECODE_8 42.0 (42.5), but 8x1024x4096 11.7, 10.9 (12.0); 32x1024x4096 DECODE_8
    11.1, DECODE_32 11.9 (12.2); 64x1024x4096 DECODE_8_TOKENS_M 11.3, DECODE_32 12.0 (12.5); 128x1024x4096
    DECODE_16_TOKENS_M 12.0, DECODE_32 12.4 (12.9); 256x1024x4096 DECODE_32_TOKENS_M 13.5, DECODE_32_PAIR 13.9 (13.3);
    192x1024x4096 DECODE_32_PAIR 12.5 (13.2); 64x12288x4096 DECODE_64 38.3, a tile of 128 weights 39.0 (38.0);
    64x4096x14336 DECODE_32 with the tokens along M 42.2, DECODE_64 43.6 (45.9); 128x4096x14336 DECODE_64_PAIR 43.5, in
    steps of 64 of K 44.2, without the pair 49.8 (47.1); 256x4096x14336 DECODE_128_PAIR 51.7, with 8 stages 54.9 (54.0);
    256x4096x4096 22.0, (128, 64) of PREFILL 22.9 (24.5); 256x14336x4096 (128, 224) 48.2, (128, 256) 50.2 (49.3);
    128x14336x4096 (128, 112) 42.6, in steps of 64 43.2 (43.1); 128x32000x4096 (128, 128) 79.9, in steps of 64 81.3
    (81.3).
    """
    tokens, weights = min(m, n), max(m, n)
    transposed = m < n
    narrow = weights <= 8 * num_sms
    if tokens <= 8:
        return (DECODE_8_DEEP if k > 8192 else DECODE_8), transposed
    if tokens <= 128 and narrow:
        if tokens <= 32:
            return DECODE_8, transposed
        return (DECODE_8_TOKENS_M if tokens <= 64 else DECODE_16_TOKENS_M), not transposed
    if tokens <= 16:
        return DECODE_16, transposed
    if tokens <= 32 or tokens <= 128 and weights <= 2048:
        return DECODE_32, transposed
    if tokens <= 64 and weights <= 32 * num_sms:
        return DECODE_32, not transposed
    if tokens <= 64:
        return DECODE_64, transposed
    if tokens <= 192 and weights <= 2048:
        return DECODE_32_PAIR, transposed
    if tokens <= 256 and weights <= 2048:
        return DECODE_32_TOKENS_M, not transposed
    if tokens <= 128 and weights <= 8192:
        return DECODE_64_PAIR, transposed
    if tokens <= 256 and weights <= (8192 if k > 8192 else 32 * num_sms):
        return DECODE_128_PAIR, transposed
    configs = _wide(arch) + PREFILL if tokens <= 256 else PREFILL
    return min(configs, key=lambda config: _cost(config, m, n, num_sms)), False


def _wide(arch: str) -> tuple[GemmConfig, ...]:
    return DECODE_WIDE if arch == "sm_90a" else ()


def _waves(config: GemmConfig, m: int, n: int, num_sms: int) -> int:
    """Tiles that the busiest CTA computes."""
    (tile_m, tile_n, _), (cluster_m, cluster_n) = config.tile, config.cluster
    clusters = -(-m // (tile_m * cluster_m)) * -(-n // (tile_n * cluster_n))
    return -(-clusters // (num_sms // (cluster_m * cluster_n)))


def _cost(config: GemmConfig, m: int, n: int, num_sms: int) -> float:
    """Time of the busiest CTA, in units of its tensor cores' time for a tile of 128 x 256.

    A tile costs 0.06 beside its arithmetic. H200, us (cuBLAS): 256x4096x4096 with (128, 64) 23.1, (128, 256) 46
    (24.9); 4096x4096x4096 with (128, 256) 195, (128, 192) 220 (195); 512x4096x4096 with (128, 128) 31.2, (128, 256)
    47.7 (29.6).
    """
    return _waves(config, m, n, num_sms) * (config.tile[0] * config.tile[1] / 32768 + 0.06)
