"""Matrices of rows: how their elements can move, and how many clusters of a kernel walk over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from cute_kernels.common.row_layout import MANY_CTAS, Access, RowConfig

# From here on resident clusters walk over the rows: tiles' indices are 32-bit, and run ahead by two or three grids
RESIDENT_ROWS = 2**29
PACKED = {size: Access(16 // size, True, True) for size in (2, 4)}  # rows on 16 bytes, back to back


def access_of(n: int, widest: int, a: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Access:
    """How the elements of matrices of ``n`` columns can move; ``widest``: bytes of their, or a result's, widest dtype.

    16 bytes of the widest dtype move together: a wider access would leave half of each 32-byte sector to the next
    instruction (H200, 8192x4096 fp32 forward: 89 us with 32 bytes a thread).
    """
    if (
        not n & 7  # elements of 2 bytes or 4 then end on 16 bytes
        and not a.data_ptr() & 15
        and a.is_contiguous()
        and (b is None or not b.data_ptr() & 15 and b.is_contiguous())
        and (c is None or not c.data_ptr() & 15 and c.is_contiguous())
    ):
        return PACKED[widest]
    streams = [t for t in (a, b, c) if t is not None]
    bits, packed = 0, True
    for t in streams:
        size = t.itemsize
        bits |= t.data_ptr() | n * size
        if not t.is_contiguous() and t.shape[0] > 1:
            stride = t.stride(0)
            bits |= stride * size
            packed = packed and stride == n
    if not bits & 15:
        return Access(16 // widest, True, packed)
    vec = math.gcd(16 // widest, n)
    for t in streams:
        vec = math.gcd(vec, t.stride(0) if t.shape[0] > 1 else n, t.data_ptr() // t.itemsize)
    return Access(vec, False, False)


def contiguous_dim(t: Tensor, shape: tuple[int, ...]) -> int:
    """-1 or -2, the dimension of a matrix of halves, or of a batch, that TMA reads along; 0 if it reads none."""
    strides = t.stride()
    of_rows, of_columns = strides[-2], strides[-1]
    if t.data_ptr() & 15 or (len(strides) == 3 and strides[0] & 7):
        return 0
    if of_columns == 1 and not of_rows & 7 and of_rows >= shape[-1]:
        return -1
    if of_rows == 1 and not of_columns & 7 and of_columns >= shape[-2]:
        return -2
    return 0


class RowLaunch(NamedTuple):
    """A kernel that streams rows, and how many clusters of it to launch (RowConfig says what the numbers mean)."""

    function: Callable[..., None]
    rows_per_cluster: int
    max_clusters: int
    persistent_clusters: float

    @staticmethod
    def of(function: Callable[..., None], config: RowConfig, num_sms: int, many_ctas: float = MANY_CTAS) -> RowLaunch:
        if config.layout.n == 1:
            function = resolved(function)
        clusters = config.max_clusters(num_sms), config.persistent_clusters(num_sms, many_ctas)
        return RowLaunch(function, config.rows_per_cluster, *clusters)

    def clusters(self, rows: int) -> int:
        """How many clusters to launch for so many rows."""
        clusters = -(-rows // self.rows_per_cluster)
        if clusters > self.max_clusters and (rows >= RESIDENT_ROWS or clusters < self.persistent_clusters):
            return self.max_clusters
        return clusters


def contiguous_rows(t: Tensor) -> Tensor:
    """A matrix' rows back to back, aligned as those of a new one: a row's bits may then not tell how many there are.

    One row alone is contiguous wherever it lies; among others it would have been copied.
    """
    t = t.contiguous()
    unit = math.gcd(16, t.shape[-1] * t.element_size())
    return t.clone() if t.data_ptr() % unit else t


def resolved(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` of tensors as torch reads them: one column may be a conjugate's imaginary part, negated lazily."""

    def run(*arguments: object) -> None:
        function(*(value.resolve_neg() if isinstance(value, Tensor) else value for value in arguments))

    return run
