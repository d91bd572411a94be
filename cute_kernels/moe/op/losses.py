"""Losses of a router on torch tensors: sums over tokens in a fixed order, of the public reductions."""

from __future__ import annotations

from torch import Tensor

from cute_kernels import reduction
from cute_kernels.moe import reference
from cute_kernels.moe.checks import check_balance, check_logits
from cute_kernels.moe.op.rows import plan
from cute_kernels.moe.reference import Routing
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import uses_reference


def load_balancing_loss(
    logits: Tensor, routing: Routing, *, mask: Tensor | None = None, backend: Backend | None = None
) -> Tensor:
    """``E * sum over experts of (n_e / T) * (sum of p[t, e] over tokens / T)``: least where all experts have the same.

    p is the softmax of a token's logits, n_e the number of tokens that have the expert e.

    Args:
        logits: (T, E) fp32. Those of several layers follow each other, as their routings do.
        routing: of ``moe.route``; its indices (T, k) are counted.
        mask: (T,) bool: the tokens that count. None: all.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        The loss, a number in fp32, with a gradient for the logits; NaN without tokens.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Numerics:
        Counts are integers. Sums over tokens and over experts run in an order that T and E fix: the loss is a
        reproducible function of the batch.

    Source:
        Fedus et al., Switch Transformers, arXiv 2101.03961, equations 4 to 6, for k experts as in transformers: not
        divided by k.

    Example:
        >>> import torch
        >>> from cute_kernels import moe
        >>> logits = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> moe.load_balancing_loss(logits, moe.route(logits, 1))
        tensor(1.)
    """
    if uses_reference("load_balancing_loss", logits, backend):
        return reference.load_balancing_loss(logits, routing, mask=mask)
    check_balance(logits, routing.indices, mask)
    tokens, experts = logits.shape
    indices, p = routing.indices, reduction.softmax(logits)
    total: Tensor | int = tokens
    if mask is not None:
        indices, p, total = indices.masked_fill(~mask[:, None], -1), p * mask[:, None], mask.sum()
    counts = plan(indices, experts).counts.float()
    return reduction.sum(counts / total * (reduction.sum(p, 0) / total)) * experts


def z_loss(logits: Tensor, *, backend: Backend | None = None) -> Tensor:
    """The mean over tokens of the squared logsumexp of their logits: it keeps logits small.

    Args:
        logits: (T, E) fp32.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        The loss, a number in fp32, with a gradient for the logits; NaN without tokens.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Numerics:
        Sums run in an order that T and E fix: the loss is a reproducible function of the batch.

    Source:
        Zoph et al., ST-MoE, arXiv 2202.08906, equation 5.

    Example:
        >>> import torch
        >>> from cute_kernels import moe
        >>> moe.z_loss(torch.zeros(3, 1))
        tensor(0.)
    """
    if uses_reference("z_loss", logits, backend):
        return reference.z_loss(logits)
    check_logits("z_loss", logits)
    return reduction.mean(reduction.logsumexp(logits, 1).square())
