"""The launches share these: alignments, room for partial sums, the arguments of dropout."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.common.row_layout import SUM_COLUMNS
from cute_kernels.runtime.operators import empty

Launch = Callable[..., None]
# The fields of ``Constants``, as an operator takes them
CONSTANTS = (
    "float rms_eps, str rms_eps_placement, float pre_eps, float post_mult, "
    "str sinkhorn, float sinkhorn_eps, int iterations"
)


def stream_alignment(itemsize: int, *matrices: Tensor | None) -> int:
    """Elements, up to 16 bytes, on a multiple of which all rows of all matrices of one dtype start."""
    bits = strides = 0
    for t in matrices:
        if t is not None:
            bits |= t.data_ptr()
            strides |= t.stride()[0]
    bits |= strides * itemsize
    return 16 // itemsize if not bits & 15 else (bits & -bits) // itemsize


def row_alignment(t: Tensor, width: int) -> int:
    """Elements on which all rows of fp32 coefficients start."""
    return math.gcd(4, width, t.stride()[0], t.data_ptr() >> 2)


def all_on_16(width: int, *matrices: Tensor | None) -> bool:
    """Whether all rows start on 16 bytes and ``width`` elements of them end on 16."""
    bits = 0
    for t in matrices:
        if t is not None:
            bits |= t.data_ptr() | (t.stride()[0] | width) * t.itemsize
    return not bits & 15


def dtype_of(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def partial_rows(like: Tensor, outputs: int, tokens: int, columns: int, empty: Callable[..., Tensor] = empty) -> Tensor:
    """Room for ``outputs`` partial rows for every ``tokens`` tokens, of whole CTAs of SumRows."""
    chunks = -(-like.shape[0] // tokens)
    return empty(like, (outputs, chunks, -(-columns // SUM_COLUMNS) * SUM_COLUMNS), torch.float32)


def dropout_arguments(p: float) -> tuple[int, float]:
    """(threshold of the random words, what is kept is multiplied by)."""
    if p == 0.0:
        return 0, 1.0
    return int(p * 2**32), 1.0 / (1.0 - p)


def zero(*sums: tuple[Tensor | None, bool]) -> None:
    """Sums over no tokens, but for those that are added to what is there."""
    for t, accumulate in sums:
        if t is not None and not accumulate:
            t.zero_()
