"""Plans and launches of the hyper-connections: from a call's signature to a compiled kernel, then one dict lookup.

All take matrices, a row a token, and write to those that they are given; a plan is found by what a kernel is
specialised on, so another number of tokens finds the same plan. Each function here is also registered as the operator
``cute_kernels::mhc_<name>``, which runs in its place where graphs are traced. No tokens: nothing is launched, and sums
over the tokens are zeros.

Every kernel is a programmatic dependent launch: it starts while the one before it ends, and waits for its results
before it touches memory (the sum of coefficients beside phi_gradient, which waits for nothing that this one writes,
before its own end). Three of a hyper-connection's backward let the next one start earlier than at their own end:
coefficients (a few warps), projection (each CTA with its last tile), phi_gradient. Elsewhere kernels that only wait
stood in the way (bench/NOTES.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels._op import Calls, Plans, is_plain, mutating_op
from cute_kernels._target import arch_of, cutlass_dtype, sm_count
from cute_kernels.common.row_layout import SUM_COLUMNS
from cute_kernels.mhc.config import (
    BIAS_CHUNK,
    MAX_BOX,
    MAX_WARP_COLUMNS,
    SLICE_CHANNELS,
    PreConfig,
    ProjectionBackwardConfig,
    ProjectionConfig,
    StreamLayout,
    WarpgroupBackwardConfig,
    WarpgroupProjectionConfig,
    pre_config,
    product_layout,
    projection_backward_config,
    projection_config,
    stream_layout,
    warpgroup_backward_config,
    warpgroup_projection_config,
)
from cute_kernels.mhc.variants import Variant

COEFFICIENT_TOKENS = 32  # whose gradients of alpha and beta are added first
# Of a Variant, what the coefficients' kernels know, in the order of its fields
VARIANT = (
    "float rms_eps, str rms_eps_placement, float pre_eps, float post_mult, "
    "str sinkhorn, float sinkhorn_eps, int iterations"
)
_ORDINARY = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str))
Launch = Callable[..., None]

OPERATORS: dict[str, Launch] = {}  # name -> what runs; all that are registered
_plans = Plans()
calls = Calls()


def variant_fields(variant: Variant) -> tuple:
    """The last arguments of the coefficients' launches; a key knows plain floats alone."""
    v = variant
    eps = float(v.rms_eps), v.rms_eps_placement, float(v.pre_eps), float(v.post_mult)
    return (*eps, v.sinkhorn, float(v.sinkhorn_eps), v.iterations)


def registered(schema: str) -> Callable[[Launch], Launch]:
    """Register a launch as an operator of its name; the result runs it in eager mode, the operator where traced."""

    def decorate(function: Launch) -> Launch:
        name = f"mhc_{function.__name__}"
        OPERATORS[name] = function
        operator = mutating_op(name, schema, function)

        @functools.wraps(function)
        def launch(first: Tensor, *rest) -> None:
            if is_plain(first) and _ORDINARY.issuperset(map(type, rest)):
                function(first, *rest)
            else:
                operator(first, *rest)

        return launch

    return decorate


# The projection, and what follows from it


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
    function = _coefficients_kernel(x.get_device(), n, k, splits, True, None, None, None, head, False)
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
        _coefficients(partials, alpha, beta, H, mean_square, pre, post, res, x.shape[1], variant)
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
        coefficients = _coefficients_kernel(x.get_device(), n, 0, 0, False, alpha, beta, variant, False, True)
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
        _rows_key(x, phi, layer_input),
        phi.shape[0],
        _dtypes(norm_weight, alpha, beta),
    )
    try:
        return _plans[key]
    except KeyError:
        tensors = (x, phi, norm_weight, alpha, beta, layer_input)
        plan = _plans[key] = _plan_clusters(*tensors, n, layout, precision, keeps, variant)
        return plan


