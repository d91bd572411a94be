"""What ``pre``, ``head`` and ``hyper_connection`` have in common: projection, coefficients and aggregate as one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.mhc import launch
from cute_kernels.mhc.checks import sizes
from cute_kernels.mhc.op.common import (
    apply,
    differentiates,
    empty_like,
    gradient_rows,
    is_known,
    matrix_of,
    recall,
    remember,
    rows,
)
from cute_kernels.mhc.variants import Variant, head_of
from cute_kernels.runtime.autograd import first_derivative_only, gradient_buffer, needs_gradient
from cute_kernels.runtime.operators import alias, allocator, contiguous_strides

# Of a call: op, variant (launch.variant_fields), layout, precision, orientation ("io" or "oi": of hyper_connection)
Options = tuple[str, tuple, str, str, str | None]
PARAMETERS = ("phi", "alpha", "beta", "norm_weight")
HEAD_PARAMETERS = ("fn", "scale", "base", "norm_weight")


def compute(
    op: str,
    check: Callable[[], None] | None,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    beta: Tensor,
    norm_weight: Tensor | None,
    variant: Variant,
    layout: str,
    precision: str,
    orientation: str | None = None,
) -> tuple[tuple[Tensor | None, ...], bool]:
    """(layer_input, post, res), and whether autograd goes on; if so, with an ``orientation``, all of ``Composite``'s.

    ``check``: the arguments, of a call unlike those before; None: they have been checked. Of a head fn, scale and base
    stand for phi, alpha and beta.
    """
    tensors = x, phi, alpha, beta, norm_weight
    key, known = recall((op, variant, layout, precision, orientation), *tensors)
    if known is not None:
        owns, options, forward = known
    else:
        if check is not None:
            check()
        fields = launch.variant_fields(head_of(variant) if op == "head" else variant)
        options = op, fields, layout, precision, orientation
        owns = differentiates(*tensors)
        planned = is_known(key, *tensors)
        forward = plan(*tensors, options, owns) if planned else None
    if owns:
        results = apply(Composite, *tensors, options, forward)
        results = results if isinstance(results, tuple) else (results, None, None)
    else:
        results = (run(*tensors, options, False) if forward is None else forward(*tensors))[0]
    if known is None:
        remember(key, (owns, options, forward) if planned else None, *tensors)
    return results, owns


def plan(x, phi, alpha, beta, norm_weight, options: Options, keeps: bool) -> Callable | None:
    """What ``run`` does for plain tensors like these, all that it asks found; None without clusters that hold phi."""
    op, variant, layout, precision, _ = options
    (n, channels), columns, leading = sizes(x, layout), phi.shape[0], x.shape[:-2]
    matrix, is_head, dtype = rows(op, "x", x, n * channels), columns == n, x.dtype
    tokens, as_matrix, allocate = matrix.shape[0], (tuple(matrix.shape), matrix.stride()), allocator(x)
    if not tokens:
        return None
    example = x.new_empty((tokens, channels))
    keeps_h = keeps or not is_head
    kernels = launch.pre_kernels(matrix, phi, norm_weight, alpha, beta, example, layout, precision, keeps_h, variant)
    if kernels is None:
        return None
    project, clusters, coefficients = kernels
    shapes = [(*leading, *sizes_) for sizes_ in ((channels,), (n,), (n, n))]
    inputs, posts, mixes = [(shape, contiguous_strides(shape)) for shape in shapes]

    def forward(x, phi, alpha, beta, norm_weight):
        layer_input = allocate((tokens, channels), (channels, 1), dtype)
        pre = allocate((tokens, n), (n, 1), torch.float32)
        H = mean_square = post = res = None
        if keeps_h:
            H = allocate((tokens, columns), (columns, 1), torch.float32)
            mean_square = allocate((tokens,), (1,), torch.float32)
        x = alias(x, *as_matrix)
        project(x, phi, norm_weight, alpha, beta, H, mean_square, pre if is_head else None, layer_input, clusters)
        if coefficients is not None:
            post = allocate((tokens, n), (n, 1), torch.float32)
            res = allocate((tokens, n * n), (n * n, 1), torch.float32)
            coefficients(None, H, mean_square, alpha, beta, pre, post, res, tokens)
            post, res = alias(post, *posts), alias(res, *mixes)
        return (alias(layer_input, *inputs), post, res), (H, mean_square, pre)

    return forward


def run(x: Tensor, phi: Tensor, alpha: Tensor, beta: Tensor, norm_weight: Tensor | None, options: Options, keeps: bool):
    """((layer_input, post, res), (H, mean_square, pre)); of a head, whose phi has n rows, post and res are None.

    H and mean_square are None unless it ``keeps`` them.
    """
    op, variant, layout, precision, _ = options
    (n, channels), shape, columns = sizes(x, layout), x.shape[:-2], phi.shape[0]
    k, is_head = n * channels, columns == n

    def fp32(*shape: int, wanted: bool = True) -> Tensor | None:
        return x.new_empty(shape, dtype=torch.float32) if wanted else None

    layer_input = x.new_empty((*shape, channels))
    x_rows = rows(op, "x", x, k)
    tokens = x_rows.shape[0]
    H, mean_square, pre = fp32(tokens, columns, wanted=keeps), fp32(tokens, wanted=keeps), fp32(tokens, n)
    post, res = fp32(*shape, n, wanted=not is_head), fp32(*shape, n, n, wanted=not is_head)
    results = H, mean_square, pre, matrix_of(post, n), matrix_of(res, n * n), layer_input.view(-1, channels)
    alpha, beta = alpha.resolve_neg(), beta.resolve_neg()  # of one element they count as contiguous, negated or not
    launch.pre_forward(x_rows, phi, norm_weight, alpha, beta, *results, layout, precision, *variant)
    return (layer_input, post, res), (H, mean_square, pre)


class Composite(torch.autograd.Function):
    """layer_input, post and res; of a head layer_input alone.

    A gradient of x is written once. For that, with an orientation, there is a fourth output: x, an alias that nobody
    but this call's ``ExpandCombine`` gets. By a convention of the two, the alias's "gradient" is not that of x, but the
    gradient dout of the new streams as it came; the backward here adds sum_o R(i, o) dout_o to dx itself.
    """

    @staticmethod
    def forward(ctx, x, phi, alpha, beta, norm_weight, options, planned):
        arguments = x, phi, alpha, beta, norm_weight
        found = run(*arguments, options, True) if planned is None else planned(*arguments)
        (layer_input, post, res), (H, mean_square, pre) = found
        mixes = options[-1] is not None
        ctx.save_for_backward(x, phi, alpha, beta, norm_weight, H, mean_square, pre, res if mixes else None)
        ctx.options = options
        ctx.main_grads = [getattr(t, "main_grad", None) for t in (phi, alpha, beta, norm_weight)]
        ctx.set_materialize_grads(False)
        if res is None:
            return layer_input
        return (layer_input, post, res, x.view_as(x)) if mixes else (layer_input, post, res)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dlayer, dpost=None, dres=None, dout=None):
        x, phi, alpha, beta, norm_weight, H, mean_square, pre, res = ctx.saved_tensors
        op, variant, layout, precision, orientation = ctx.options
        needs_x, *needs = ctx.needs_input_grad[:5]
        (n, channels), columns = sizes(x, layout), phi.shape[0]
        k, is_head = n * channels, columns == n
        x_rows = rows(op, "x", x, k)
        targets, results = [], []
        names = HEAD_PARAMETERS if is_head else PARAMETERS
        for name, t, main_grad, needed in zip(
            names, (phi, alpha, beta, norm_weight), ctx.main_grads, needs, strict=True
        ):
            wanted = needs_gradient(needed, t, main_grad)
            target, result = gradient_buffer(op, name, t, main_grad) if wanted else (None, None)
            targets.append(target)
            results.append(result)
        accumulates = [target is not None and result is None for target, result in zip(targets, results, strict=True)]
        dphi, dalpha, dbeta, dweight = targets
        dlayer, dpre = gradient_rows(dlayer, channels), None
        if dlayer is not None:
            dpre = empty_like(pre)
            launch.aggregate_backward(dlayer, x_rows, None, None, dpre, layout)
        dH, dmean_square, sums = empty_like(H), empty_like(mean_square), None
        adds_up = dphi is not None or dweight is not None  # in projection_backward: dbeta and dalpha beside dphi
        if adds_up and (dbeta is not None or dalpha is not None):
            sums = launch.coefficient_sums(H)
        launch.coefficients_backward(
            H,
            mean_square,
            alpha.resolve_neg(),
            beta.resolve_neg(),
            dpre,
            gradient_rows(dpost, n),
            gradient_rows(dres, n * n),
            dH,
            dmean_square,
            dbeta if sums is None else None,
            dalpha if sums is None else None,
            sums,
            n,
            not is_head,
            accumulates[2],
            accumulates[1],
            *variant,
        )
        dx = empty_like(x, needs_x)
        if needs_x or adds_up:
            mixes, gathers = needs_x and dout is not None, needs_x and dlayer is not None
            launch.projection_backward(
                x_rows,
                phi,
                norm_weight,
                dH,
                dmean_square,
                gradient_rows(dout, k) if mixes else None,
                res.view(-1, n * n) if mixes else None,
                dlayer if gathers else None,
                pre if gathers else None,
                matrix_of(dx, k),
                dphi,
                dweight,
                n,
                layout,
                orientation if mixes else None,
                precision,
                accumulates[0],
                accumulates[3],
                sums,
                None if sums is None else dbeta,
                None if sums is None else dalpha,
                accumulates[2],
                accumulates[1],
            )
        return dx, *results, None, None
