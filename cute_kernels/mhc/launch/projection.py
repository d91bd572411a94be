"""The projection, and ``pre``. The backward of both: ``projection_backward.py``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.mhc.config import (
    BLOCK_TOKENS,
    CoefficientsSpec,
    PreSpec,
    ProjectionConfig,
    ProjectionSpec,
    WarpgroupProjectionConfig,
    by_warpgroups,
    pre_config,
    projection_config,
    warpgroup_projection_config,
)
from cute_kernels.mhc.launch.coefficients import load_coefficients, reduce_parts
from cute_kernels.mhc.launch.common import CONSTANTS, Launch, all_on_16, dtype_of
from cute_kernels.mhc.launch.streams import aggregate_forward
from cute_kernels.mhc.variants import Constants
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import empty, operator
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


_clusters = LaunchCache(_make_clusters)
_projection = LaunchCache(_make_projection)
