"""Static choices of the reductions: pure functions of width, dtypes and architecture, never of the number of rows."""

from __future__ import annotations

from cute_kernels.common.row_layout import RING_BYTES, RowConfig, clusters_for, row_layout, with_stages

MAX_COLUMNS = 262_144  # of a row that a cluster holds
LONG_ROW = 65_536  # elements of the parts that longer sums are made of
COLUMN_ROWS = 256  # rows that a CTA adds up where columns are summed
COLUMN_WARPS = 8


def row_config(n: int, itemsizes: tuple[int, ...], vec: int, aligned: bool, packed: bool) -> RowConfig:
    """Geometry of a kernel that streams rows of ``n`` columns, of one matrix or two.

    As of the norms' forward, which holds as much of a row a thread as its registers allow; of two matrices half.
    """
    two = len(itemsizes) == 2
    most = 32 if two or not aligned else 64
    stages = 3
    if n <= 512:
        warps, ctas_per_sm = ({16: 4}, 8) if not two else ({16: 8}, 3)
        stages = 1 if aligned else 2
    elif n <= 1024:
        warps, ctas_per_sm = {32: 8}, 2 if two else 4
    elif n <= 4096:
        warps, ctas_per_sm = {most: 8 if two else 4}, 2 if two else 4
    elif n <= 12288 or 16384 < n <= 131072:
        warps, ctas_per_sm = {most: 8}, 2
    else:
        warps, ctas_per_sm = {most: 16}, 1
    cluster = 1 if n <= (8192 if two else 16384) else clusters_for(n, 4096)
    layout = row_layout(n, vec, aligned, packed, cluster, warps)
    return RowConfig(with_stages(layout, itemsizes, RING_BYTES // ctas_per_sm, stages), ctas_per_sm)
