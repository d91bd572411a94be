"""The router in plain torch: logits, experts and their weights."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.moe.checks import Groups, check_route, check_router_logits, is_fp64
from cute_kernels.runtime.autograd import widened, without_autocast


class Routing(NamedTuple):
    """The experts of tokens.

    Attributes:
        indices: (T, k) int32, ascending in each token.
        weights: (T, k) fp32, in the same order.
    """

    indices: Tensor
    weights: Tensor


def as_int32(indices: Tensor) -> Tensor:
    """Indices of experts, of int64 the nearest: what lies beyond int32 stays no expert's."""
    if indices.dtype is torch.int64:
        bounds = torch.iinfo(torch.int32)
        indices = indices.clamp(bounds.min, bounds.max)
    return indices.to(torch.int32)


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """fp32 logits; see ``cute_kernels.moe.router_logits``."""
    check_router_logits(x, weight, bias, is_fp64(x))
    wide = torch.promote_types(x.dtype, torch.float32)
    with without_autocast(x):
        logits = x.to(wide) @ widened("router_logits", "weight", weight, wide).t()
    return logits if bias is None else logits + widened("router_logits", "bias", bias, wide)


def route(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    groups: Groups | None = None,
    normalize: bool = True,
    eps: float = 0.0,
    scale: float = 1.0,
    indices: Tensor | None = None,
) -> Routing:
    """Experts and weights of tokens; see ``cute_kernels.moe.route``."""
    check_route(logits, k, score, bias, groups, eps, scale, indices, is_fp64(logits))
    experts = logits.shape[1]
    has_nan = logits.isnan().any(1, keepdim=True)
    if indices is None:
        indices = torch.where(has_nan, torch.arange(k, device=logits.device), _select(logits, k, score, bias, groups))
    indices = indices.sort(1).values
    valid = (indices >= 0) & (indices < experts)
    places = indices.clamp(0, experts - 1).long()
    if score == "sigmoid":
        scores = torch.sigmoid(logits).gather(1, places)
    elif score == "softmax_of_topk" or (normalize and not eps):
        scores = logits.gather(1, places).masked_fill(~valid, -math.inf).softmax(1)
    else:
        scores = logits.softmax(1).gather(1, places)
    scores = scores.masked_fill(~valid, 0.0)
    if normalize and (score == "sigmoid" or eps):
        scores = scores / (scores.sum(1, keepdim=True) + eps)
    weights = torch.where(has_nan, math.nan, scores * scale)
    return Routing(as_int32(indices), weights)


def _select(logits: Tensor, k: int, score: str, bias: Tensor | None, groups: Groups | None) -> Tensor:
    """The k best experts of each token, the lower index first among equal ones; -0 equals +0."""
    scores = (torch.sigmoid(logits) if score == "sigmoid" else logits).detach() + 0.0
    if bias is not None:
        scores = scores + bias
    excluded = torch.zeros_like(scores, dtype=torch.bool)
    if groups is not None:
        count, kept = groups
        of_group = scores.unflatten(1, (count, -1)).sort(dim=2, descending=True).values[..., :2].sum(2)
        best = of_group.sort(dim=1, descending=True, stable=True).indices[:, :kept]
        excluded = torch.ones_like(of_group, dtype=torch.bool).scatter(1, best, False)
        excluded = excluded.repeat_interleave(scores.shape[1] // count, 1)
    order = scores.sort(dim=1, descending=True, stable=True).indices
    order = order.gather(1, excluded.gather(1, order).int().sort(dim=1, stable=True).indices)
    return order[:, :k]
