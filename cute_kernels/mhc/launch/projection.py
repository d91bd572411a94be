"""The projection, ``pre``, and the backward of both."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.mhc.config import (
    BLOCK_TOKENS,
    MAX_WARP_COLUMNS,
    CoefficientsSpec,
    PhiGradientSpec,
    PreSpec,
    ProjectionBackwardConfig,
    ProjectionBackwardSpec,
    ProjectionConfig,
    ProjectionSpec,
    WarpgroupBackwardConfig,
    WarpgroupProjectionConfig,
    backward_by_warpgroups,
    by_warpgroups,
    pre_config,
    projection_backward_config,
    projection_config,
    warpgroup_backward_config,
    warpgroup_projection_config,
)
from cute_kernels.mhc.launch.coefficients import CoefficientGradients, load_coefficients, reduce_parts
from cute_kernels.mhc.launch.common import CONSTANTS, Launch, all_on_16, dtype_of, zero
from cute_kernels.mhc.launch.streams import aggregate_forward
from cute_kernels.mhc.variants import Constants
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import Mode, empty, operator
from cute_kernels.runtime.targets import Target

BF16, FP32 = torch.bfloat16, torch.float32


class ClusterLaunch(NamedTuple):
    """A kernel in which clusters hold phi, how many are resident, and the coefficients' kernel after it, if any.

    ``function`` None: 16 CTAs cannot hold phi.
    """

    function: Launch | None
    resident: int = 0
    coefficients: Launch | None = None


class SplitLaunch(NamedTuple):
    """A kernel that projects by parts of K."""

    function: Launch
    config: ProjectionConfig | WarpgroupProjectionConfig
    num_sms: int


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


@operator(
    "mhc_projection_forward",
    "Tensor x, Tensor phi, Tensor? norm_weight, Tensor(a!) H, Tensor(b!) mean_square, int n, str layout, str precision",
)
def projection_forward(
    x: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None,
    H: Tensor,
    mean_square: Tensor,
    n: int,
    layout: str,
    precision: str,
) -> None:
    """H (M, N) and mean_square (M,) from x (M, K), phi (N, K) and norm_weight (K,)."""
    tokens, k = x.shape
    if not tokens:
        return
    columns = H.shape[1]
    stride = x.stride()[0]
    bits = x.data_ptr() | phi.data_ptr() | (stride | k // n) << 1
    if not bits & 15 and stride >= k and columns > 1 and x.dtype is BF16:  # streams that TMA can address
        weight = None if norm_weight is None else norm_weight.dtype
        order = layout if n > 1 else "streams"
        spec = PreSpec(n, k // n, order, columns, precision, phi.dtype, weight, None, None, None, True, False)
        launch = _clusters.get(x.get_device(), spec)
        if launch.function is not None:
            clusters = min(-(-tokens // BLOCK_TOKENS), launch.resident)
            launch.function(x, phi, norm_weight, None, None, H, mean_square, None, None, clusters)
            return
    partials = _project_parts(x, phi, norm_weight, precision)
    reduce_parts(partials, H, mean_square, k, n=n, is_head=columns == n)


@operator(
    "mhc_pre_forward",
    "Tensor x, Tensor phi, Tensor? norm_weight, Tensor alpha, Tensor beta, Tensor(a!)? H, Tensor(b!)? mean_square, "
    "Tensor(c!) pre, Tensor(d!)? post, Tensor(e!)? res, Tensor(f!) layer_input, str layout, str precision, "
    + CONSTANTS,
)
def pre_forward(
    x: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    H: Tensor | None,
    mean_square: Tensor | None,
    pre: Tensor,
    post: Tensor | None,
    res: Tensor | None,
    layer_input: Tensor,
    layout: str,
    precision: str,
    *constants,
) -> None:
    """pre (M, n), post (M, n), doubly stochastic res (M, n n) and layer_input (M, C), of a head without post and res.

    ``H`` (M, N), ``mean_square`` (M,): kept for the backward if given. Two launches where clusters hold phi, of a head
    one; else three.
    """
    tokens, n = pre.shape
    if not tokens:
        return
    is_head, constants = res is None, Constants(*constants)
    columns, k = phi.shape
    stride = x.stride()[0]
    bits = x.data_ptr() | phi.data_ptr() | layer_input.data_ptr() | (stride | k // n | layer_input.stride()[0]) << 1
    if not bits & 15 and stride >= k and columns > 1 and x.dtype is BF16:  # streams that TMA can address
        keeps_h = H is not None or not is_head
        weight = None if norm_weight is None else norm_weight.dtype
        spec = PreSpec(
            n,
            k // n,
            layout if n > 1 else "streams",
            columns,
            precision,
            phi.dtype,
            weight,
            alpha.dtype,
            beta.dtype,
            constants,
            keeps_h,
            is_head,
        )
        function, resident, coefficients = _clusters.get(x.get_device(), spec)
        if function is not None:
            if keeps_h and H is None:
                H, mean_square = empty(x, (tokens, columns), FP32), empty(x, (tokens,), FP32)
            clusters = min(-(-tokens // BLOCK_TOKENS), resident)
            function(x, phi, norm_weight, alpha, beta, H, mean_square, pre if is_head else None, layer_input, clusters)
            if coefficients is not None:
                coefficients(None, H, mean_square, alpha, beta, pre, post, res, tokens)
            return
    partials, options = _project_parts(x, phi, norm_weight, precision), {"n": n, "is_head": is_head}
    outputs = pre, post, res
    reduce_parts(partials, H, mean_square, k, parameters=(alpha, beta), outputs=outputs, constants=constants, **options)
    aggregate_forward.function(x, pre, layer_input, layout, 1.0)


def _project_parts(x: Tensor, phi: Tensor, norm_weight: Tensor | None, precision: str) -> Tensor:
    """Sums over the parts of K, (parts, N + 1, M): N products and the sum of squares for each token."""
    columns, k = phi.shape
    tma = columns > 1 and x.stride()[0] >= k and all_on_16(k, x, phi)  # no boxes of a matrix of one row
    spec = ProjectionSpec(columns, k, x.dtype, phi.dtype, dtype_of(norm_weight), precision, tma)
    function, config, num_sms = _projection.get(x.get_device(), spec)
    tokens = x.shape[0]
    partials = empty(x, (config.splits, columns + 1, tokens), FP32)
    function(x, phi, norm_weight, partials, config.grid(tokens, num_sms))
    return partials


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


def _make_clusters(target: Target, spec: PreSpec) -> ClusterLaunch:
    config = pre_config(spec)
    if config is None:
        return ClusterLaunch(None)
    from cute_kernels.mhc.kernel.projection_cluster import pre_forward as builder

    function, coefficients = launches.load(builder, target.arch, spec, config), None
    if spec.constants is not None and spec.columns > spec.n:
        after = CoefficientsSpec(spec.n, 0, 0, False, spec.alpha, spec.beta, spec.constants, False, True)
        coefficients = load_coefficients(target, after)
    return ClusterLaunch(function, config.resident(target.num_sms), coefficients)


def _make_projection(target: Target, spec: ProjectionSpec) -> SplitLaunch:
    if spec.tma and by_warpgroups(target.arch, spec.x, spec.columns):
        from cute_kernels.mhc.kernel.projection_wgmma import projection_forward_sm90 as builder

        config = warpgroup_projection_config(spec)
    else:
        from cute_kernels.mhc.kernel.projection_split import projection_forward as builder

        config = projection_config(spec)
    return SplitLaunch(launches.load(builder, target.arch, spec, config), config, target.num_sms)


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


_clusters = LaunchCache(_make_clusters)
_projection = LaunchCache(_make_projection)
_projection_backward = LaunchCache(_make_projection_backward)
_phi_gradient = LaunchCache(_make_phi_gradient)
