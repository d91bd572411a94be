"""merge_attention on torch tensors: the public function."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cute_kernels.attention import reference_cache


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over a union of disjoint sets of keys, of the results over each: cascades, context parallelism.

    Args:
        outs: results of ``attention``, (B, Lq, H, D) or (all queries, H, D), one of each set of keys.
        lses: their logarithms of sums, (B, H, Lq) or (H, all queries) fp32.

    Returns:
        The result over all keys, and its lse.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Numerics:
        The results are added in the order in which they are given, in fp32, and rounded once. A row depends on its own
        partial rows alone. It is another contract than ``kv_grid``: each result has been rounded to its dtype, so the
        bits are not those of ``attention`` over all keys at once.

    Example:
        >>> import torch
        >>> from cute_kernels import attention, merge_attention
        >>> q, k, v = (torch.randn(1, n, 2, 64) for n in (3, 8, 8))
        >>> parts = [attention(q, k[:, half], v[:, half], return_lse=True) for half in (slice(4), slice(4, 8))]
        >>> out, lse = merge_attention(*zip(*parts, strict=True))
        >>> torch.allclose(out, attention(q, k, v), atol=1e-5)
        True
    """
    return reference_cache.merge_attention(outs, lses)
