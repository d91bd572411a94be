"""The layer of experts on torch tensors: the public function, autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.gemm import grouped_mm
from cute_kernels.gemm.functional import (
    gemm,
    grouped_rows,
    grouped_rows_mxfp8,
    grouped_sums,
    grouped_sums_into,
    weight_gradient,
)
from cute_kernels.moe import reference
from cute_kernels.moe.checks import Activation, check_activation, check_experts, check_layout
from cute_kernels.moe.config import OAI
from cute_kernels.moe.launch import moe_gate_backward
from cute_kernels.moe.op.gate import Bias, Gate, gated
from cute_kernels.moe.op.rows import combine, combined, gathered, permute, plan, planned
from cute_kernels.moe.reference import Plan, Routing, as_int32
from cute_kernels.runtime.autograd import apply, first_derivative_only, gradient_buffer, gradient_rows, needs_gradient
from cute_kernels.runtime.checks import HALVES, Backend
from cute_kernels.runtime.operators import Mode, differentiates, mode_of, uses_reference
from cute_kernels.runtime.real import as_float
from cute_kernels.scatter import embedding

# align and segments without gradients: zeros behind an expert's rows are for the weights' alone. They would count among
# the rows by which products choose their kernel, and take tiles of their own
FOR_RESULTS = 1, None


def experts(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
    activation: Activation = "swiglu",
    limit: float | None = None,
    alpha: float | None = None,
    align: int = 16,
    segments: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """``y[t] = sum of weight_e * down_e swiglu(gate_up_e x[t])`` over a token's experts e.

    Args:
        x: (T, H) bf16 or fp16, contiguous rows that start on 16 bytes; H and I are multiples of 8.
        routing: of ``moe.route``: indices (T, k) and weights (T, k) fp32.
        gate_up: (E, 2 I, H) of x's dtype. A gradient is added to its ``main_grad`` (fp32), if it has one.
        down: (E, H, I), likewise.
        gate_up_scale, down_scale: of weights in mxfp8, as ``b_scale`` of ``grouped_mm``: (E, 2 I, H / 32) and
            (E, H, I / 32) float8_e8m0fnu. The weights are then float8_e4m3fn, contiguous, on 16 bytes, x is bf16, and
            H and 2 I are multiples of 32. Inference alone: no gradients. None: the weights are of x's dtype.
        gate_up_bias, down_bias: (E, 2 I) and (E, H) of x's dtype, contiguous, on 16 bytes; added to the products in
            fp32. A gradient is added to ``main_grad``, likewise. None: none.
        transposed: the weights are (E, H, 2 I) and (E, I, H) instead.
        interleaved: of the gate, as in ``moe.swiglu``.
        activation: "swiglu"; "swiglu_oai", as of gpt-oss: with a limit of 7 and an alpha of 1.702 if none is given;
            "geglu": the gate's gelu, exact, in place of its silu; "silu", without a gate: gate_up is (E, I, H). Or a
            function of rows: what it is given is rounded, what it returns is (R, I) of x's dtype. Then each step is
            differentiated by itself: more is kept, and a ``main_grad`` is not looked at.
        limit, alpha: of the first two, as in ``moe.swiglu``.
        align: each expert's rows end at a multiple of so many, of zeros behind its own. It changes no bit. Where no
            gradient is wanted there are none of these, and no segments.
        segments: of tokens, as in ``moe.plan``. They change bits of the weights' gradients alone. None: one.
        backend: None: the kernels for CUDA tensors, plain torch for CPU tensors. "reference": plain torch.

    Returns:
        (T, H) of x's dtype.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one.
        UnsupportedDeviceError: a GPU without kernels: neither a Hopper nor a data-centre Blackwell.

    Numerics:
        Products as in ``grouped_mm``, the gate as in ``swiglu``, sums as in ``combine``; each result is rounded to x's
        dtype. So a token's result, its gradient, and those of its weights have the same bits whatever the other tokens
        and their experts. Gradients of gate_up and down sum over an expert's tokens in their order: they are
        reproducible, and independent of the other experts. With a ``main_grad`` the sums start from it: calls with the
        tokens of a segment each have the bits of one call with all of them and ``segments``. So do those of biases, in
        the same order; down_bias' of rows times weights that are rounded to x's dtype. x, gate_up's product and the
        plan are kept for the backward.

    Example:
        >>> import torch
        >>> from cute_kernels import moe
        >>> x, logits = torch.ones(3, 8, dtype=torch.bfloat16), torch.zeros(3, 4)
        >>> gate_up, down = torch.ones(4, 32, 8, dtype=torch.bfloat16), torch.ones(4, 8, 16, dtype=torch.bfloat16)
        >>> moe.experts(x, moe.route(logits, 2), gate_up, down).shape
        torch.Size([3, 8])
    """
    limit, alpha = (None if value is None else as_float(value) for value in (limit, alpha))
    indices, weights = routing
    if uses_reference("experts", x, backend):
        options = {"transposed": transposed, "interleaved": interleaved, "limit": limit, "alpha": alpha, "align": align}
        options |= {"activation": activation, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
        options |= {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
        return reference.experts(x, routing, gate_up, down, **options, segments=segments)
    check_activation(activation, interleaved, limit, alpha)
    options = gate_up_bias, down_bias, transposed, activation, align, segments
    scales = gate_up_scale, down_scale
    check_experts(x, indices, weights, gate_up, down, *options, scales, HALVES)
    gradients = differentiates(x, weights, gate_up, down, gate_up_bias, down_bias)
    if not gradients:
        align, segments = FOR_RESULTS
    if activation == "swiglu_oai":
        limit, alpha = (given or usual for given, usual in zip((limit, alpha), OAI, strict=True))
    if callable(activation):
        return _by_steps(
            x, routing, gate_up, down, gate_up_bias, down_bias, transposed, activation, align, segments, scales
        )
    gate = Gate(activation.removesuffix("_oai"), bool(interleaved), limit, alpha)
    tensors = x, weights.contiguous(), gate_up, down, gate_up_bias, down_bias
    options = as_int32(indices).contiguous(), segments, transposed, gate, align
    if gradients:
        return apply(_ExpertsFunction, *tensors, *options, True)
    return _forward(*tensors, *options, True, scales)[0]


def rows_of_experts(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    segments: Tensor | None,
    transposed: bool,
    gate: Gate,
    align: int,
) -> Tensor:
    """The experts' results (N, H) for rows x (N, H) with an expert (N, 1) each, for a combine elsewhere.

    There down_bias is added, too. The gradient is to be asked of results that are weighted, as those of ``experts``
    are: the incoming one is that of the weighted sum, and ``weights`` (N, 1) are for the backward alone.
    """
    tensors = x, weights, gate_up, down, gate_up_bias, down_bias
    if differentiates(*tensors):
        return apply(_ExpertsFunction, *tensors, indices, segments, transposed, gate, align, False)
    align, segments = FOR_RESULTS
    return _forward(*tensors, indices, segments, transposed, gate, align, False)[0]


def _by_steps(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    transposed: bool,
    activation: Callable[[Tensor], Tensor],
    align: int,
    segments: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """The layer of an activation that has no kernel."""
    indices, weights = routing
    first, second = (gate_up, down) if transposed else (gate_up.mT, down.mT)
    rows = plan(indices, gate_up.shape[0], align=align, segments=segments)
    # A row without a slot is one of zeros, whatever the bias is added to it: no token has it
    expert = indices.flatten()[rows.slots.long().clamp(min=0)].clamp(0, gate_up.shape[0] - 1)
    z = grouped_mm(permute(x, rows), first, rows.offs, b_scale=scales[0])
    if gate_up_bias is not None:
        z = z + embedding(expert, gate_up_bias)
    y = grouped_mm(activation(z), second, rows.offs, b_scale=scales[1])
    if down_bias is not None:
        y = y + embedding(expert, down_bias)
    return combine(y, rows, weights)


def _forward(
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    indices: Tensor,
    segments: Tensor | None,
    transposed: bool,
    gate: Gate,
    align: int,
    weighted: bool,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor, Plan]:
    """y, gate_up's products and the plan."""
    mode = mode_of(x, weights, gate_up, down, gate_up_bias, down_bias, indices, segments, *scales)
    if mode.eager:
        for name, t in (("x", x), ("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
            if t is not None:
                check_layout("experts", name, t)
    rows = planned(mode, indices, gate_up.shape[0], align, segments)
    first, second = (gate_up, down) if transposed else (gate_up.mT, down.mT)
    z = _product(mode, gathered(mode, x, rows), first, scales[0], rows.offs)
    h = gated(mode, z, gate, rows.slots, Bias.of(indices, gate_up_bias))
    y = _product(mode, h, second, scales[1], rows.offs)
    if not weighted:
        return combined(mode, y, rows, None), z, rows
    return combined(mode, y, rows, weights, *Bias.of(indices, down_bias)), z, rows


def _product(mode: Mode, rows: Tensor, matrices: Tensor, scale: Tensor | None, offs: Tensor) -> Tensor:
    """Each expert's rows times its matrix (K, N), which is mxfp8 if there are scales."""
    if scale is None:
        return mode.of(grouped_rows)(rows, matrices, offs, rows.dtype)
    return mode.of(grouped_rows_mxfp8)(rows, matrices, scale, offs, rows.dtype)


class _ExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, gate_up, down, gate_up_bias, down_bias, indices, segments, *options):
        tensors = x, weights, gate_up, down, gate_up_bias, down_bias
        y, z, rows = _forward(*tensors, indices, segments, *options)
        transposed, gate, *_ = options
        indices = None if gate_up_bias is down_bias is None else indices
        ctx.save_for_backward(*tensors, indices, z, *rows)
        ctx.options = transposed, gate
        ctx.main_grads = tuple(getattr(weight, "main_grad", None) for weight in tensors[2:6])
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        x, weights, gate_up, down, gate_up_bias, down_bias, indices, z, *saved = tensors = ctx.saved_tensors
        rows, (transposed, gate) = Plan(*saved), ctx.options
        needs_x, needs_weights, *needed = ctx.needs_input_grad[:6]
        parameters = gate_up, down, gate_up_bias, down_bias
        needed = [needs_gradient(*given) for given in zip(needed, parameters, ctx.main_grads, strict=True)]
        first, second = (gate_up.mT, down.mT) if transposed else (gate_up, down)
        # Gradients before the weight: the weights' gradients are their products with h, which has room for the weight
        mode = mode_of(dy, *tensors, *ctx.main_grads)
        empty, product = mode.empty, mode.of(grouped_rows)
        dy = gradient_rows(dy, mode.eager)
        do = gathered(mode, dy, rows)
        dh = product(do, second, rows.offs, x.dtype)
        dz, h, dweights = empty(z, z.shape, z.dtype), empty(z, dh.shape, dh.dtype), torch.zeros_like(weights)
        of_gate_up = Bias.of(indices, gate_up_bias)
        mode.of(moe_gate_backward)(dh, z, rows.slots, weights, *of_gate_up, dz, h, dweights, *gate)
        dx = dgate_up = ddown = dgate_up_bias = ddown_bias = None
        columns = not transposed
        if needed[1]:
            ddown = weight_gradient(mode, "experts", "down", h, do, rows.offs, down, ctx.main_grads[1], columns)
        del do, dh, h
        if needed[0]:
            xs = gathered(mode, x, rows)
            dgate_up = weight_gradient(
                mode, "experts", "gate_up", xs, dz, rows.offs, gate_up, ctx.main_grads[0], columns
            )
            del xs
        if needed[2]:
            dgate_up_bias = _bias_gradient(mode, "gate_up_bias", dz, rows, gate_up_bias, ctx.main_grads[2])
        if needed[3]:
            weighted = gathered(mode, dy, rows, weights)
            ddown_bias = _bias_gradient(mode, "down_bias", weighted, rows, down_bias, ctx.main_grads[3])
            del weighted
        if down_bias is not None and needs_weights:
            # Each row's product with its bias: a column of those with all
            products = empty(dy, (dy.shape[0], down_bias.shape[0]), torch.float32)
            mode.of(gemm)(dy, down_bias, products)
            found = products.gather(1, indices.long().clamp(0, down_bias.shape[0] - 1))
            dweights = torch.where(rows.positions >= 0, dweights + found, 0.0)
        if needs_x:
            dx = combined(mode, product(dz, first, rows.offs, x.dtype), rows, None)
        gradients = dx, dweights if needs_weights else None, dgate_up, ddown, dgate_up_bias, ddown_bias
        return *gradients, *[None] * 6


def _bias_gradient(
    mode: Mode, name: str, rows: Tensor, plan: Plan, bias: Tensor, main_grad: Tensor | None
) -> Tensor | None:
    """Sums of each expert's rows, in the order and steps of its weights' gradients: products with ones."""
    ones = rows.new_ones(rows.shape[0], 8).t()[:1]  # TMA reads a column whose elements are 16 bytes apart
    if main_grad is not None:
        target, gradient = gradient_buffer("experts", name, bias, main_grad)
        if gradient is None:
            mode.of(grouped_sums_into)(ones, rows, plan.offs, target.unsqueeze(1))
            return None
    return mode.of(grouped_sums)(ones, rows, plan.offs, bias.dtype).squeeze(1)
