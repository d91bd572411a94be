"""Plans of rows, and the ways between rows of tokens and rows of experts, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.moe.checks import check_plan, check_rows, check_weights
from cute_kernels.runtime.checks import FLOATS, FP64, fail


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


def plan(indices: Tensor, num_experts: int, *, align: int = 1, segments: Tensor | None = None) -> Plan:
    """Rows of experts; see ``cute_kernels.moe.plan``."""
    check_plan(indices, num_experts, align, segments)
    if segments is None:
        segments = torch.full((1,), indices.shape[0], device=indices.device)
    elif (ends := segments.tolist()) != sorted(ends) or ends[0] < 0 or ends[-1] != indices.shape[0]:
        fail("plan", "segments", f"ascend to the number of tokens, {indices.shape[0]}", ends)
    return in_segments(indices, num_experts, align, segments)


def in_segments(indices: Tensor, num_experts: int, align: int, segments: Tensor) -> Plan:
    """``plan`` by torch's operators on integers, without a look at values."""
    count, (tokens, k) = segments.shape[0], indices.shape
    like = {"device": indices.device, "dtype": torch.int64}
    segment = torch.searchsorted(segments.long(), torch.arange(tokens, **like), right=True).clamp(max=count - 1)
    found = indices.long()
    valid = (found >= 0) & (found < num_experts)
    groups = num_experts * count  # an expert's part of a segment; behind them slots without expert
    keys, order = torch.where(valid, found * count + segment[:, None], groups).flatten().sort(stable=True)
    firsts = torch.searchsorted(keys, torch.arange(groups + 1, **like))
    counts = firsts.diff()
    padded = -(-counts // align) * align
    ends = padded.cumsum(0)
    # For the j-th slot in this order: the start of its group, and its place there
    shift = torch.cat([ends - padded - firsts[:-1], ends.new_zeros(1)])
    rows = rows_of(tokens * k, groups, align)
    places = torch.where(keys < groups, torch.arange(tokens * k, **like) + shift[keys], rows)
    slots = torch.full((rows + 1,), -1, **like).scatter(0, places, order)[:rows]
    positions = torch.empty_like(order).scatter(0, order, torch.where(places < rows, places, -1))
    offs, counts = ends.view(num_experts, count)[:, -1], counts.view(num_experts, count).sum(1)
    return Plan(*(t.int() for t in (offs, slots, positions.view(tokens, k), counts)))


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
