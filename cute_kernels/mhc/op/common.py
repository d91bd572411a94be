"""The hyper-connections' operators share these: matrices of tokens, room for results."""

from __future__ import annotations

from torch import Tensor

from cute_kernels.mhc.checks import as_tokens
from cute_kernels.runtime.operators import Mode


def rows(op: str, name: str, t: Tensor, width: int) -> Tensor:
    """``t`` as a matrix of ``width`` numbers a token, without a copy, but of what torch negates when it reads it.

    Raises:
        ValueError: its tokens do not collapse to rows of one stride, or are more than 32 bits count.
    """
    matrix = as_tokens(op, name, t, width)
    return matrix if width > 1 else _numbers(matrix)


def gradient_rows(t: Tensor | None, width: int, eager: bool) -> Tensor | None:
    """An incoming gradient as a matrix of ``width`` numbers a token; copied if its tokens have no one stride.

    ``eager``: of the backward's mode.
    """
    if t is None:
        return None
    if not t.is_contiguous():
        if eager:
            try:
                matrix = t.view(-1, width)
            except RuntimeError:
                pass
            else:
                if matrix.stride(1) == 1 and matrix.stride(0) >= width:
                    return matrix
        t = t.contiguous()
    matrix = matrix_of(t, width)
    return matrix if width > 1 else _numbers(matrix)


def _numbers(matrix: Tensor) -> Tensor:
    """A number a token: its dimension of one element may have any stride, and has not 1 where torch negates it."""
    if matrix.stride(1) == 1:
        return matrix
    matrix = matrix.resolve_neg()
    return matrix.as_strided(matrix.shape, (matrix.stride(0), 1))


def empty_like(t: Tensor, mode: Mode, wanted: bool = True) -> Tensor | None:
    """Room for a gradient of ``t``, contiguous."""
    return mode.empty(t, t.shape, t.dtype) if wanted else None


def matrix_of(t: Tensor | None, width: int) -> Tensor | None:
    """A contiguous tensor of our own as a matrix of tokens."""
    return t if t is None or (t.dim() == 2 and t.shape[1] == width) else t.view(-1, width)
