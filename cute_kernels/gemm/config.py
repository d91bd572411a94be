"""Static choices of the matrix products: which kernel serves a call. Every candidate keeps ``serial_k16``.

One fp32 accumulator an element, over the whole K, ascending, in steps of 16, from zero or from what is accumulated
into: then the tile's shape, the stages, the cluster, the operands' order and the instruction change no bit, and the
choice may depend on M. tests/gemm/test_kernel_invariance.py holds every pair of candidates together, bit by bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cute_kernels.common.gemm_config import BLOCK, GemmConfig
from cute_kernels.gemm.config_tokens import FEWEST, MOST, SOME_TOKENS, choose_for_tokens

if TYPE_CHECKING:
    import torch

CONTRACT = "serial_k16"
# The cost of a tile's epilogue, in the time of so many k of the products of a tile of 128 x 256
EPILOGUE_K = {"store": 130, "activate": 350, "accumulate": 700}


class GemmSpec(NamedTuple):
    """A product d = act(a b^T + bias), of a (M, K) and b (N, K), or batches of them.

    Attributes:
        dtype, out, bias: of a and b; of d and z; of the bias, None: there is none.
        activation: "relu", "silu", "gelu" or None.
        save_preact: also store z, what the activation is applied to.
        accumulate: the accumulators start from d (fp32), which over no k stays as it is, the sign of zeros, too.
        has_valid_k: only as many k as a device int32 says are summed.
        batched: of batches (L, ...), entry by entry, a plain product alone; an operand of one entry is multiplied with
            every entry of the other.
        a_major, b_major: the dimension whose elements are neighbours, "m" or "k", "n" or "k"; None: the operands are
            such that TMA does not read both.
        out_aligned: rows of d and z start on 16 bytes.
    """

    dtype: torch.dtype
    out: torch.dtype
    bias: torch.dtype | None = None
    activation: str | None = None
    save_preact: bool = False
    accumulate: bool = False
    has_valid_k: bool = False
    batched: bool = False
    a_major: str | None = "k"
    b_major: str | None = "k"
    out_aligned: bool = True

    @property
    def majors(self) -> tuple[str | None, str | None]:
        return self.a_major, self.b_major

    @property
    def epilogue(self) -> str:
        """The kind of a tile's epilogue, one of EPILOGUE_K."""
        return "accumulate" if self.accumulate else "store" if self.activation is None else "activate"

    def of_kernel(self, arch: str, config: GemmConfig | None, transposed: bool) -> GemmSpec:
        """The same for calls that this kernel does not tell apart, so that it is compiled once."""
        if config is None:
            a_major = b_major = None
            by_tma = False
        else:
            a_major, b_major = self.majors
            by_tma = self.out_aligned and config.stores_by_tma(arch, transposed)
        activation = None if self.activation is None else str.__str__(self.activation)  # not an enum's member
        return self._replace(activation=activation, a_major=a_major, b_major=b_major, out_aligned=by_tma)


def gemm_arguments(arch: str, spec: GemmSpec, k: int, config: GemmConfig | None, transposed: bool) -> tuple:
    """The arguments of the builder ``gemm`` for products of ``k``."""
    multi_block_tma = config is not None and config.multi_block_tma(arch, spec.majors, k)
    return arch, spec.of_kernel(arch, config, transposed), config, transposed, multi_block_tma


