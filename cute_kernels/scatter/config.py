"""Static choices of sums by an index: pure functions of widths, dtypes and layouts, never of numbers of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

SEGMENT = 256  # sources of a place that are added one after the other; a part of the contract
THREADS = 256
MAX_FEW = 128  # elements of a row that are compared with each other, so that none is sorted

# write: each row of out is 0 + its sources. add: their sum is added to out. onto: out's row comes before the first
Store = Literal["write", "add", "onto"]


class RowsSpec(NamedTuple):
    """Sums of rows.

    Attributes:
        vec: consecutive elements that a thread moves at once; divides columns and strides.
        lanes: threads that share a row, a power of two.
    """

    source: torch.dtype
    out: torch.dtype
    keys: torch.dtype
    vec: int
    lanes: int
    store: Store

    @property
    def groups(self) -> int:
        """Places that a thread goes through, strided by the grid, so that frequent neighbours part.

        Most rows of a table are written and have no source; of places that have one each is alone.
        """
        return 8 if self.store == "write" else 1


class ElementsSpec(NamedTuple):
    """Sums of few elements of each row, along the row."""

    source: torch.dtype
    out: torch.dtype


def lanes_for(columns: int, vec: int) -> int:
    """Threads that share a row of so many columns."""
    return min(THREADS, 1 << (-(-columns // vec) - 1).bit_length())
