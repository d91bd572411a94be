"""Projection, coefficients and aggregate as one: for ``pre``, ``head`` and ``hyper_connection``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.mhc import launch
from cute_kernels.mhc.checks import sizes
from cute_kernels.mhc.launch import CoefficientGradients, LayerGradient, PhiGradients, ResidualGradient
from cute_kernels.mhc.op.common import empty_like, gradient_rows, matrix_of, rows
from cute_kernels.mhc.variants import Constants
from cute_kernels.runtime.autograd import apply, first_derivative_only, gradient_buffer, needs_gradient
from cute_kernels.runtime.operators import differentiates, mode_of

PARAMETERS = ("phi", "alpha", "beta", "norm_weight")
HEAD_PARAMETERS = ("fn", "scale", "base", "norm_weight")
FP32 = torch.float32


class Options(NamedTuple):
    """Options of a call. ``orientation``: "io" or "oi" for ``hyper_connection``, whose dout comes here; else None."""

    op: str
    constants: Constants
    layout: str
    precision: str
    orientation: str | None = None


def connect(
    x: Tensor, phi: Tensor, alpha: Tensor, beta: Tensor, norm_weight: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, bool]:
    """(layer_input, post, res, residual, whether that is an alias by which a gradient comes back to ``Composite``).

    All has been checked. Of a head fn, scale and base stand for phi, alpha and beta, and post and res are None.
    """
    if not differentiates(x, phi, alpha, beta, norm_weight):
        return *_forward(x, phi, alpha, beta, norm_weight, options, False)[0], x, False
    results = apply(Composite, x, phi, alpha, beta, norm_weight, options)
    if options.orientation is not None:
        return *results, True
    return *(results if isinstance(results, tuple) else (results, None, None)), x, False


def _forward(
    x: Tensor, phi: Tensor, alpha: Tensor, beta: Tensor, norm_weight: Tensor | None, options: Options, keeps_h: bool
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None, Tensor]]:
    """((layer_input, post, res), (H, mean_square, pre)); H and mean_square are None unless it keeps them."""
    op, constants, layout, precision, _ = options
    *leading, n, channels = x.shape
    if layout == "channels":
        n, channels = channels, n
    mode, x = mode_of(x, phi, alpha, beta, norm_weight), rows(op, "x", x, n * channels)
    tokens, columns = x.shape[0], phi.shape[0]
    layer_input, pre = mode.empty(x, (*leading, channels), x.dtype), mode.empty(x, (tokens, n), FP32)
    H = mean_square = post = res = None
    if keeps_h:
        H, mean_square = mode.empty(x, (tokens, columns), FP32), mode.empty(x, (tokens,), FP32)
    if columns == n:  # a head
        alpha, beta = alpha.resolve_neg(), beta.resolve_neg()  # of one element they are contiguous, negated or not
    else:
        post, res = mode.empty(x, (*leading, n), FP32), mode.empty(x, (*leading, n, n), FP32)
    matrices = matrix_of(post, n), None if res is None else res.view(-1, n * n), matrix_of(layer_input, channels)
    run = mode.of(launch.pre_forward)
    run(x, phi, norm_weight, alpha, beta, H, mean_square, pre, *matrices, layout, precision, *constants)
    return (layer_input, post, res), (H, mean_square, pre)


class Composite(torch.autograd.Function):
    """layer_input, post and res; of a head layer_input alone.

    A gradient of x is written once. For that, with an orientation, there is a fourth output: x, an alias that nobody
    but this call's ``ExpandCombine`` gets. By a convention of the two, the alias's "gradient" is not that of x, but the
    gradient dout of the new streams as it came; the backward here adds sum_o R(i, o) dout_o to dx itself.
    """

    @staticmethod
    def forward(ctx, x, phi, alpha, beta, norm_weight, options):
        (layer_input, post, res), kept = _forward(x, phi, alpha, beta, norm_weight, options, True)
        has_alias = options.orientation is not None
        ctx.save_for_backward(x, phi, alpha, beta, norm_weight, *kept, res if has_alias else None)
        ctx.options = options
        ctx.main_grads = [getattr(t, "main_grad", None) for t in (phi, alpha, beta, norm_weight)]
        ctx.set_materialize_grads(False)
        if res is None:
            return layer_input
        return (layer_input, post, res, x.view_as(x)) if has_alias else (layer_input, post, res)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dlayer, dpost=None, dres=None, dout=None):
        x, phi, alpha, beta, norm_weight, H, mean_square, pre, res = ctx.saved_tensors
        op, constants, layout, precision, orientation = ctx.options
        needs_x, *needs = ctx.needs_input_grad[:5]
        n, channels = sizes(x, layout)
        k, is_head = n * channels, phi.shape[0] == n
        x_rows = rows(op, "x", x, k)
        targets, results = [], []
        names = HEAD_PARAMETERS if is_head else PARAMETERS
        parameters = phi, alpha, beta, norm_weight
        for name, t, main_grad, needed in zip(names, parameters, ctx.main_grads, needs, strict=True):
            wanted = needs_gradient(needed, t, main_grad)
            target, result = gradient_buffer(op, name, t, main_grad) if wanted else (None, None)
            targets.append(target)
            results.append(result)
        dphi, dalpha, dbeta, dweight = targets
        into_phi, into_alpha, into_beta, into_weight = (
            target is not None and result is None for target, result in zip(targets, results, strict=True)
        )
        mode = mode_of(x, dlayer, dpost, dres, dout, *parameters, *targets)
        dlayer, dpre = gradient_rows(dlayer, channels, mode.eager), None
        if dlayer is not None:
            dpre = empty_like(pre, mode)
            mode.of(launch.aggregate_backward)(dlayer, x_rows, None, None, dpre, layout)
        dH, dmean_square, sums = empty_like(H, mode), empty_like(mean_square, mode), None
        has_dphi = dphi is not None or dweight is not None
        if has_dphi and (dbeta is not None or dalpha is not None):
            sums = launch.coefficient_sums(H, mode.empty)  # which projection_backward reduces beside those of dphi
        coefficients = CoefficientGradients(dbeta, dalpha, into_beta, into_alpha, sums)
        launch.coefficients_backward(
            mode,
            H,
            mean_square,
            alpha.resolve_neg(),
            beta.resolve_neg(),
            dpre,
            gradient_rows(dpost, n, mode.eager),
            gradient_rows(dres, n * n, mode.eager),
            dH,
            dmean_square,
            n=n,
            parameters=coefficients,
            constants=constants,
            has_sinkhorn=not is_head,
        )
        dx = empty_like(x, mode, needs_x)
        if needs_x or has_dphi:
            has_residual_grad, has_layer_grad = needs_x and dout is not None, needs_x and dlayer is not None
            residual = None
            if has_residual_grad:
                residual = ResidualGradient(gradient_rows(dout, k, mode.eager), matrix_of(res, n * n), orientation)
            launch.projection_backward(
                mode,
                x_rows,
                phi,
                norm_weight,
                dH,
                dmean_square,
                matrix_of(dx, k),
                n=n,
                layout=layout,
                precision=precision,
                residual=residual,
                layer=LayerGradient(dlayer, pre) if has_layer_grad else None,
                parameters=PhiGradients(dphi, dweight, into_phi, into_weight),
                coefficients=None if sums is None else coefficients,
            )
        return dx, *results, None
