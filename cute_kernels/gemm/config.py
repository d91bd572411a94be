"""Static choices of the matrix products: which kernel serves a call. Every candidate keeps ``serial_k16``.

One fp32 accumulator an element, over the whole K, ascending, in steps of 16, from zero or from what is accumulated
into: then the tile's shape, the stages, the cluster, the operands' order and the instruction change no bit, and the
choice may depend on M. tests/gpu/gemm/test_invariance.py holds every pair of candidates together, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass

CONTRACT = "serial_k16"
DECODE_TOKENS = 256  # up to here the product is the reading of the weights


@dataclass(frozen=True)
class GemmConfig:
    """Geometry of a kernel.

    Attributes:
        tile: (M, N, K) of a CTA. M is 64 a consumer warpgroup on SM90.
        cluster: CTAs along M and N that share tiles of B and A by multicast.
        stages: tiles of A and B in flight.
        group: clusters along M that are walked before the next ones along N, so that their B tiles stay in L2.
    """

    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    stages: int
    group: int


PREFILL = GemmConfig((128, 256, 64), (2, 1), 4, 8)
PREFILL_NARROW = GemmConfig((128, 128, 64), (2, 1), 6, 8)
# 64 rows of weights a CTA, up to 128 tokens; as many stages as fit: a stream of weights needs 64 KB in flight an SM
DECODE = tuple(
    GemmConfig((64, tokens, 64), (1, 1), min(20, 200 * 1024 // ((64 + tokens) * 128)), 1)
    for tokens in (8, 16, 32, 64, 128)
)


def candidates(arch: str) -> tuple[GemmConfig | None, ...]:
    """All kernels that a call may be given to; None: the one for operands of any stride."""
    return (None, PREFILL, PREFILL_NARROW, *DECODE)


def choose(arch: str, m: int, n: int, num_sms: int) -> tuple[GemmConfig, bool]:
    """(kernel, whether it computes the transposed product) for aligned operands of m and n rows.

    Few tokens lie along the tile's N, where a warpgroup's instruction may be as narrow as 8, and the weights along its
    64 rows: no arithmetic is spent on rows that are not there, and each weight is read once.
    """
    few = min(m, n)
    if few <= DECODE_TOKENS:
        config = next((c for c in DECODE if c.tile[1] >= few), DECODE[-1])
        return config, m < n
    if -(-m // 128) * -(-n // 256) <= num_sms // 2:
        return PREFILL_NARROW, False
    return PREFILL, False
