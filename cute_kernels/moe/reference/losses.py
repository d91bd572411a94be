"""Losses of a router in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.moe.checks import check_balance, check_logits, is_fp64
from cute_kernels.moe.reference.route import Routing


def load_balancing_loss(logits: Tensor, routing: Routing, *, mask: Tensor | None = None) -> Tensor:
    """See ``cute_kernels.moe.load_balancing_loss``."""
    check_balance(logits, routing.indices, mask, is_fp64(logits))
    tokens, experts = logits.shape
    indices, p = routing.indices, logits.softmax(1)
    total: Tensor | int = tokens
    if mask is not None:
        indices, p, total = indices.masked_fill(~mask[:, None], -1), p * mask[:, None], mask.sum()
    counts = (indices.flatten()[:, None] == torch.arange(experts, device=logits.device)).sum(0)
    return (counts.to(p.dtype) / total * (p.sum(0) / total)).sum() * experts


def z_loss(logits: Tensor) -> Tensor:
    """See ``cute_kernels.moe.z_loss``."""
    check_logits("z_loss", logits, is_fp64(logits))
    return logits.logsumexp(1).square().mean()
