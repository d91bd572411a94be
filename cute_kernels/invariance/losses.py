"""Replacements of torch's losses: torch's elements, added up by this library.

As in ``aten.py``: a function takes an operator's arguments, and returns NotImplemented for those it has no kernel for.
A ``reduction`` is 0: none, 1: mean, 2: sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from cute_kernels.reduction.op import sum_dimensions
from cute_kernels.runtime.checks import FLOATS, expect

aten = torch.ops.aten


def _loss(op: OpOverload, *args: Any, **kwargs: Any) -> Tensor:
    """The mean or sum of the elements that the operator has without one, which are rounded first, as in torch."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    reduction = given.pop("reduction", 1)
    loss = op(**given, reduction=0)
    if reduction == 0:
        return loss
    if loss.dtype not in FLOATS:
        return NotImplemented
    count = loss.numel()
    return sum_dimensions(loss, None, 1.0 if reduction == 2 else 1.0 / count if count else math.nan, loss.dtype)


def _nll_loss(
    log_prob: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """(loss, total weight); classes are the last dimension."""
    if log_prob.dtype not in FLOATS or target.dtype not in (torch.int64, torch.uint8):
        return NotImplemented
    if weight is not None and (weight.dtype != log_prob.dtype or weight.shape != log_prob.shape[-1:]):
        return NotImplemented
    index = target.long()
    ignored = index == ignore_index  # no byte is -100, which would be 156 of a byte's dtype
    index = index.masked_fill(ignored, 0)
    weights = torch.ones_like(target, dtype=torch.float32) if weight is None else weight[index].float()
    picked = log_prob.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    weights, loss = weights.masked_fill(ignored, 0), (-picked.float() * weights).masked_fill(ignored, 0)
    dtype = log_prob.dtype
    if reduction == 0:
        return loss.to(dtype), log_prob.new_zeros(())
    loss, total = (sum_dimensions(t, None, 1.0, torch.float32) for t in (loss, weights))
    return (loss / total if reduction == 1 else loss).to(dtype), total.to(dtype)


def _nll_loss2d(
    log_prob: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The same of (N, C, H, W) and (N, H, W)."""
    expect(log_prob.dim() == 4, "nll_loss2d", "self", "have the shape (N, C, H, W)", tuple(log_prob.shape))
    shape = (len(log_prob), *log_prob.shape[2:])
    expect(target.shape == shape, "nll_loss2d", "target", f"have the shape {shape}", tuple(target.shape))
    return _nll_loss(log_prob.movedim(1, -1), target, weight, reduction, ignore_index)


# With a reduction of 0 they are elementwise
OPERATORS = (
    aten.mse_loss,
    aten.huber_loss,
    aten.smooth_l1_loss,
    aten.soft_margin_loss,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_with_logits,
)
REPLACEMENTS: dict[str, Callable[..., Any]] = {
    **{f"{op.__name__}.default": functools.partial(_loss, op.default) for op in OPERATORS},
    "nll_loss_forward.default": _nll_loss,
    "nll_loss2d_forward.default": _nll_loss2d,
}
