"""Static choices of products of groups of rows with mxfp8 matrices. Every candidate keeps ``serial_k16``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from cute_kernels.common.gemm_config import GemmConfig

if TYPE_CHECKING:
    import torch

BLOCK = 32  # elements of a row that share a scale
CTAS_PER_SM = 2


class GroupedMxfp8Spec(NamedTuple):
    """``out``: d's dtype. ``scale_vec``: scales of a row that one load takes."""

    out: torch.dtype
    scale_vec: int


def scale_vec(k: int, address: int) -> int:
    """Scales of a row that one load takes: 4, 2 or 1, as many as all rows begin at a multiple of."""
    return math.gcd(4, k // BLOCK, address)


# Mean of a group's rows up to -> kernel: (matrices' rows, groups' rows, K), as many stages as fit for two CTAs an SM.
# Tiles beyond a group's first read its matrix again, from L2. Chosen by counts of instructions and bytes, not by times.
# H200, us, Qwen3-30B, up, means of 2, 4, 8, 16 rows: 97, 119, 130, 138; bf16 161, 188, 204, 206
DECODE = {
    4: GemmConfig((64, 8, 128), (1, 1), 10, 1),
    7: GemmConfig((64, 16, 128), (1, 1), 8, 1),
    64: GemmConfig((128, 32, 128), (1, 1), 4, 1),
}


def choose(arch: str, rows: int, groups: int) -> GemmConfig | None:
    """The kernel for ``rows`` of ``groups`` groups; None: for so many, or on SM100, matrices are dequantized before."""
    if arch != "sm_90a":
        return None
    mean = -(-rows // max(min(groups, rows), 1))
    return next((config for most, config in DECODE.items() if mean <= most), None)
