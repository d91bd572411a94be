"""plan, permute and combine on torch tensors: the public functions, allocation, autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.moe import reference
from cute_kernels.moe.checks import check_layout, check_plan, check_rows, check_weights
from cute_kernels.moe.config import plan_blocks
from cute_kernels.moe.launch import moe_combine, moe_gather, moe_plan
from cute_kernels.moe.reference import Plan, as_int32, rows_of
from cute_kernels.runtime.autograd import apply, first_derivative_only, gradient_rows
from cute_kernels.runtime.checks import Backend
from cute_kernels.runtime.operators import Mode, differentiates, mode_of, uses_reference


def plan(
    indices: Tensor,
    num_experts: int,
    *,
    align: int = 1,
    segments: Tensor | None = None,
    backend: Backend | None = None,
) -> Plan:
    """Places of tokens' slots among the rows of experts; the host reads nothing.

    Args:
        indices: (T, k) int32 or int64: the experts of tokens; an index outside of [0, num_experts) is an empty slot.
        num_experts: at most 1024.
        align: each expert's rows end at a multiple of so many; up to ``align - 1`` rows of zeros are behind its own.
        segments: (S,) int32 or int64: where each segment of the tokens ends, ascending to T; empty ones are allowed.
            Each segment's rows of an expert begin at a multiple of ``align``, which is one of 16: the sums over an
            expert's rows are then those of the segments, one call after the other into ``main_grad``. Torch's operators
            on integers make such a plan. Ends that do not ascend give another plan, of the same tokens. None: one
            segment.
        backend: None: the kernel for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        ``Plan``: offs (E,), slots (R,), positions (T, k), counts (E,), int32; R = T k + (align - 1) min(E S, T k).
        Rows of an expert are in the order of tokens, then of slots.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Example:
        >>> import torch
        >>> from cute_kernels import moe
        >>> plan = moe.plan(torch.tensor([[0, 2], [0, 1]]), 3)
        >>> plan.offs.tolist(), plan.slots.tolist(), plan.positions.tolist()
        ([2, 3, 4], [0, 2, 3, 1], [[0, 3], [1, 2]])
    """
    if uses_reference("plan", indices, backend):
        return reference.plan(indices, num_experts, align=align, segments=segments)
    check_plan(indices, num_experts, align, segments)
    return planned(mode_of(indices), indices, num_experts, align, segments)


def permute(x: Tensor, plan: Plan, *, backend: Backend | None = None) -> Tensor:
    """Rows of tokens as rows of experts: ``out[r] = x[plan.slots[r] // k]``, zeros where there is no slot.

    Args:
        x: (T, H) bf16, fp16 or fp32; the kernel takes contiguous rows that start on 16 bytes and are a multiple of it.
        plan: of ``moe.plan``.
        backend: None: the kernel for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (R, H) of x's dtype, contiguous.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Numerics:
        Rows are copied. The gradient of x is ``combine`` of the incoming one without weights.

    Example:
        >>> import torch
        >>> from cute_kernels import moe
        >>> plan = moe.plan(torch.tensor([[0, 2], [0, 1]]), 3)
        >>> moe.permute(torch.tensor([[1.0], [2.0]]), plan).flatten().tolist()
        [1.0, 2.0, 2.0, 1.0]
    """
    if uses_reference("permute", x, backend):
        return reference.permute(x, plan)
    check_rows("permute", "x", x, plan.positions.shape[0], plan.slots.device)
    return apply(_PermuteFunction, x, *plan) if differentiates(x) else _permute_forward(x, plan)


def combine(rows: Tensor, plan: Plan, weights: Tensor | None = None, *, backend: Backend | None = None) -> Tensor:
    """Sums of tokens' rows: ``y[t]`` is that of ``weights[t, j] * rows[plan.positions[t, j]]``, of ascending rows.

    Args:
        rows: (R, H) bf16, fp16 or fp32, as of ``permute``.
        plan: of ``moe.plan``.
        weights: (T, k) fp32; None: 1.
        backend: None: the kernel for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (T, H) of the rows' dtype, contiguous; zeros for a token whose slots are all empty.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.

    Numerics:
        In fp32 from 0, in ascending position, which is ascending expert; products are rounded, then added; one rounding
        at the end. A token's bits depend on its own rows and weights, and on the set of its experts: not on other
        tokens, nor on the order of its slots. The gradient of a row is its token's times the weight, that of a weight
        the product of both rows, summed in fp32 in an order that the number of columns fixes.

    Example:
        >>> import torch
        >>> from cute_kernels import moe
        >>> plan = moe.plan(torch.tensor([[0, 2], [0, 1]]), 3)
        >>> moe.combine(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), plan).flatten().tolist()
        [5.0, 5.0]
    """
    if uses_reference("combine", rows, backend):
        return reference.combine(rows, plan, weights)
    check_rows("combine", "rows", rows, plan.slots.shape[0], plan.slots.device)
    if weights is not None:
        check_weights("combine", weights, plan.positions)
        weights = weights.contiguous()
    if differentiates(rows, weights):
        return apply(_CombineFunction, rows, weights, *plan)
    return _combine_forward(rows, plan, weights)


def _permute_forward(x: Tensor, plan: Plan) -> Tensor:
    mode = mode_of(x, *plan)
    if mode.eager:
        check_layout("permute", "x", x)
    return gathered(mode, x, plan)


def _combine_forward(rows: Tensor, plan: Plan, weights: Tensor | None) -> Tensor:
    mode = mode_of(rows, weights, *plan)
    if mode.eager:
        check_layout("combine", "rows", rows)
    return combined(mode, rows, plan, weights)


def planned(mode: Mode, indices: Tensor, num_experts: int, align: int, segments: Tensor | None) -> Plan:
    """``plan`` of checked arguments."""
    if segments is not None:
        return reference.in_segments(indices, num_experts, align, segments)
    indices = as_int32(indices).contiguous()
    rows = rows_of(indices.shape[0] * indices.shape[1], num_experts, align)
    shapes = (num_experts,), (rows,), tuple(indices.shape), (num_experts,)
    found = Plan(*(mode.empty(indices, shape, torch.int32) for shape in shapes))
    if rows:
        blocks, _ = plan_blocks(indices.shape[0] * indices.shape[1])
        table = mode.empty(indices, (blocks, num_experts), torch.int32) if blocks > 1 else None
        mode.of(moe_plan)(indices, table, *found, align)
    else:
        found.offs.zero_()
        found.counts.zero_()
    return found


def gathered(
    mode: Mode, x: Tensor, plan: Plan, weights: Tensor | None = None, other: Tensor | None = None
) -> Tensor | tuple:
    """Rows of experts from rows of tokens, weighted; with ``other`` (R, H) also the slots' products of both."""
    out = mode.empty(x, (plan.slots.shape[0], x.shape[1]), x.dtype)
    dots = None if other is None else x.new_zeros(plan.positions.shape, dtype=torch.float32)
    mode.of(moe_gather)(x, plan.slots, plan.positions, weights, other, out, dots)
    return out if other is None else (out, dots)


