"""The two layouts of a residual."""

from __future__ import annotations

from torch import Tensor


def streams_of(x: Tensor, layout: str) -> Tensor:
    """x as (..., n, C), a view; the same takes such a view back to the layout."""
    return x if layout == "streams" else x.transpose(-1, -2)
