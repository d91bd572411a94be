"""The backward of the projection, and of ``pre``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.mhc.config import (
    MAX_WARP_COLUMNS,
    PhiGradientSpec,
    ProjectionBackwardConfig,
    ProjectionBackwardSpec,
    WarpgroupBackwardConfig,
    backward_by_warpgroups,
    projection_backward_config,
    warpgroup_backward_config,
)
from cute_kernels.mhc.launch.coefficients import CoefficientGradients
from cute_kernels.mhc.launch.common import Launch, all_on_16, dtype_of, zero
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import Mode, empty, operator
from cute_kernels.runtime.targets import Target

BF16, FP32 = torch.bfloat16, torch.float32


class BackwardLaunch(NamedTuple):
    """A kernel of dx and the partial sums of dphi."""

    function: Launch
    config: ProjectionBackwardConfig | WarpgroupBackwardConfig
    num_sms: int


class ResidualGradient(NamedTuple):
    """The gradient of the new residual, dout (M, K), which res (M, n n) leads to x."""

    dout: Tensor
    res: Tensor
    orientation: str


class LayerGradient(NamedTuple):
    """The gradient of the layer input, dlayer (M, C), which pre (M, n) leads to x."""

    dlayer: Tensor
    pre: Tensor


class PhiGradients(NamedTuple):
    """Where the gradients of phi and of the norm's weight go (None: not wanted), and whether they are added to that."""

    dphi: Tensor | None = None
    dnorm_weight: Tensor | None = None
    accumulate_phi: bool = False
    accumulate_norm_weight: bool = False


def projection_backward(
    mode: Mode,
    x: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None,
    dH: Tensor,
    dmean_square: Tensor,
    dx: Tensor | None,
    *,
    n: int,
    layout: str,
    precision: str,
    residual: ResidualGradient | None = None,
    layer: LayerGradient | None = None,
    parameters: PhiGradients,
    coefficients: CoefficientGradients | None = None,
) -> None:
    """dx, dphi and dnorm_weight from dH (M, N) and dmean_square (M,), both contiguous.

    What reaches x past the projection, of the ``residual`` and of the ``layer``, is added to dx before it is rounded.
    With a gradient of phi or of the norm's weight also dbeta and dalpha, of ``coefficients``, from their sums.
    """
    dout, res, orientation = residual or (None, None, None)
    dlayer, pre = layer or (None, None)
    dphi, dnorm_weight, accumulate_phi, accumulate_norm_weight = parameters
    dbeta, dalpha, accumulate_beta, accumulate_alpha, sums = coefficients or CoefficientGradients()
    incoming = dH, dmean_square, dout, res, dlayer, pre
    options = n, layout, orientation, precision, accumulate_phi, accumulate_norm_weight
    sums_of = sums, dbeta, dalpha, accumulate_beta, accumulate_alpha
    run = mode.of(_projection_gradients)
    run(x, phi, norm_weight, *incoming, dx, dphi, dnorm_weight, *options, *sums_of)