def combined(mode: Mode, rows: Tensor, plan: Plan, weights: Tensor | None, *bias: Tensor | None) -> Tensor:
    """Rows of tokens from rows of experts; ``bias``: experts (T, k), and what is added to their rows, (E, H)."""
    y = mode.empty(rows, (plan.positions.shape[0], rows.shape[1]), rows.dtype)
    mode.of(moe_combine)(rows, plan.positions, weights, *(bias or (None, None)), y)
    return y


class _PermuteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *plan):
        ctx.save_for_backward(*plan)
        return _permute_forward(x, Plan(*plan))

    @staticmethod
    @first_derivative_only
    def backward(ctx, dout):
        plan = Plan(*ctx.saved_tensors)
        mode = mode_of(dout, *plan)
        dx = combined(mode, gradient_rows(dout, mode.eager), plan, None)
        return dx, None, None, None, None


class _CombineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, *plan):
        needs_weights = weights is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(rows if needs_weights else None, weights, *plan)
        return _combine_forward(rows, Plan(*plan), weights)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        rows, weights, *saved = ctx.saved_tensors
        mode = mode_of(dy, rows, weights, *saved)
        drows, dweights = gathered(mode, gradient_rows(dy, mode.eager), Plan(*saved), weights, rows), None
        if rows is not None:
            drows, dweights = drows
        return drows if ctx.needs_input_grad[0] else None, dweights, None, None, None, None
