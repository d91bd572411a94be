"""Tensors as the kernels' copies see them: a matrix for each head of each sequence, whose rows are tokens."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

RAGGED_ROWS = 2**30  # more than a sequence has


def by_rows(t: cute.Tensor) -> cute.Tensor:
    """(batch, length, heads, head size) as (length, head size, heads, batch)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))


def by_columns(t: cute.Tensor) -> cute.Tensor:
    """(batch, length, heads, head size) as (head size, length, heads, batch)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[3, 1, 2, 0]))


def ragged(t: cute.Tensor) -> cute.Tensor:
    """(length, head size, heads, batch) as (RAGGED_ROWS, head size, heads, batch, end).

    Of the last dimension's i-th matrix the last row is row i - 1: TMA cuts off what is behind it.
    """
    _, *shape = t.shape
    base = cute.domain_offset((-RAGGED_ROWS, None, None, None), t).iterator
    layout = cute.make_layout((RAGGED_ROWS, *shape, RAGGED_ROWS), stride=(*t.stride, t.stride[0]))
    return cute.make_tensor(base, layout)


def partition(atom: cute.CopyAtom, shared: cute.Tensor, matrix: cute.Tensor, tile: tuple[int, int]) -> tuple:
    """(Boxes in shared memory by slot, boxes of a matrix by their place) as a copy takes them."""
    boxes = cute.local_tile(matrix, tile, (None, None))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(boxes, 0, 2)
    )
