"""Experts in plain torch: the specification of the kernels, and what runs without a supported GPU.

    route    scores of a token's logits --> its k best experts, ascending --> weights
    plan     slots (token, j), stable by expert --> rows
    permute  xs[r] = x[token of r];        combine  y[t] = sum over its rows, ascending, of weight * row, in fp32
    experts  y = combine(swiglu(xs W_gate_up^T) W_down^T), each product and h rounded to x's dtype

The order of the kernels' sums is not imitated: results agree to rounding, not bit by bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.moe.checks import (
    FLOATS,
    FP64,
    Groups,
    check_experts,
    check_plan,
    check_route,
    check_rows,
    check_swiglu,
    check_weights,
)
from cute_kernels.runtime.autograd import widened, without_autocast


class Routing(NamedTuple):
    """The experts of tokens.

    Attributes:
        indices: (T, k) int32, ascending in each token.
        weights: (T, k) fp32, in the same order.
    """

    indices: Tensor
    weights: Tensor


class Plan(NamedTuple):
    """Rows of experts, in the order of tokens, then of slots.

    Attributes:
        offs: (E,) int32: where each expert's rows end; multiples of ``align``.
        slots: (R,) int32: of each row its slot ``token * k + j``; -1: none, a row of zeros.
        positions: (T, k) int32: of each slot its row; -1: none.
        counts: (E,) int32: slots of each expert.
    """

    offs: Tensor
    slots: Tensor
    positions: Tensor
    counts: Tensor


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
    check_route(logits, k, score, bias, groups, eps, scale, indices, _is_fp64(logits))
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
    return Routing(indices.int(), weights)


def _select(logits: Tensor, k: int, score: str, bias: Tensor | None, groups: Groups | None) -> Tensor:
    """Of each token the k best, of equal ones the lower index first; -0 equals +0."""
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


def plan(indices: Tensor, num_experts: int, *, align: int = 1) -> Plan:
    """Rows of experts; see ``cute_kernels.moe.plan``."""
    check_plan(indices, num_experts, align)
    flat = indices.reshape(-1).long()
    valid = (flat >= 0) & (flat < num_experts)
    key = torch.where(valid, flat, num_experts)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    padded = -(-counts // align) * align
    ends = padded.cumsum(0)
    order = key.sort(stable=True).indices[: int(valid.sum())]
    starts, first = ends - padded, counts.cumsum(0) - counts
    of_slot = key[order]
    places = starts[of_slot] + torch.arange(len(order), device=flat.device) - first[of_slot]
    slots = flat.new_full((rows_of(flat.numel(), num_experts, align),), -1).scatter(0, places, order)
    positions = torch.full_like(flat, -1).scatter(0, order, places).view(indices.shape)
    return Plan(*(t.int() for t in (ends, slots, positions, counts)))


def rows_of(slots: int, num_experts: int, align: int) -> int:
    """Rows that so many slots may take."""
    return slots + (align - 1) * min(num_experts, slots)


def permute(x: Tensor, plan: Plan) -> Tensor:
    """Rows of experts; see ``cute_kernels.moe.permute``."""
    check_rows("permute", "x", x, plan.positions.shape[0], plan.slots.device, FLOATS + FP64)
    tokens = plan.slots.long().clamp(min=0) // plan.positions.shape[1]
    if not x.numel():
        return x.new_zeros(len(tokens), x.shape[1])
    return torch.where((plan.slots >= 0).unsqueeze(1), x[tokens], 0.0)


def combine(rows: Tensor, plan: Plan, weights: Tensor | None = None) -> Tensor:
    """Sums of tokens' rows; see ``cute_kernels.moe.combine``."""
    check_rows("combine", "rows", rows, plan.slots.shape[0], plan.slots.device, FLOATS + FP64)
    positions, wide = plan.positions.long(), torch.promote_types(rows.dtype, torch.float32)
    if weights is not None:
        check_weights("combine", weights, plan.positions, rows.dtype is torch.float64)
    order = torch.where(positions < 0, plan.slots.shape[0], positions).sort(1).indices
    y = torch.zeros(positions.shape[0], rows.shape[1], dtype=wide, device=rows.device)
    for j in range(positions.shape[1]):
        column = order[:, j : j + 1]
        position = positions.gather(1, column).squeeze(1)
        term = rows[position.clamp(min=0)].to(wide) if len(rows) else torch.zeros_like(y)
        if weights is not None:
            term = term * weights.to(wide).gather(1, column)
        y = torch.where((position >= 0).unsqueeze(1), y + term, y)
    return y.to(rows.dtype)


def swiglu(z: Tensor, *, interleaved: bool = False, limit: float | None = None, alpha: float | None = None) -> Tensor:
    """The gate; see ``cute_kernels.moe.swiglu``."""
    check_swiglu(z, limit, alpha, _is_fp64(z))
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    g, u = (wide[:, ::2], wide[:, 1::2]) if interleaved else wide.chunk(2, 1)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    h = g * torch.sigmoid(g) * u if alpha is None else g * torch.sigmoid(alpha * g) * (u + 1)
    return h.to(z.dtype)


def experts(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    *,
    transposed: bool = False,
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    align: int = 16,
) -> Tensor:
    """The layer; see ``cute_kernels.moe.experts``."""
    indices, weights = routing
    check_experts(x, indices, weights, gate_up, down, transposed, limit, alpha, align, FLOATS + FP64)
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = (widened("experts", n, t, wide) for n, t in (("gate_up", gate_up), ("down", down)))
    if not transposed:
        first, second = first.mT, second.mT
    rows = plan(indices, gate_up.shape[0], align=align)
    h = swiglu(_multiply(permute(x, rows), first, rows.offs), interleaved=interleaved, limit=limit, alpha=alpha)
    return combine(_multiply(h, second, rows.offs), rows, weights)


def _multiply(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """Each expert's rows times its matrix, rounded to the rows' dtype; zeros beyond."""
    ends, wide = offs.tolist(), matrices.dtype
    with without_autocast(rows):
        parts = [rows[a:b].to(wide) @ matrices[e] for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], matrices.shape[2], dtype=wide)]).to(rows.dtype)


def _is_fp64(t: object) -> bool:
    return isinstance(t, Tensor) and t.dtype is torch.float64
