"""Static choices of sampling, and the numbers of its arithmetic, which the kernel and the reference share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

MAX_COLUMNS = 262_144
THREADS = 512
FILTER_THREADS = 1024
HELD_BYTES = 150 << 10  # of a row, that a CTA with filters keeps in shared memory

# log1p(f) = f - f^2 / 2 + f^3 P(f) of f from sqrt(1/2) - 1 to sqrt(2) - 1, to 3.2e-8 of it; P's coefficients, of f^0 on
LOG = (0.3333391, -0.25001338, 0.19963062, -0.16577587, 0.14914787, -0.14267476, 0.087003596)
# exp(r) = 1 + r + r^2 Q(r) of abs(r) up to log(2) / 2, to 3.3e-9 of it
EXP = (0.49999994, 0.16666515, 0.041668456, 0.0083694188, 0.0013813142)
LN2 = 0.6931472
LN2_HIGH = 0.693359375  # 10 bits: its product with a small integer is exact
LN2_LOW = -0.00021219444
LOG2_E = 1.442695
SQRT_HALF = 0x3F3504F3  # its bits
BELOW_ONE = 1 - 2.0**-24

WEIGHT_BITS = 40  # a weight is a multiple of 2^-40 of the largest one's
LIMB_BITS = 14  # MAX_COLUMNS numbers of so many bits add up to one of 32
LIMBS = 3
INDEX_BITS = 18
TOP_P_BITS = 24  # top_p is rounded to a multiple of 2^-24


class SampleSpec(NamedTuple):
    """Rows of any length.

    Attributes:
        vec: consecutive logits that a thread reads at once.
        cluster: CTAs that share a row.
        filtered: whether there is a top_k, a top_p or a min_p.
    """

    logits: torch.dtype
    vec: int
    cluster: int
    filtered: bool


class Numbers(NamedTuple):
    """The numbers of a call as the arithmetic takes them.

    Attributes:
        noisy: whether there is noise; else the largest logit is chosen.
        scale: 1 / temperature.
        top_k: MAX_COLUMNS where there is none.
        top_p: in multiples of 2^-24; 0 where there is none.
        log_min_p: -inf where there is none.
    """

    noisy: bool
    scale: float
    top_k: int
    top_p: int
    log_min_p: float

    @property
    def filters(self) -> bool:
        return self.top_k < MAX_COLUMNS or self.top_p > 0 or self.log_min_p > -math.inf


def numbers_of(temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> Numbers:
    """The ``Numbers`` of a call; the largest logit passes every filter."""
    if not temperature:
        return Numbers(False, 1.0, MAX_COLUMNS, 0, -math.inf)
    return Numbers(
        True,
        1.0 / temperature,
        MAX_COLUMNS if top_k is None else min(top_k, MAX_COLUMNS),
        0 if top_p is None or top_p == 1.0 else max(1, round(top_p * 2**TOP_P_BITS)),
        math.log(min_p) if min_p else -math.inf,
    )


def cluster_for(columns: int, dtype_bytes: int, filtered: bool) -> int:
    """CTAs that share a row. It changes no token.

    With filters as few as hold the row: a batch of 64 of 151936 bf16 logits occupies 128 SMs, one CTA each. Without,
    so many that a batch of 64 of a large vocabulary occupies all SMs.
    """
    if filtered:
        return next(c for c in (1, 2, 4, 8) if -(-columns // c) * dtype_bytes <= HELD_BYTES - 16)
    return 8 if columns > 32768 else 2 if columns > 4096 else 1


def dropped_bits(dtype_bytes: int, is_bf16: bool) -> int:
    """Low bits of an fp32 number that no number of the dtype has set."""
    return 0 if dtype_bytes == 4 else 16 if is_bf16 else 13