# Tokens along M, for many of them; the first of equal cost is taken
PREFILL = (
    GemmConfig((128, 256, 64), (2, 1), 4, 8),
    GemmConfig((128, 192, 64), (2, 1), 4, 8),
    GemmConfig((128, 128, 64), (2, 1), 6, 8),
    GemmConfig((128, 128, 64), (1, 2), 6, 8),
    GemmConfig((128, 64, 64), (2, 1), 8, 8),
)
# The same on SM90, where what a tile costs beside its products is worth hiding
PING_PONG = (
    GemmConfig((128, 192, 64), (2, 1), 4, 8, ping_pong=True),
    GemmConfig((128, 160, 64), (2, 1), 5, 8, ping_pong=True),
    GemmConfig((128, 128, 64), (2, 1), 6, 8, ping_pong=True),
)
# Few tokens. As many stages as fit: a stream of weights needs some 64 KB in flight an SM.
# Along N, the product transposed, an instruction may be as narrow as 8: no arithmetic is spent on tokens that are not
DECODE_8 = GemmConfig((64, 8, 128), (1, 1), 11, 1)
DECODE_8_DEEP = GemmConfig((64, 8, 256), (1, 1), 6, 1)
DECODE_16 = GemmConfig((64, 16, 128), (1, 1), 10, 1)
DECODE_32 = GemmConfig((64, 32, 128), (1, 1), 9, 1)
DECODE_32_PAIR = GemmConfig((64, 32, 128), (1, 2), 8, 1)
DECODE_64 = GemmConfig((64, 64, 128), (1, 1), 6, 1)
DECODE_64_PAIR = GemmConfig((64, 64, 128), (1, 2), 7, 1)
DECODE_128_PAIR = GemmConfig((64, 128, 64), (1, 2), 9, 1)
TOKENS_N = (DECODE_8, DECODE_8_DEEP, DECODE_16, DECODE_32, DECODE_32_PAIR, DECODE_64_PAIR, DECODE_128_PAIR)
# Along M, with tiles as narrow as it takes for all SMs to have one
DECODE_8_TOKENS_M = GemmConfig((64, 8, 128), (1, 1), 12, 8)
DECODE_32_TOKENS_M = GemmConfig((64, 32, 128), (2, 1), 8, 8)
TOKENS_M = (DECODE_8_TOKENS_M, DECODE_16, DECODE_32, DECODE_32_TOKENS_M)
# The same on SM90 where both operands lie along k and K is a multiple of BLOCK: a tile of any depth comes by one copy.
# Most tokens -> kernel, for up to 8 weights an SM, up to 32, and more; (16, 8, 512) for a K beyond 8192
DECODE_16_DEEP = GemmConfig((64, 16, 256), (1, 1), 5, 1)
FEW_WEIGHTS_DEEP = GemmConfig((16, 8, 512), (1, 1), 8, 1)
FEW_WEIGHTS = {
    8: GemmConfig((16, 8, 256), (1, 1), 8, 1),
    32: GemmConfig((16, 16, 256), (1, 1), 8, 1),
    64: GemmConfig((32, 16, 256), (1, 2), 9, 1),
    128: GemmConfig((32, 32, 256), (1, 2), 7, 1),
}
SOME_WEIGHTS = {
    8: GemmConfig((32, 8, 512), (1, 1), 5, 1),
    16: DECODE_16_DEEP,
    32: GemmConfig((32, 32, 256), (1, 1), 7, 1),
}
MANY_WEIGHTS = {8: DECODE_8_DEEP, 16: DECODE_16_DEEP}
# 33 to 64 of them, SM90: widths that cut the weights into no more tiles than there are SMs
DECODE_64_TOKENS = (
    DECODE_16,
    DECODE_32,
    GemmConfig((64, 48, 128), (1, 1), 7, 1),
    DECODE_64,
    GemmConfig((64, 96, 128), (1, 1), 5, 1),
    GemmConfig((64, 112, 128), (1, 1), 4, 1),
    GemmConfig((64, 128, 128), (1, 1), 4, 1),
)
# Up to 256, SM90: the same
DECODE_WIDE = (
    GemmConfig((128, 192, 64), (2, 1), 5, 8),
    GemmConfig((128, 224, 64), (2, 1), 4, 8),
    GemmConfig((128, 128, 128), (1, 2), 3, 8),
    GemmConfig((128, 112, 128), (1, 1), 3, 8),
    GemmConfig((128, 96, 128), (1, 2), 3, 8),
)


def many_tokens(arch: str) -> tuple[GemmConfig, ...]:
    """Tiles of 128 rows, also for the gradient of a weight."""
    return DECODE_WIDE + more_tokens(arch) if arch == "sm_90a" else more_tokens(arch)


def more_tokens(arch: str) -> tuple[GemmConfig, ...]:
    """Those of ``many_tokens`` that more than 256 get."""
    return PREFILL + PING_PONG if arch == "sm_90a" else PREFILL


def few_tokens_along_m(arch: str) -> tuple[GemmConfig, ...]:
    """Tiles of 64 rows, of tokens."""
    return tuple(dict.fromkeys(TOKENS_M + DECODE_64_TOKENS)) if arch == "sm_90a" else TOKENS_M


def few_tokens_along_n(arch: str) -> tuple[GemmConfig, ...]:
    """Tiles of up to 64 rows, of weights."""
    return TOKENS_N if arch == "sm_90a" else (*TOKENS_N, DECODE_64)


def in_whole_blocks(arch: str) -> tuple[tuple[GemmConfig, bool], ...]:
    """(kernel, transposed): those that no other than operands along k get, of a K that is a multiple of BLOCK."""
    if arch != "sm_90a":
        return ()
    tables = FEW_WEIGHTS, SOME_WEIGHTS, MANY_WEIGHTS
    few = [FEW_WEIGHTS_DEEP, *(config for table in tables for config in table.values())]
    others = {(config, False) for config in many_tokens(arch) + few_tokens_along_m(arch)}
    others |= {(config, True) for config in few_tokens_along_n(arch)}
    found = dict.fromkeys([*((config, True) for config in few), *SOME_TOKENS])
    return tuple(kernel for kernel in found if kernel not in others)


