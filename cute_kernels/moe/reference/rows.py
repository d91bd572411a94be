"""Plans of rows, and the ways between rows of tokens and rows of experts, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.moe.checks import check_plan, check_rows, check_weights
from cute_kernels.runtime.checks import FLOATS, FP64


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
