"""The projection, ``pre``, and the backward of both."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.mhc.config import (
    MAX_BOX,
    MAX_WARP_COLUMNS,
    SLICE_CHANNELS,
    PreConfig,
    ProjectionBackwardConfig,
    ProjectionConfig,
    WarpgroupBackwardConfig,
    WarpgroupProjectionConfig,
    pre_config,
    projection_backward_config,
    projection_config,
    warpgroup_backward_config,
    warpgroup_projection_config,
)
from cute_kernels.mhc.launch import plans
from cute_kernels.mhc.launch.coefficients import add_parts, coefficients_kernel
from cute_kernels.mhc.launch.plans import (
    VARIANT,
    Launch,
    all_aligned,
    cutlass_dtypes,
    dtypes_of,
    name_of,
    registered,
    rows_key,
    shared_variant,
    zero,
)
from cute_kernels.mhc.launch.streams import aggregate_forward


@registered(
    "Tensor x, Tensor phi, Tensor? norm_weight, Tensor(a!) H, Tensor(b!) mean_square, int n, str layout, str precision"
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
    if not x.shape[0]:
        return
    plan = _cluster_plan(x, phi, norm_weight, None, None, None, n, layout, precision, False, None)
    if plan is not None:
        function, config, num_sms = plan
        clusters = config.num_clusters(x.shape[0], num_sms)
        function(x, phi, norm_weight, None, None, H, mean_square, None, None, clusters)
        return
    partials = _project_parts(x, phi, norm_weight, precision)
    splits, k, head = partials.shape[0], x.shape[1], H.shape[1] == n
    function = coefficients_kernel(x.get_device(), n, k, splits, True, None, None, None, head, False)
    function(partials, H, mean_square, None, None, None, None, None, H.shape[0])


@registered(
    "Tensor x, Tensor phi, Tensor? norm_weight, Tensor alpha, Tensor beta, Tensor(a!)? H, Tensor(b!)? mean_square, "
    "Tensor(c!) pre, Tensor(d!)? post, Tensor(e!)? res, Tensor(f!) layer_input, str layout, str precision, " + VARIANT
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
    *variant,
) -> None:
    """pre (M, n), post (M, n), doubly stochastic res (M, n n) and layer_input (M, C), of a head without post and res.

    ``H`` (M, N), ``mean_square`` (M,): kept for the backward if given. Two launches where clusters hold phi, of a head
    one; else three.
    """
    if not x.shape[0]:
        return
    head = res is None
    keeps = H is not None or not head
    kernels = pre_kernels(x, phi, norm_weight, alpha, beta, layer_input, layout, precision, keeps, variant)
    if kernels is None:
        partials = _project_parts(x, phi, norm_weight, precision)
        add_parts(partials, alpha, beta, H, mean_square, pre, post, res, x.shape[1], variant)
        aggregate_forward(x, pre, layer_input, layout, 1.0)
        return
    if keeps and H is None:
        H = x.new_empty((x.shape[0], phi.shape[0]), dtype=torch.float32)
        mean_square = x.new_empty(x.shape[0], dtype=torch.float32)
    function, clusters, coefficients = kernels
    function(x, phi, norm_weight, alpha, beta, H, mean_square, pre if head else None, layer_input, clusters)
    if coefficients is not None:
        coefficients(None, H, mean_square, alpha, beta, pre, post, res, x.shape[0])


def pre_kernels(
    x: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    layer_input: Tensor,
    layout: str,
    precision: str,
    keeps: bool,
    variant: tuple,
) -> tuple[Launch, int, Launch | None] | None:
    """Kernel in which clusters hold phi, their number, the coefficients' kernel (a head: None); None: no clusters."""
    n = x.shape[1] // layer_input.shape[1]
    plan = _cluster_plan(x, phi, norm_weight, alpha, beta, layer_input, n, layout, precision, keeps, variant)
    if plan is None:
        return None
    function, config, num_sms = plan
    coefficients = None
    if phi.shape[0] != n:
        coefficients = coefficients_kernel(x.get_device(), n, 0, 0, False, alpha, beta, variant, False, True)
    return function, config.num_clusters(x.shape[0], num_sms), coefficients


def _cluster_plan(
    x, phi, norm_weight, alpha, beta, layer_input, n, layout, precision, keeps, variant
) -> tuple[Launch, PreConfig, int] | None:
    """Kernel in which clusters hold phi, its configuration, number of SMs; None where these are not for it.

    They are for bf16 streams that TMA can address, and phi that 16 CTAs can hold.
    """
    key = (
        "clusters",
        n,
        layout,
        precision,
        keeps,
        variant,
        x.get_device(),
        rows_key(x, phi, layer_input),
        phi.shape[0],
        dtypes_of(norm_weight, alpha, beta),
    )
    try:
        return plans.known[key]
    except KeyError:
        tensors = (x, phi, norm_weight, alpha, beta, layer_input)
        plan = plans.known[key] = _plan_clusters(*tensors, n, layout, precision, keeps, variant)
        return plan