def candidates(arch: str) -> tuple[GemmConfig | None, ...]:
    """All kernels that a call may be given to; None: the one for operands of any stride."""
    others = many_tokens(arch) + few_tokens_along_m(arch) + few_tokens_along_n(arch)
    return (None, *dict.fromkeys((*others, *(config for config, _ in in_whole_blocks(arch)))))


def choose(
    arch: str,
    m: int,
    n: int,
    k: int,
    num_sms: int,
    epilogue: str = "store",
    entries: int = 1,
    along_k: bool = True,
) -> tuple[GemmConfig, bool]:
    """(kernel, whether it computes the transposed product) for aligned operands of m and n rows, or so many of a batch.

    ``epilogue``: what is done with a tile's sums beside their products, one of EPILOGUE_K. ``along_k``: both operands
    lie along k.
    ``tokens`` is the smaller of the two, ``weights`` the other, of all entries of a batch: what SMs have to share. Of
    batches four shapes alone were measured (bench/experiments/gemm.md). 17 to 512 tokens get the kernel of the least
    estimated time (config_tokens.py) on SM90 where both operands lie along k; what is measured here for so many holds
    where they do not, and for batches and sums that are added to.

    H200, bf16, cold L2, us, tokens x weights x K: what is chosen, what else was tried; cuBLAS.
    With the loop of 994720a:
        1x1024x4096     FEW_WEIGHTS 8.6, of 16 stages 8.8                                             10.3
        16x1024x4096    FEW_WEIGHTS 9.0, (16, 16, 512) 9.25                                           10.4
        32x1024x4096    FEW_WEIGHTS 9.3, (16, 16, 512) 9.6                                            10.5
        8x1024x14336    FEW_WEIGHTS_DEEP 15.5                                                         17.5
    With that of a49741c:
        1x1024x4096     FEW_WEIGHTS 9.1, DECODE_8 9.5                                                 10.3
        64x1024x4096    FEW_WEIGHTS 9.6                                                               11.0
        128x1024x4096   FEW_WEIGHTS 10.2, DECODE_16 along M 10.9                                      11.5
        8x1024x14336    FEW_WEIGHTS_DEEP 16.6, (16, 8, 256) 17.4, DECODE_8 19.7                       17.7
        1x4096x4096     SOME_WEIGHTS 14.7                                                             18.7
        16x4096x4096    DECODE_16_DEEP 14.6                                                           18.5
        32x4096x14336   SOME_WEIGHTS 35.8, DECODE_32 37.2                                             42.5
        16x14336x4096   DECODE_16_DEEP 35.2, DECODE_16 36.2                                           40.8
    Before a tile came by one copy and the weights had a priority in L2 (DECODE_32_TOKENS_M with 9 stages, not 8):
        8x1024x4096     DECODE_8 10.9, DECODE_8_DEEP 11.7                                             12.0
        32x1024x4096    DECODE_8 11.1, DECODE_32 11.9                                                 12.2
        64x1024x4096    DECODE_8_TOKENS_M 11.3, DECODE_32 12.0                                        12.5
        128x1024x4096   DECODE_16 along M 12.0, DECODE_32 12.4                                        12.9
        192x1024x4096   DECODE_32_PAIR 12.5                                                           13.2
        256x1024x4096   DECODE_32_TOKENS_M 13.5, DECODE_32_PAIR 13.9                                  13.3
        8x4096x14336    DECODE_8_DEEP 40.9, DECODE_8 42.0                                             42.5
        128x4096x14336  DECODE_64_PAIR 43.5, in steps of 64 of K 44.2, without the pair 49.8          47.1
        256x4096x4096   DECODE_128_PAIR 22.0, (128, 64) of PREFILL 22.9                               24.5
        256x4096x14336  DECODE_128_PAIR 51.7, with 8 stages 54.9                                      54.0
        33x12288x4096   (64, 96) of DECODE_64_TOKENS 35.7, DECODE_64 40.7                             37.1
        64x12288x4096   (64, 96) of DECODE_64_TOKENS 35.1, DECODE_64 37.6                             37.0
        128x14336x4096  (128, 112) of DECODE_WIDE 42.6, in steps of 64 43.2                           43.1
        256x14336x4096  (128, 224) of DECODE_WIDE 48.2, (128, 256) of PREFILL 50.2                    49.3
        64x32000x4096   (64, 128) of DECODE_64_TOKENS 73.6, DECODE_64 74.6                            76.0
        128x32000x4096  (128, 128) of DECODE_WIDE 79.9, in steps of 64 81.3                           81.3
    """
    tokens, weights = min(m, n), max(m, n) * entries
    transposed = m < n
    if arch == "sm_90a" and along_k and k % BLOCK == 0 and entries == 1 and _is_some(tokens, epilogue):
        config, tokens_along_n = choose_for_tokens(tokens, weights, k, num_sms, epilogue == "activate")
        return config, transposed if tokens_along_n else not transposed
    narrow = weights <= 8 * num_sms
    if arch == "sm_90a" and along_k and k % BLOCK == 0 and k >= 2048:  # of less zeros make up much of a tile
        if narrow and tokens <= 8 and k > 8192:
            return FEW_WEIGHTS_DEEP, transposed
        table = FEW_WEIGHTS if narrow else SOME_WEIGHTS if weights <= 32 * num_sms else MANY_WEIGHTS
        for most, config in table.items():
            if tokens <= most:
                return config, transposed
    if tokens <= 8:
        return (DECODE_8_DEEP if k > 8192 else DECODE_8), transposed
    if tokens <= 128 and narrow:
        if tokens <= 32:
            return DECODE_8, transposed
        return (DECODE_8_TOKENS_M if tokens <= 64 else DECODE_16), not transposed
    if 32 < m <= 64 and m < n and arch == "sm_90a":
        return min(DECODE_64_TOKENS, key=lambda config: _cost(config, m, n, num_sms, entries)), False
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
    if arch != "sm_90a":
        return min(PREFILL, key=lambda config: _cost(config, m, n, num_sms, entries)), False
    if tokens <= 256:
        return min(DECODE_WIDE + PREFILL, key=lambda config: _cost(config, m, n, num_sms, entries)), False
    return min(
        PREFILL + PING_PONG, key=lambda config: _cost_of_many(config, m, n, k, num_sms, epilogue, entries)
    ), False