@operator(
    "mhc_projection_backward",
    "Tensor x, Tensor phi, Tensor? norm_weight, Tensor dH, Tensor dmean_square, Tensor? dout, Tensor? res, "
    "Tensor? dlayer, Tensor? pre, Tensor(a!)? dx, Tensor(b!)? dphi, Tensor(c!)? dnorm_weight, int n, str layout, "
    "str? orientation, str precision, bool accumulate_phi, bool accumulate_norm_weight, Tensor? sums, "
    "Tensor(d!)? dbeta, Tensor(e!)? dalpha, bool accumulate_beta, bool accumulate_alpha",
)
def _projection_gradients(
    x: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None,
    dH: Tensor,
    dmean_square: Tensor,
    dout: Tensor | None,
    res: Tensor | None,
    dlayer: Tensor | None,
    pre: Tensor | None,
    dx: Tensor | None,
    dphi: Tensor | None,
    dnorm_weight: Tensor | None,
    n: int,
    layout: str,
    orientation: str | None,
    precision: str,
    accumulate_phi: bool,
    accumulate_norm_weight: bool,
    sums: Tensor | None,
    dbeta: Tensor | None,
    dalpha: Tensor | None,
    accumulate_beta: bool,
    accumulate_alpha: bool,
) -> None:
    tokens, (columns, k) = x.shape[0], phi.shape
    if not tokens:
        zero((dphi, accumulate_phi), (dnorm_weight, accumulate_norm_weight))
        zero((dbeta, accumulate_beta), (dalpha, accumulate_alpha))
        return
    needs_dphi, channels = dphi is not None or dnorm_weight is not None, k // n
    streams_width = k if dout is None and dlayer is None else channels
    tma = x.stride()[0] >= k
    spec = ProjectionBackwardSpec(
        n=n,
        channels=channels,
        layout=layout if n > 1 else "streams",
        columns=columns,
        precision=precision,
        x=x.dtype,
        phi=phi.dtype,
        norm_weight=dtype_of(norm_weight),
        needs_dx=dx is not None,
        needs_dphi=needs_dphi,
        orientation=orientation,
        has_layer_grad=dlayer is not None,
        rows_on_16=tma and all_on_16(channels, x, dout, dlayer, dx),
        all_on_16=columns > MAX_WARP_COLUMNS
        and tma
        and all_on_16(columns, dH)
        and all_on_16(streams_width, phi, x, dout, dlayer, dx)
        and all_on_16(n, res, pre),
    )
    function, config, num_sms = _projection_backward.get(x.get_device(), spec)
    partials, per_group = None, 1
    if isinstance(config, WarpgroupBackwardConfig):
        if needs_dphi:
            partials = empty(x, (config.chunks(tokens), columns, k), FP32)
        grid = (config.grid(tokens, num_sms),)
    else:
        chunks, num_ctas = grid = config.schedule(tokens, num_sms)
        if needs_dphi:
            partials = empty(x, (config.partials(tokens, chunks), columns, k), FP32)
            per_group = config.group // chunks
    function(x, phi, norm_weight, dH, dmean_square, dout, res, dlayer, pre, dx, partials, *grid)
    if needs_dphi:
        spec = PhiGradientSpec(
            columns=columns,
            k=k,
            alphas=0 if dalpha is None else dalpha.shape[0],
            phi=phi.dtype,
            norm_weight=dtype_of(norm_weight),
            dphi=dtype_of(dphi),
            dnorm_weight=dtype_of(dnorm_weight),
            dbeta=dtype_of(dbeta),
            dalpha=dtype_of(dalpha),
            accumulate_phi=accumulate_phi,
            accumulate_norm_weight=accumulate_norm_weight,
            accumulate_beta=accumulate_beta,
            accumulate_alpha=accumulate_alpha,
        )
        launch = _phi_gradient.get(x.get_device(), spec)
        launch(partials, phi, norm_weight, dphi, dnorm_weight, sums, dbeta, dalpha, per_group)


def _make_projection_backward(target: Target, spec: ProjectionBackwardSpec) -> BackwardLaunch:
    if backward_by_warpgroups(target.arch, spec):
        from cute_kernels.mhc.kernel.projection_backward_wgmma import projection_backward_sm90 as builder

        config = warpgroup_backward_config(spec)
    else:
        from cute_kernels.mhc.kernel.projection_backward_mma import projection_backward as builder

        config = projection_backward_config(spec)
    return BackwardLaunch(launches.load(builder, target.arch, spec, config), config, target.num_sms)


def _make_phi_gradient(target: Target, spec: PhiGradientSpec) -> Launch:
    from cute_kernels.mhc.kernel import phi_gradient

    return launches.load(phi_gradient.phi_gradient, target.arch, spec)


_projection_backward = LaunchCache(_make_projection_backward)
_phi_gradient = LaunchCache(_make_phi_gradient)