def _plan_clusters(x, phi, norm_weight, alpha, beta, layer_input, n, layout, precision, keeps, variant):
    index, (columns, k) = x.get_device(), phi.shape
    matrices = [t for t in (x, phi, layer_input) if t is not None]
    config = None
    if x.dtype is torch.bfloat16 and columns > 1 and x.stride(0) >= k and all_aligned(k // n, *matrices):
        config = pre_config(n, k // n, layout, columns, _product_name(phi, norm_weight), precision)
    if config is None:
        return None
    from cute_kernels.mhc.kernel.pre import pre_forward

    mixes = layer_input is not None
    function = pre_forward(
        plans.arch_of(index),
        *cutlass_dtypes(phi, norm_weight),
        cutlass_dtypes(alpha, beta) if mixes else None,
        shared_variant(variant) if mixes else None,
        keeps or not mixes,
        mixes and columns == n,
        config,
    )
    return function, config, plans.sm_count(index)


def _project_parts(x: Tensor, phi: Tensor, norm_weight: Tensor | None, precision: str) -> Tensor:
    """What the parts of K add up to, (parts, N + 1, M): N products and the sum of squares for each token."""
    key = ("project_parts", precision, x.get_device(), rows_key(x, phi), phi.shape[0], dtypes_of(norm_weight))
    plan = plans.known.get(key)
    if plan is None:
        plan = plans.known[key] = _plan_projection(x, phi, norm_weight, precision)
    function, config, num_sms = plan
    partials = x.new_empty((config.splits, phi.shape[0] + 1, x.shape[0]), dtype=torch.float32)
    function(x, phi, norm_weight, partials, config.grid(x.shape[0], num_sms))
    return partials


@registered(
    "Tensor x, Tensor phi, Tensor? norm_weight, Tensor dH, Tensor dmean_square, Tensor? dout, Tensor? res, "
    "Tensor? dlayer, Tensor? pre, Tensor(a!)? dx, Tensor(b!)? dphi, Tensor(c!)? dnorm_weight, int n, str layout, "
    "str? orientation, str precision, bool accumulate_phi, bool accumulate_norm_weight, Tensor? sums, "
    "Tensor(d!)? dbeta, Tensor(e!)? dalpha, bool accumulate_beta, bool accumulate_alpha"
)
def projection_backward(
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
    """dx, dphi and dnorm_weight from dH (M, N) and dmean_square (M,), both contiguous.

    With ``orientation`` what reaches x past the projection is added to dx before it is rounded: dout (M, K) by way of
    res (M, n n); with ``dlayer`` (M, C) that by way of pre (M, n), too. res and pre are contiguous. With a gradient of
    phi or of the norm's weight also dbeta and dalpha, from the ``sums`` of ``coefficients_backward``.
    """
    if not x.shape[0]:
        zero((dphi, accumulate_phi), (dnorm_weight, accumulate_norm_weight))
        zero((dbeta, accumulate_beta), (dalpha, accumulate_alpha))
        return
    accumulate = (accumulate_phi, accumulate_norm_weight, accumulate_beta, accumulate_alpha)
    key = (
        "projection_backward",
        n,
        layout,
        orientation,
        precision,
        accumulate,
        x.get_device(),
        rows_key(x, phi, dH, dout, res, dlayer, pre, dx),
        dtypes_of(norm_weight, dphi, dnorm_weight, dbeta, dalpha),
        phi.shape[0],
    )
    plan = plans.known.get(key)
    if plan is None:
        gradients = dphi, dnorm_weight, dbeta, dalpha
        arguments = (x, phi, norm_weight, dH, dout, res, dlayer, pre, dx, gradients, accumulate)
        plan = plans.known[key] = _plan_projection_backward(*arguments, n, layout, orientation, precision)
    function, config, sum_items, num_sms = plan
    tokens, partials, per_group = x.shape[0], None, 1
    if isinstance(config, WarpgroupBackwardConfig):
        if sum_items is not None:
            partials = x.new_empty((config.chunks(tokens), *phi.shape), dtype=torch.float32)
        num_clusters = config.grid(tokens, num_sms)
        function(x, phi, norm_weight, dH, dmean_square, dout, res, dlayer, pre, dx, partials, num_clusters)
    else:
        chunks, num_ctas = config.schedule(tokens, num_sms)
        if sum_items is not None:
            partials = x.new_empty((config.partials(tokens, chunks), *phi.shape), dtype=torch.float32)
            per_group = config.group // chunks
        function(x, phi, norm_weight, dH, dmean_square, dout, res, dlayer, pre, dx, partials, chunks, num_ctas)
    if sum_items is not None:
        sum_items(partials, phi, norm_weight, dphi, dnorm_weight, sums, dbeta, dalpha, per_group)


def _product_name(phi: Tensor, norm_weight: Tensor | None) -> str:
    """The dtype that holds phi times norm_weight."""
    return name_of(phi) if norm_weight is None else "float32"


def _plan_projection(
    x: Tensor, phi: Tensor, norm_weight: Tensor | None, precision: str
) -> tuple[Launch, ProjectionConfig | WarpgroupProjectionConfig, int]:
    index, (columns, k) = x.get_device(), phi.shape
    tma = columns > 1 and x.stride(0) >= k and all_aligned(k, x, phi)  # no boxes of a matrix of one row
    product, num_sms = _product_name(phi, norm_weight), plans.sm_count(index)
    if tma and _by_warpgroups(x, columns, plans.arch_of(index)):
        from cute_kernels.mhc.kernel.projection_sm90 import projection_forward_sm90

        config = warpgroup_projection_config(columns, k, product, precision)
        return projection_forward_sm90(plans.arch_of(index), *cutlass_dtypes(phi, norm_weight), config), config, num_sms
    from cute_kernels.mhc.kernel.projection import projection_forward

    config = projection_config(columns, k, name_of(x), product, precision, tma)
    return projection_forward(plans.arch_of(index), *cutlass_dtypes(x, phi, norm_weight), config), config, num_sms


def _plan_projection_backward(
    x, phi, norm_weight, dH, dout, res, dlayer, pre, dx, gradients, accumulate, n, layout, orientation, precision
) -> tuple[Launch, ProjectionBackwardConfig | WarpgroupBackwardConfig, Launch | None, int]:
    """(kernel of dx and partial sums, its configuration, kernel that adds these, number of SMs)."""
    from cute_kernels.mhc.kernel.phi_gradient import phi_gradient

    index, (columns, k), (dphi, dnorm_weight, _, dalpha) = x.get_device(), phi.shape, gradients
    arch, channels, sums = plans.arch_of(index), k // n, dphi is not None or dnorm_weight is not None
    rows = [t for t in (x, dout, dlayer, dx) if t is not None]
    coefficients = [t for t in (res, pre) if t is not None]
    mixes = dout is not None or dlayer is not None
    product, dtypes = _product_name(phi, norm_weight), cutlass_dtypes(phi, norm_weight)
    sum_items = None
    if sums:
        alphas = 0 if dalpha is None else dalpha.shape[0]
        sum_items = phi_gradient(arch, *dtypes, *cutlass_dtypes(*gradients), accumulate, columns, k, alphas)
    # Of a matrix that is one box wide, boxes beyond its end would have the coordinate of the first
    many_boxes = k > MAX_BOX
    if (
        _by_warpgroups(x, columns, arch)
        and (channels > SLICE_CHANNELS if mixes and layout == "streams" else many_boxes)
        and precision == "tf32"
        and columns % 16 == 0
        and all_aligned(columns, dH)
        and x.stride(0) >= k
        and all_aligned(channels if mixes else k, phi, *rows)
        and all_aligned(n, *coefficients)
    ):
        from cute_kernels.mhc.kernel.projection_backward_sm90 import projection_backward_sm90

        config = warpgroup_backward_config(n, k, layout, columns, product, dout is not None, dlayer is not None)
        facts = dx is not None, sums, n, orientation, dlayer is not None
        function = projection_backward_sm90(arch, *dtypes, *facts, config)
        return function, config, sum_items, plans.sm_count(index)
    from cute_kernels.mhc.kernel.projection_backward import projection_backward

    tma = x.stride(0) >= k and all_aligned(channels, *rows) and (many_boxes or n == 1 or layout == "streams")
    described = columns, name_of(x), product, precision, tma, dout is not None, dlayer is not None
    config = projection_backward_config(n, channels, layout, *described)
    facts = dx is not None, sums, orientation, dlayer is not None
    function = projection_backward(arch, *cutlass_dtypes(x), *dtypes, *facts, config)
    return function, config, sum_items, plans.sm_count(index)


def _by_warpgroups(x: Tensor, columns: int, arch: str) -> bool:
    """Whether there are kernels with warpgroup MMA for phi of so many rows."""
    return x.dtype is torch.bfloat16 and columns > MAX_WARP_COLUMNS and arch == "sm_90a"
