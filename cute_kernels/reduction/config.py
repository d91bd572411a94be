"""Static choices of the reductions: pure functions of width, dtypes and architecture, never of the number of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cute_kernels.common.row_layout import RING_BYTES, Access, RowConfig, clusters_for, row_layout, with_stages

if TYPE_CHECKING:
    import torch

MAX_COLUMNS = 262_144  # of a row that a cluster holds
WHOLE_PART = 32_768  # elements that a CTA adds up, of a sum of any length
WHOLE_SUMS = 2048  # running sums of such a CTA
WHOLE_THREADS = 256
COLUMN_ROWS = 256  # rows that a CTA adds up where columns are summed
COLUMN_WARPS = 8
SCAN_THREADS = 256
SCAN_ELEMENTS = 4  # consecutive ones of a thread of a prefix sum's tile


class SoftmaxSpec(NamedTuple):
    """softmax, or its logarithm, of rows of ``n`` columns."""

    n: int
    x: torch.dtype
    y: torch.dtype
    log: bool
    access: Access

    @property
    def streams(self) -> tuple[torch.dtype, ...]:
        return (self.x,)

    @property
    def written(self) -> tuple[torch.dtype, ...]:
        return (self.y,)


class SoftmaxBackwardSpec(NamedTuple):
    """dx from y and dy, of rows of ``n`` columns."""

    n: int
    y: torch.dtype
    dy: torch.dtype
    dx: torch.dtype
    log: bool
    access: Access

    @property
    def streams(self) -> tuple[torch.dtype, ...]:
        return self.y, self.dy

    @property
    def written(self) -> tuple[torch.dtype, ...]:
        return (self.dx,)


class RowSumSpec(NamedTuple):
    """Sums of rows of ``n`` columns, or of their squares."""

    n: int
    x: torch.dtype
    y: torch.dtype
    access: Access
    squares: bool = False

    @property
    def streams(self) -> tuple[torch.dtype, ...]:
        return (self.x,)

    @property
    def written(self) -> tuple[torch.dtype, ...]:
        return ()


class ColumnSumSpec(NamedTuple):
    """Sums of columns, or of their squares; ``vec`` divides the columns, so that no access ends beyond the matrix, and
    the strides.
    """

    x: torch.dtype
    y: torch.dtype
    vec: int
    squares: bool = False


class WholeSumSpec(NamedTuple):
    """Sums of lines of any length, or of their squares; ``vec`` divides where they begin. It changes no bit."""

    x: torch.dtype
    y: torch.dtype
    vec: int
    squares: bool = False


class LogSumExpSpec(NamedTuple):
    """logsumexp of rows of ``n`` columns, to fp32."""

    n: int
    x: torch.dtype
    access: Access

    @property
    def streams(self) -> tuple[torch.dtype, ...]:
        return (self.x,)

    @property
    def written(self) -> tuple[torch.dtype, ...]:
        return ()


class VarianceSpec(NamedTuple):
    """Sums of squared distances from the mean of rows of ``n`` columns, to fp32."""

    n: int
    x: torch.dtype
    access: Access

    @property
    def streams(self) -> tuple[torch.dtype, ...]:
        return (self.x,)

    @property
    def written(self) -> tuple[torch.dtype, ...]:
        return ()


class PrefixSumSpec(NamedTuple):
    """Prefix sums of rows of any length; ``vec`` divides it, and the strides."""

    x: torch.dtype
    y: torch.dtype
    vec: int


def row_config(
    spec: SoftmaxSpec | SoftmaxBackwardSpec | RowSumSpec | LogSumExpSpec | VarianceSpec,
) -> RowConfig:
    """Geometry of a kernel that streams rows of ``n`` columns, of one matrix or two.

    A thread holds up to 64 elements of one matrix, or 32 of two. Rows that registers of a CTA hold lie in one; wider
    ones in as few as hold them, since clusters of 16 occupy 112 of 132 SMs, of 4 and 8 120.
    Rows that move element by element have 32 elements a thread and up to 32 warps an SM: where teams are several, one
    reads or writes while another waits for its sums. Measured: bench/experiments/norm.md.
    H200, bf16, us, a choice and others; softmax: 8192x4096 of 32 elements 37.9, of 64 38.3; 2048x16384 in two CTAs of 8
    warps an SM 39.6, one of 16 41.3; 4096x32000 in clusters of 2 132.7, of 4 137.0, of 8 137.3, one CTA 138.4;
    1024x151936 of 4 166.9, of 8 169.5, of 16 191.1. Backward: 32768x1024 50.9, of 8 warps 52.0; 8192x4096 53.7, two
    CTAs an SM 54.4; 2048x16384 in clusters of 2 52.8, of 4 53.7; 1024x151936 of 8 226.5, of 16 240.7.
    """
    n, (vec, aligned, packed) = spec.n, spec.access
    itemsizes, written = (tuple(dtype.itemsize for dtype in of) for of in (spec.streams, spec.written))
    two = len(itemsizes) == 2
    fp32 = max(itemsizes) == 4
    most = 32 if two or not aligned else 64
    cluster, stages = 1, 3
    if n <= 512:
        warps, ctas_per_sm = ({16: 8}, 3) if two else ({16: 4}, 8)
        stages = 1 if aligned else 2
    elif vec == 1 and n <= 1024:
        warps, ctas_per_sm = {32: 4}, 4 if two else 6
    elif n <= 1024:
        warps, ctas_per_sm = {32: 4}, 3 if two else 4
    elif n <= 4096:
        warps, ctas_per_sm = {32: 8}, 3 if two else 4
    elif vec == 1:
        warps, ctas_per_sm = {32: 24 if two else 32}, 1
        columns = 8192 if two else 16384  # of which two rows are summed at once
        cluster, stages = clusters_for(n, columns // 2 if fp32 else columns), 2
    elif n <= 8192:
        warps, ctas_per_sm = {most: 8}, 1 if two and fp32 else 2
    elif n <= 16384:
        warps, ctas_per_sm = {most: 8}, 1 if two or fp32 else 2
        cluster, stages = 2 if two else 1, 2
    elif n <= 32768 and not two:
        warps, ctas_per_sm, cluster = {most: 8}, 1, 2
    else:
        warps, ctas_per_sm = {most: 20}, 1
        columns = 20480 if two else 40960  # of which two rows are in flight
        cluster, stages = clusters_for(n, columns // 2 if fp32 else columns), 2
    layout = row_layout(n, vec, aligned, packed, cluster, warps)
    return RowConfig(with_stages(layout, itemsizes, RING_BYTES // ctas_per_sm, stages, written), ctas_per_sm)
