"""Modules with other packages' names for our functions: their users change an import, or nothing."""

from __future__ import annotations

import sys

__all__ = ["shim"]
NAME = "batch_invariant_ops"


def shim() -> None:
    """Let ``import batch_invariant_ops`` find ``cute_kernels.compat.batch_invariant_ops``, in this process.

    Call it before anything imports that package. Calling it again changes nothing.

    Returns:
        None.

    Raises:
        RuntimeError: the package of that name has been imported already.

    Example:
        >>> from cute_kernels import compat
        >>> compat.shim()
        >>> from batch_invariant_ops import get_batch_invariant_attention_block_size
        >>> get_batch_invariant_attention_block_size()
        AttentionBlockSize(block_m=16, block_n=16)
    """
    from cute_kernels.compat import batch_invariant_ops as ours

    if sys.modules.get(NAME, ours) is not ours:
        raise RuntimeError(f"shim: {NAME} has been imported already, from {sys.modules[NAME].__file__}")
    sys.modules[NAME] = ours
