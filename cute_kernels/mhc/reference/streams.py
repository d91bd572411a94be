"""The two layouts of a residual."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def streams_of(x: Tensor, layout: str) -> Tensor:
    """x as (..., n, C), a view; the same takes such a view back to the layout."""
    return x if layout == "streams" else x.transpose(-1, -2)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Products inside are in the dtype of their factors."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext()
