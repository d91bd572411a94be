"""The public names of the package batch_invariant_ops, on this library's kernels.

That package leaves an operator without a kernel to torch. Ours does, too, counts it and warns: ``install("warn")``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels import gemm, reduction
from cute_kernels.invariance import batch_invariant, install, is_installed, scopes, uninstall

__all__ = [
    "AttentionBlockSize",
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "get_batch_invariant_attention_block_size",
    "is_batch_invariant_mode_enabled",
    "log_softmax",
    "matmul_persistent",
    "mean_dim",
    "set_batch_invariant_mode",
]


class AttentionBlockSize(NamedTuple):
    """Queries and keys of a block, for attention that is told its blocks; ``attention`` needs none.

    Args:
        block_m: queries.
        block_n: keys.

    Example:
        >>> from cute_kernels.compat.batch_invariant_ops import AttentionBlockSize
        >>> AttentionBlockSize(16, 16).block_n
        16
    """

    block_m: int
    block_n: int


def enable_batch_invariant_mode() -> None:
    """``install("warn")``, unless it is installed: torch's operators are batch-invariant in the whole process.

    Returns:
        None.

    Raises:
        RuntimeError: inside of a compiled function; torch is too old.

    Example:
        >>> from cute_kernels.compat import batch_invariant_ops
        >>> batch_invariant_ops.enable_batch_invariant_mode()
        >>> batch_invariant_ops.disable_batch_invariant_mode()
    """
    if not is_installed():
        install("warn")


def disable_batch_invariant_mode() -> None:
    """``uninstall()``.

    Returns:
        None.

    Raises:
        RuntimeError: a block is live.

    Example:
        >>> from cute_kernels.compat import batch_invariant_ops
        >>> batch_invariant_ops.disable_batch_invariant_mode()
        >>> batch_invariant_ops.is_batch_invariant_mode_enabled()
        False
    """
    if is_installed():
        uninstall()


def is_batch_invariant_mode_enabled() -> bool:
    """Whether torch's operators are batch-invariant here: in this thread's block, or in the process.

    Returns:
        Whether they are.

    Example:
        >>> from cute_kernels.compat import batch_invariant_ops
        >>> with batch_invariant_ops.set_batch_invariant_mode():
        ...     print(batch_invariant_ops.is_batch_invariant_mode_enabled())
        True
    """
    return scopes.deciding() is not None


@contextmanager
def set_batch_invariant_mode(enabled: bool = True) -> Iterator[None]:
    """A block of ``batch_invariant``: of one thread and of the backward passes that it starts.

    Args:
        enabled: False: torch's own operators inside, also where the mode is enabled outside.

    Yields:
        None.

    Example:
        >>> import torch
        >>> from cute_kernels.compat.batch_invariant_ops import set_batch_invariant_mode
        >>> with set_batch_invariant_mode():
        ...     y = torch.ones(2, 3) @ torch.ones(3, 2)
    """
    with batch_invariant("warn" if enabled else "off"):
        yield


def matmul_persistent(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a b + bias``, by ``mm`` or ``linear``.

    Args:
        a: (M, K).
        b: (K, N) of a's dtype.
        bias: (N,), or None.

    Returns:
        (M, N) of a's dtype.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Example:
        >>> import torch
        >>> from cute_kernels.compat.batch_invariant_ops import matmul_persistent
        >>> a = torch.ones(2, 8, dtype=torch.bfloat16)
        >>> matmul_persistent(a, a.t(), torch.ones(2, dtype=torch.bfloat16))[0, 0].item()
        9.0
    """
    return gemm.mm(a, b) if bias is None else gemm.linear(a, b.t(), bias)


def log_softmax(input: Tensor, dim: int = -1) -> Tensor:
    """``reduction.log_softmax``.

    Args:
        input: (..., N).
        dim: the last dimension.

    Returns:
        Log-probabilities, of the shape and dtype of input.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Example:
        >>> import torch
        >>> from cute_kernels.compat.batch_invariant_ops import log_softmax
        >>> log_softmax(torch.zeros(1, 2)).exp()
        tensor([[0.5000, 0.5000]])
    """
    return reduction.log_softmax(input, dim)


def mean_dim(input: Tensor, dim: int, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """``reduction.mean`` over one dimension.

    Args:
        input: of any shape.
        dim: the dimension.
        keepdim: whether it stays, with size 1.
        dtype: of the result; input's if None.

    Returns:
        The means.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Example:
        >>> import torch
        >>> from cute_kernels.compat.batch_invariant_ops import mean_dim
        >>> mean_dim(torch.tensor([[1.0, 2.0]]), 1)
        tensor([1.5000])
    """
    return reduction.mean(input, dim, keepdim=keepdim, out_dtype=dtype)


def get_batch_invariant_attention_block_size() -> AttentionBlockSize:
    """Blocks that attention of others may take; ``attention`` has its own, at fixed places.

    Returns:
        ``AttentionBlockSize``: 16 queries, 16 keys.

    Example:
        >>> from cute_kernels.compat.batch_invariant_ops import get_batch_invariant_attention_block_size
        >>> get_batch_invariant_attention_block_size().block_m
        16
    """
    return AttentionBlockSize(block_m=16, block_n=16)
