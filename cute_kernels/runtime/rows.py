"""What a kernel that streams rows is specialised on: the signature of a matrix, and how its elements can move."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def rows_key(t: Tensor) -> tuple:
    """All that a kernel is specialised on and all that is checked of a matrix, but for its number of rows."""
    if t.is_contiguous():
        return t.dtype, t.shape[-1], t.get_device(), t.data_ptr() & 15
    return t.dtype, strides_key(t), t.get_device(), t.data_ptr() & 15


def strides_key(t: Tensor) -> tuple:
    """Of a matrix that is not contiguous: its columns, strides and whether it is more than a row."""
    return t.shape[-1], t.stride(), t.shape[0] > 1


def geometry(n: int, streams: list[Tensor], outputs: list[torch.dtype]) -> tuple[int, bool, bool]:
    """(elements that move together, rows start and end on 16 bytes, rows of all matrices are back to back).

    16 bytes of the widest dtype move together: a wider access would leave half of each 32-byte sector to the next
    instruction (H200, 8192x4096 fp32 forward: 89 us with 32 bytes a thread).
    """
    vec = 16 // max(dtype.itemsize for dtype in (*outputs, *(t.dtype for t in streams)))
    aligned = True
    for t in streams:
        itemsize = t.element_size()
        stride = t.stride(0) if t.shape[0] > 1 else n
        vec = math.gcd(vec, n, stride, t.data_ptr() // itemsize)
        aligned = aligned and all(size % 16 == 0 for size in (n * itemsize, stride * itemsize, t.data_ptr()))
    packed = aligned and all(t.stride(0) == n or t.shape[0] <= 1 for t in streams)
    return vec, aligned, packed


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