def _plan_clusters(x, phi, norm_weight, alpha, beta, layer_input, n, layout, precision, keeps, variant):
    index, (columns, k) = x.get_device(), phi.shape
    matrices = [t for t in (x, phi, layer_input) if t is not None]
    config = None
    if x.dtype is torch.bfloat16 and columns > 1 and x.stride(0) >= k and _aligned(k // n, *matrices):
        config = pre_config(n, k // n, layout, columns, _product_name(phi, norm_weight), precision)
    if config is None:
        return None
    from cute_kernels.mhc.kernel.pre import pre_forward

    mixes = layer_input is not None
    function = pre_forward(
        arch_of(index),
        *_cutlass(phi, norm_weight),
        _cutlass(alpha, beta) if mixes else None,
        _variant(variant) if mixes else None,
        keeps or not mixes,
        mixes and columns == n,
        config,
    )
    return function, config, sm_count(index)


def _project_parts(x: Tensor, phi: Tensor, norm_weight: Tensor | None, precision: str) -> Tensor:
    """What the parts of K add up to, (parts, N + 1, M): N products and the sum of squares for each token."""
    key = ("project_parts", precision, x.get_device(), _rows_key(x, phi), phi.shape[0], _dtypes(norm_weight))
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _plan_projection(x, phi, norm_weight, precision)
    function, config, num_sms = plan
    partials = x.new_empty((config.splits, phi.shape[0] + 1, x.shape[0]), dtype=torch.float32)
    function(x, phi, norm_weight, partials, config.grid(x.shape[0], num_sms))
    return partials


def _coefficients(
    partials: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    H: Tensor | None,
    mean_square: Tensor | None,
    pre: Tensor,
    post: Tensor | None,
    res: Tensor | None,
    k: int,
    variant: tuple,
) -> None:
    """pre, post and res from the parts of K, H and mean_square being kept if given; without parts from these two."""
    n, head = pre.shape[1], res is None
    splits, keeps = (0, False) if partials is None else (partials.shape[0], H is not None)
    function = _coefficients_kernel(pre.get_device(), n, k, splits, keeps, alpha, beta, variant, head, not head)
    function(partials, H, mean_square, alpha, beta, pre, post, res, pre.shape[0])


def _coefficients_kernel(
    index: int,
    n: int,
    k: int,
    splits: int,
    keeps: bool,
    alpha: Tensor | None,
    beta: Tensor | None,
    variant: tuple | None,
    head: bool,
    normalises: bool,
) -> Launch:
    """What adds the parts of K, or computes coefficients (with a ``variant``), or both."""
    key = ("coefficients", index, n, k, splits, keeps, _dtypes(alpha, beta), variant, head, normalises)
    function = _plans.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.coefficients import coefficients_forward

        arch = arch_of(index)
        dtypes, fields = (None, None) if variant is None else (_cutlass(alpha, beta), _variant(variant))
        function = _plans[key] = coefficients_forward(arch, n, k, splits, keeps, dtypes, fields, head, normalises)
    return function


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
        _zero((dphi, accumulate_phi), (dnorm_weight, accumulate_norm_weight))
        _zero((dbeta, accumulate_beta), (dalpha, accumulate_alpha))
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
        _rows_key(x, phi, dH, dout, res, dlayer, pre, dx),
        _dtypes(norm_weight, dphi, dnorm_weight, dbeta, dalpha),
        phi.shape[0],
    )
    plan = _plans.get(key)
    if plan is None:
        gradients = dphi, dnorm_weight, dbeta, dalpha
        arguments = (x, phi, norm_weight, dH, dout, res, dlayer, pre, dx, gradients, accumulate)
        plan = _plans[key] = _plan_projection_backward(*arguments, n, layout, orientation, precision)
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
    return _name(phi) if norm_weight is None else "float32"


def _plan_projection(
    x: Tensor, phi: Tensor, norm_weight: Tensor | None, precision: str
) -> tuple[Launch, ProjectionConfig | WarpgroupProjectionConfig, int]:
    index, (columns, k) = x.get_device(), phi.shape
    tma = columns > 1 and x.stride(0) >= k and _aligned(k, x, phi)  # no boxes of a matrix of one row
    product, num_sms = _product_name(phi, norm_weight), sm_count(index)
    if tma and _by_warpgroups(x, columns, arch_of(index)):
        from cute_kernels.mhc.kernel.projection_sm90 import projection_forward_sm90

        config = warpgroup_projection_config(columns, k, product, precision)
        return projection_forward_sm90(arch_of(index), *_cutlass(phi, norm_weight), config), config, num_sms
    from cute_kernels.mhc.kernel.projection import projection_forward

    config = projection_config(columns, k, _name(x), product, precision, tma)
    return projection_forward(arch_of(index), *_cutlass(x, phi, norm_weight), config), config, num_sms


def _plan_projection_backward(
    x, phi, norm_weight, dH, dout, res, dlayer, pre, dx, gradients, accumulate, n, layout, orientation, precision
) -> tuple[Launch, ProjectionBackwardConfig | WarpgroupBackwardConfig, Launch | None, int]:
    """(kernel of dx and partial sums, its configuration, kernel that adds these, number of SMs)."""
    from cute_kernels.mhc.kernel.phi_gradient import phi_gradient

    index, (columns, k), (dphi, dnorm_weight, _, dalpha) = x.get_device(), phi.shape, gradients
    arch, channels, sums = arch_of(index), k // n, dphi is not None or dnorm_weight is not None
    rows = [t for t in (x, dout, dlayer, dx) if t is not None]
    coefficients = [t for t in (res, pre) if t is not None]
    mixes = dout is not None or dlayer is not None
    product, dtypes = _product_name(phi, norm_weight), _cutlass(phi, norm_weight)
    sum_items = None
    if sums:
        alphas = 0 if dalpha is None else dalpha.shape[0]
        sum_items = phi_gradient(arch, *dtypes, *_cutlass(*gradients), accumulate, columns, k, alphas)
    # Of a matrix that is one box wide, boxes beyond its end would have the coordinate of the first
    many_boxes = k > MAX_BOX
    if (
        _by_warpgroups(x, columns, arch)
        and (channels > SLICE_CHANNELS if mixes and layout == "streams" else many_boxes)
        and precision == "tf32"
        and columns % 16 == 0
        and _aligned(columns, dH)
        and x.stride(0) >= k
        and _aligned(channels if mixes else k, phi, *rows)
        and _aligned(n, *coefficients)
    ):
        from cute_kernels.mhc.kernel.projection_backward_sm90 import projection_backward_sm90

        config = warpgroup_backward_config(n, k, layout, columns, product, dout is not None, dlayer is not None)
        facts = dx is not None, sums, n, orientation, dlayer is not None
        function = projection_backward_sm90(arch, *dtypes, *facts, config)
        return function, config, sum_items, sm_count(index)
    from cute_kernels.mhc.kernel.projection_backward import projection_backward

    tma = x.stride(0) >= k and _aligned(channels, *rows) and (many_boxes or n == 1 or layout == "streams")
    described = columns, _name(x), product, precision, tma, dout is not None, dlayer is not None
    config = projection_backward_config(n, channels, layout, *described)
    facts = dx is not None, sums, orientation, dlayer is not None
    function = projection_backward(arch, *_cutlass(x), *dtypes, *facts, config)
    return function, config, sum_items, sm_count(index)


def _by_warpgroups(x: Tensor, columns: int, arch: str) -> bool:
    """Whether there are kernels with warpgroup MMA for phi of so many rows."""
    return x.dtype is torch.bfloat16 and columns > MAX_WARP_COLUMNS and arch == "sm_90a"


# The coefficients


@registered(
    "Tensor H, Tensor mean_square, Tensor alpha, Tensor beta, Tensor(a!) pre, Tensor(b!) post, Tensor(c!) logits, "
    + VARIANT
)
def coefficients_forward(
    H: Tensor, mean_square: Tensor, alpha: Tensor, beta: Tensor, pre: Tensor, post: Tensor, logits: Tensor, *variant
) -> None:
    """pre (M, n), post (M, n) and the logits of res (M, n n) from H (M, N) and mean_square (M,)."""
    if not H.shape[0]:
        return
    function = _coefficients_kernel(H.get_device(), pre.shape[1], 0, 0, False, alpha, beta, variant, False, False)
    function(None, H, mean_square, alpha, beta, pre, post, logits, H.shape[0])


@registered(
    "Tensor H, Tensor mean_square, Tensor alpha, Tensor beta, Tensor? dpre, Tensor? dpost, Tensor? dres, "
    "Tensor(a!) dH, Tensor(b!) dmean_square, Tensor(c!)? dbeta, Tensor(d!)? dalpha, Tensor(e!)? sums, int n, "
    f"bool normalises, bool accumulate_beta, bool accumulate_alpha, {VARIANT}"
)
def coefficients_backward(
    H: Tensor,
    mean_square: Tensor,
    alpha: Tensor,
    beta: Tensor,
    dpre: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    dH: Tensor,
    dmean_square: Tensor,
    dbeta: Tensor | None,
    dalpha: Tensor | None,
    sums: Tensor | None,
    n: int,
    normalises: bool,
    accumulate_beta: bool,
    accumulate_alpha: bool,
    *variant,
) -> None:
    """Gradients from those of pre, post and res (None: zeros); ``normalises``: res is what Sinkhorn makes of h.

    ``sums`` (``coefficient_sums``): in place of dbeta and dalpha, for ``projection_backward`` to add up.
    """
    tokens, columns = H.shape
    if not tokens:
        _zero((dbeta, accumulate_beta), (dalpha, accumulate_alpha))
        return
    accumulate = (accumulate_beta and sums is None, accumulate_alpha and sums is None)
    key = (
        "coefficients_backward",
        n,
        columns,
        normalises,
        accumulate,
        variant,
        H.get_device(),
        _rows_key(H, dpre, dpost, dres),
        _dtypes(alpha, beta, dbeta, dalpha),
        sums is None,
    )
    function = _plans.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.coefficients import coefficients_backward

        given = (dpre, dpost, dres)
        function = _plans[key] = coefficients_backward(
            arch_of(H.get_device()),
            n,
            _cutlass(alpha, beta),
            _cutlass(dbeta, dalpha),
            accumulate,
            tuple(t is not None for t in given),
            tuple(_row_alignment(t) for t in (H, *given)),
            _variant(variant),
            columns == n,
            normalises,
            sums is not None,
        )
    if dbeta is not None or dalpha is not None:
        sums = coefficient_sums(H)
    function(H, mean_square, alpha, beta, dpre, dpost, dres, dH, dmean_square, sums, dbeta, dalpha)


def coefficient_sums(H: Tensor) -> Tensor:
    """Room for the partial sums of dbeta and dalpha."""
    return _rows_of_sums(H, 2, COEFFICIENT_TOKENS, H.shape[1])


@registered("Tensor logits, Tensor(a!) res, int iterations, str variant, float eps")
def sinkhorn_forward(logits: Tensor, res: Tensor, iterations: int, variant: str, eps: float) -> None:
    """res (M, n n) from logits (M, n n)."""
    if not logits.shape[0]:
        return
    key = ("sinkhorn_forward", iterations, variant, eps, logits.get_device(), _rows_key(logits))
    function = _plans.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.sinkhorn import sinkhorn_forward

        arch, n = arch_of(logits.get_device()), math.isqrt(logits.shape[1])
        function = _plans[key] = sinkhorn_forward(arch, n, variant, iterations, eps, _row_alignment(logits))
    function(logits, res)


@registered("Tensor logits, Tensor dres, Tensor(a!) dlogits, int iterations, str variant, float eps")
def sinkhorn_backward(logits: Tensor, dres: Tensor, dlogits: Tensor, iterations: int, variant: str, eps: float) -> None:
    """dlogits (M, n n) from logits and dres."""
    if not logits.shape[0]:
        return
    key = ("sinkhorn_backward", iterations, variant, eps, logits.get_device(), _rows_key(logits, dres))
    function = _plans.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.sinkhorn import sinkhorn_backward

        arch, n = arch_of(logits.get_device()), math.isqrt(logits.shape[1])
        aligns = (_row_alignment(logits), _row_alignment(dres))
        function = _plans[key] = sinkhorn_backward(arch, n, variant, iterations, eps, aligns)
    function(logits, dres, dlogits)


# The streams


@registered("Tensor x, Tensor? pre, Tensor(a!) out, str layout, float scale")
def aggregate_forward(x: Tensor, pre: Tensor | None, out: Tensor, layout: str, scale: float) -> None:
    """out (M, C): the sum of x's streams, each times its weight of pre (M, n), or all times ``scale``."""
    if not x.shape[0]:
        return
    key = ("aggregate_forward", layout, x.get_device(), _rows_key(x, pre, out))
    function = _plans.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.aggregate import aggregate_forward

        arch, (dtype,), streams = arch_of(x.get_device()), _cutlass(x), _streams(layout, out.shape[1], x, out)
        function = _plans[key] = aggregate_forward(arch, dtype, pre is not None, _row_alignment(pre), streams)
    function(x, pre, out, scale)


@registered("Tensor dout, Tensor x, Tensor? pre, Tensor(a!)? dx, Tensor(b!)? dpre, str layout")
def aggregate_backward(
    dout: Tensor, x: Tensor, pre: Tensor | None, dx: Tensor | None, dpre: Tensor | None, layout: str
) -> None:
    """dx (M, K) by way of pre (M, n), and dpre (M, n), from dout (M, C)."""
    if not x.shape[0]:
        return
    if dx is None:
        pre = None
    key = ("aggregate_backward", layout, dpre is None, x.get_device(), _rows_key(dout, x, pre, dx))
    function = _plans.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.aggregate import aggregate_backward

        arch, (dtype,), streams = arch_of(x.get_device()), _cutlass(x), _streams(layout, dout.shape[1], x, dout, dx)
        needs = (dx is not None, dpre is not None)
        function = _plans[key] = aggregate_backward(arch, dtype, *needs, _row_alignment(pre), streams)
    function(dout, x, pre, dx, dpre)


@registered("Tensor h, Tensor(a!) x, str layout, float scale")
def expand_streams(h: Tensor, x: Tensor, layout: str, scale: float) -> None:
    """Every stream of x (M, K) is ``scale`` times h (M, C)."""
    if not h.shape[0]:
        return
    key = ("expand_streams", layout, h.get_device(), _rows_key(h, x))
    function = _plans.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.aggregate import expand_streams

        arch, (dtype,), streams = arch_of(h.get_device()), _cutlass(h), _streams(layout, h.shape[1], x, h)
        function = _plans[key] = expand_streams(arch, dtype, streams)
    function(h, x, scale)


@registered(
    "Tensor f, Tensor? bias, Tensor post, Tensor x, Tensor res, Tensor? seed, Tensor(a!) out, Tensor? pre, "
    "Tensor(b!)? layer_input, float dropout_p, str layout, str orientation"
)
def expand_combine_forward(
    f: Tensor,
    bias: Tensor | None,
    post: Tensor,
    x: Tensor,
    res: Tensor,
    seed: Tensor | None,
    out: Tensor,
    pre: Tensor | None,
    layer_input: Tensor | None,
    dropout_p: float,
    layout: str,
    orientation: str,
) -> None:
    """out (M, K) from f (M, C), post (M, n), x (M, K) and res (M, n n); ``seed`` (1,): there is dropout.

    With ``pre`` (M, n) also what ``aggregate_forward`` makes of out: ``layer_input`` (M, C).
    """
    if not x.shape[0]:
        return
    function = expand_combine_kernel(
        f, bias, post, x, res, seed is not None, out, pre, layer_input, layout, orientation
    )
    function(f, bias, post, x, res, seed, out, pre, layer_input, *dropout_arguments(dropout_p))


def expand_combine_kernel(
    f: Tensor,
    bias: Tensor | None,
    post: Tensor,
    x: Tensor,
    res: Tensor,
    dropout: bool,
    out: Tensor,
    pre: Tensor | None,
    layer_input: Tensor | None,
    layout: str,
    orientation: str,
) -> Launch:
    """What ``expand_combine_forward`` launches."""
    key = (
        "expand_combine_forward",
        layout,
        orientation,
        dropout,
        x.get_device(),
        _rows_key(f, post, x, res, out, pre, layer_input),
        _dtypes(bias),
    )
    function = _plans.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.expand_combine import expand_combine_forward

        arch, dtypes = arch_of(x.get_device()), _cutlass(x, bias)
        streams = _streams(layout, f.shape[1], x, f, out, layer_input)
        aligns = (_row_alignment(post), _row_alignment(res), _row_alignment(pre))
        kernel = expand_combine_forward(arch, *dtypes, dropout, pre is not None, orientation, aligns, streams)
        function = _plans[key] = kernel
    return function


@registered(
    "Tensor dout, Tensor f, Tensor? bias, Tensor post, Tensor x, Tensor res, Tensor? seed, Tensor(a!)? dx, "
    "Tensor(b!)? df, Tensor(c!)? dpost, Tensor(d!)? dres, float dropout_p, str layout, str orientation"
)
def expand_combine_backward(
    dout: Tensor,
    f: Tensor,
    bias: Tensor | None,
    post: Tensor,
    x: Tensor,
    res: Tensor,
    seed: Tensor | None,
    dx: Tensor | None,
    df: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    dropout_p: float,
    layout: str,
    orientation: str,
) -> None:
    """dx, df, and the pair of dpost and dres, from dout (M, K) and what the forward had."""
    if not x.shape[0]:
        return
    dropout = seed is not None
    key = (
        "expand_combine_backward",
        layout,
        orientation,
        dropout,
        dpost is None,
        x.get_device(),
        _rows_key(dout, f, post, x, res, dx, df),
        _dtypes(bias),
    )
    function = _plans.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.expand_combine import expand_combine_backward

        streams = product_layout(_streams(layout, f.shape[1], x, f, dout, dx, df))
        function = _plans[key] = expand_combine_backward(
            arch_of(x.get_device()),
            *_cutlass(x, bias),
            dropout,
            dx is not None,
            df is not None,
            dpost is not None,
            orientation,
            (_row_alignment(post), _row_alignment(res)),
            streams,
        )
    function(dout, f, bias, post, x, res, seed, dx, df, dpost, dres, *dropout_arguments(dropout_p))


@registered("Tensor dout, Tensor post, Tensor? seed, Tensor(a!) dbias, float dropout_p, str layout, bool accumulate")
def bias_gradient(
    dout: Tensor,
    post: Tensor,
    seed: Tensor | None,
    dbias: Tensor,
    dropout_p: float,
    layout: str,
    accumulate: bool,
) -> None:
    """dbias (C,) from dout (M, K) and post (M, n)."""
    if not dout.shape[0]:
        _zero((dbias, accumulate))
        return
    dropout, channels = seed is not None, dbias.shape[0]
    key = (
        "bias_gradient",
        layout,
        dropout,
        accumulate,
        dout.get_device(),
        _rows_key(dout, post),
        _dtypes(dbias),
    )
    function = _plans.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.expand_combine import bias_gradient

        arch, dtypes, streams = arch_of(dout.get_device()), _cutlass(dout, dbias), _streams(layout, channels, dout)
        align = _row_alignment(post)
        function = _plans[key] = bias_gradient(arch, *dtypes, accumulate, dropout, align, BIAS_CHUNK, streams)
    function(dout, post, seed, _rows_of_sums(dout, 1, BIAS_CHUNK, channels), dbias, *dropout_arguments(dropout_p))


# What the plans have in common


def _rows_key(*matrices: Tensor | None) -> tuple:
    """All that a kernel is specialised on of matrices but for their number of rows."""
    return tuple([None if t is None else (t.dtype, t.shape[1], t.stride(0), t.data_ptr() & 15) for t in matrices])


def _dtypes(*tensors: Tensor | None) -> tuple:
    return tuple([None if t is None else t.dtype for t in tensors])


def _cutlass(*tensors: Tensor | None) -> tuple:
    return tuple([None if t is None else cutlass_dtype(t.dtype) for t in tensors])


def _name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _variant(fields: tuple) -> Variant:
    """The kernels know neither orientation nor layout: variants that differ in them share one."""
    return Variant(*fields, res_orientation="io", layout="streams")


def _streams(layout: str, channels: int, x: Tensor, *matrices: Tensor | None) -> StreamLayout:
    """How threads share the tokens of ``x`` (M, n C) and of other matrices, (M, n C) or (M, C), of its dtype."""
    itemsize = x.element_size()
    rows = [t for t in (x, *matrices) if t is not None]
    alignment = math.gcd(16 // itemsize, *(t.stride(0) for t in rows), *(t.data_ptr() // itemsize for t in rows))
    return stream_layout(x.shape[1] // channels, channels, layout, itemsize, alignment)


def _row_alignment(t: Tensor | None) -> int:
    """Elements on which all rows of coefficients start."""
    return 1 if t is None else math.gcd(4, t.shape[1], t.stride(0), t.data_ptr() // t.element_size())


def _aligned(width: int, *matrices: Tensor) -> bool:
    """Whether all rows start on 16 bytes and ``width`` elements of them end on 16."""
    for t in matrices:
        size = t.element_size()
        if t.data_ptr() % 16 or t.stride(0) * size % 16 or width * size % 16:
            return False
    return True


def _rows_of_sums(like: Tensor, outputs: int, tokens: int, columns: int) -> Tensor:
    """Room for ``outputs`` partial rows for every ``tokens`` tokens, of whole CTAs of SumRows."""
    chunks = -(-like.shape[0] // tokens)
    return like.new_empty((outputs, chunks, -(-columns // SUM_COLUMNS) * SUM_COLUMNS), dtype=torch.float32)


def dropout_arguments(p: float) -> tuple[int, float]:
    """(threshold of the random words, what is kept is multiplied by)."""
    return int(p * 2**32), 1.0 / (1.0 - p)


def _zero(*sums: tuple[Tensor | None, bool]) -> None:
    for t, accumulate in sums:
        if t is not None and not accumulate:
            t.zero_()