def _is_some(tokens: int, epilogue: str) -> bool:
    """Whether ``choose_for_tokens`` estimates the time; not of epilogues that ping-pong would hide."""
    return FEWEST <= tokens <= (MOST if epilogue == "store" else 256) and epilogue != "accumulate"


def _waves(config: GemmConfig, m: int, n: int, num_sms: int, entries: int) -> int:
    """Tiles that the busiest CTA computes."""
    (tile_m, tile_n, _), (cluster_m, cluster_n) = config.tile, config.cluster
    clusters = entries * -(-m // (tile_m * cluster_m)) * -(-n // (tile_n * cluster_n))
    return -(-clusters // (num_sms // (cluster_m * cluster_n)))


def _cost(config: GemmConfig, m: int, n: int, num_sms: int, entries: int) -> float:
    """Time of the busiest CTA, in units of its tensor cores' time for a tile of 128 x 256.

    A tile costs 0.06 beside its arithmetic. H200, us (cuBLAS): 256x4096x4096 with (128, 64) 23.1, (128, 256) 46 (24.9).
    """
    return _waves(config, m, n, num_sms, entries) * (config.tile[0] * config.tile[1] / 32768 + 0.06)


def _cost_of_many(config: GemmConfig, m: int, n: int, k: int, num_sms: int, epilogue: str, entries: int) -> float:
    """Time of the busiest CTA of more than 256 tokens on SM90, in that of its tensor cores for a k of 128 x 256.

    What is done with a tile's sums is hidden but for the last tile's where warpgroups take turns. A narrower tile reads
    more for a product: 192, 160, 128 columns take 2, 3, 5 % more time and energy. H200, us, (128, 256), ping-pong
    (128, 192), (128, 160), (128, 128): 4096x14336x4096 664, 656, 637, 649, into fp32 that is there 842, 737, 715, 729,
    with gelu 725, 680, 670, 704; 4096x4096x14336 647, 723, 706, 660; at the power limit, one after the other,
    4096x14336x4096 721, 727, 711, 729; 8192x4096x4096 412, 421, 419, 425. More in
    bench/experiments/gemm.md, none with few k.
    """
    tile_m, tile_n, _ = config.tile
    waves, area = _waves(config, m, n, num_sms, entries), tile_m * tile_n / 32768
    reads = 1 + 13 * (1 / tile_n - 1 / 256)
    hides = config.ping_pong and waves > 1
    return waves * area * k * reads + EPILOGUE_K[epilogue] * (area if hides else waves)
