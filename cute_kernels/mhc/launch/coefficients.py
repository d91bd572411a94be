"""The coefficients of a token, and Sinkhorn's iterations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from cute_kernels.mhc.config import (
    COEFFICIENT_TOKENS,
    CoefficientsBackwardSpec,
    CoefficientsSpec,
    SinkhornBackwardSpec,
    SinkhornSpec,
)
from cute_kernels.mhc.launch.common import CONSTANTS, Launch, dtype_of, partial_rows, row_alignment, zero
from cute_kernels.mhc.variants import Constants
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import Mode, empty, operator
from cute_kernels.runtime.targets import Target


class CoefficientGradients(NamedTuple):
    """Where the gradients of beta and alpha go (None: not wanted), and whether they are added to what is there.

    ``sums`` (``coefficient_sums``): their partial sums, which ``coefficients_backward`` leaves for
    ``projection_backward`` to add up.
    """

    dbeta: Tensor | None = None
    dalpha: Tensor | None = None
    accumulate_beta: bool = False
    accumulate_alpha: bool = False
    sums: Tensor | None = None


@operator(
    "mhc_coefficients_forward",
    "Tensor H, Tensor mean_square, Tensor alpha, Tensor beta, Tensor(a!) pre, Tensor(b!) post, Tensor(c!) logits, "
    + CONSTANTS,
)
def coefficients_forward(
    H: Tensor,
    mean_square: Tensor,
    alpha: Tensor,
    beta: Tensor,
    pre: Tensor,
    post: Tensor,
    logits: Tensor,
    *constants,
) -> None:
    """pre (M, n), post (M, n) and the logits of res (M, n n) from H (M, N) and mean_square (M,)."""
    tokens, n = pre.shape
    if tokens:
        spec = CoefficientsSpec(n, 0, 0, False, alpha.dtype, beta.dtype, Constants(*constants), False, False)
        _coefficients.get(H.get_device(), spec)(None, H, mean_square, alpha, beta, pre, post, logits, tokens)


def coefficients_backward(
    mode: Mode,
    H: Tensor,
    mean_square: Tensor,
    alpha: Tensor,
    beta: Tensor,
    dpre: Tensor | None,
    dpost: Tensor | None,
    dres: Tensor | None,
    dH: Tensor,
    dmean_square: Tensor,
    *,
    n: int,
    parameters: CoefficientGradients,
    constants: Constants,
    has_sinkhorn: bool,
) -> None:
    """dH, dmean_square and the parameters' gradients, or their sums, from those of pre, post and res (None: zeros).

    ``has_sinkhorn``: res is what Sinkhorn makes of its logits.
    """
    dbeta, dalpha, accumulate_beta, accumulate_alpha, sums = parameters
    if sums is not None:
        dbeta = dalpha = None
    targets = dH, dmean_square, dbeta, dalpha, sums
    options = n, has_sinkhorn, accumulate_beta, accumulate_alpha
    run = mode.of(_coefficients_gradients)
    run(H, mean_square, alpha, beta, dpre, dpost, dres, *targets, *options, *constants)


@operator(
    "mhc_coefficients_backward",
    "Tensor H, Tensor mean_square, Tensor alpha, Tensor beta, Tensor? dpre, Tensor? dpost, Tensor? dres, "
    "Tensor(a!) dH, Tensor(b!) dmean_square, Tensor(c!)? dbeta, Tensor(d!)? dalpha, Tensor(e!)? sums, int n, "
    f"bool has_sinkhorn, bool accumulate_beta, bool accumulate_alpha, {CONSTANTS}",
)
def _coefficients_gradients(
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
    has_sinkhorn: bool,
    accumulate_beta: bool,
    accumulate_alpha: bool,
    *constants,
) -> None:
    tokens, columns = H.shape
    if not tokens:
        zero((dbeta, accumulate_beta), (dalpha, accumulate_alpha))
        return
    leaves_sums = sums is not None
    spec = CoefficientsBackwardSpec(
        n=n,
        h_align=row_alignment(H, columns),
        dpre_align=0 if dpre is None else row_alignment(dpre, n),
        dpost_align=0 if dpost is None else row_alignment(dpost, n),
        dres_align=0 if dres is None else row_alignment(dres, n * n),
        alpha=alpha.dtype,
        beta=beta.dtype,
        dbeta=dtype_of(dbeta),
        dalpha=dtype_of(dalpha),
        accumulate_beta=accumulate_beta and not leaves_sums,
        accumulate_alpha=accumulate_alpha and not leaves_sums,
        constants=Constants(*constants),
        is_head=columns == n,
        has_sinkhorn=has_sinkhorn,
        leaves_sums=leaves_sums,
    )
    if dbeta is not None or dalpha is not None:
        sums = coefficient_sums(H)
    launch = _coefficients_backward.get(H.get_device(), spec)
    launch(H, mean_square, alpha, beta, dpre, dpost, dres, dH, dmean_square, sums, dbeta, dalpha)


def coefficient_sums(H: Tensor, empty: Callable[..., Tensor] = empty) -> Tensor:
    """Room for the partial sums of dbeta and dalpha. ``empty``: of the mode, outside of a launch."""
    return partial_rows(H, 2, COEFFICIENT_TOKENS, H.shape[1], empty)


@operator("mhc_sinkhorn_forward", "Tensor logits, Tensor(a!) res, int iterations, str variant, float eps")
def sinkhorn_forward(logits: Tensor, res: Tensor, iterations: int, variant: str, eps: float) -> None:
    """res (M, n n) from logits (M, n n)."""
    tokens, width = logits.shape
    if tokens:
        spec = SinkhornSpec(math.isqrt(width), variant, iterations, eps, row_alignment(logits, width))
        _sinkhorn.get(logits.get_device(), spec)(logits, res)


@operator(
    "mhc_sinkhorn_backward", "Tensor logits, Tensor dres, Tensor(a!) dlogits, int iterations, str variant, float eps"
)
def sinkhorn_backward(logits: Tensor, dres: Tensor, dlogits: Tensor, iterations: int, variant: str, eps: float) -> None:
    """dlogits (M, n n) from logits and dres."""
    tokens, width = logits.shape
    if tokens:
        aligns = row_alignment(logits, width), row_alignment(dres, width)
        spec = SinkhornBackwardSpec(math.isqrt(width), variant, iterations, eps, *aligns)
        _sinkhorn_backward.get(logits.get_device(), spec)(logits, dres, dlogits)


def reduce_parts(
    partials: Tensor,
    H: Tensor | None,
    mean_square: Tensor | None,
    k: int,
    *,
    n: int,
    is_head: bool,
    parameters: tuple[Tensor | None, Tensor | None] = (None, None),
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    constants: Constants | None = None,
) -> None:
    """H and mean_square, where given, from the parts of K; with constants ``outputs`` pre, post and res, too.

    ``parameters``: alpha and beta.
    """
    (splits, _, tokens), (alpha, beta) = partials.shape, parameters
    has_sinkhorn = constants is not None and not is_head
    dtypes = dtype_of(alpha), dtype_of(beta)
    spec = CoefficientsSpec(n, k, splits, H is not None, *dtypes, constants, is_head, has_sinkhorn)
    launch = _coefficients.get(partials.get_device(), spec)
    launch(partials, H, mean_square, alpha, beta, *outputs, tokens)


def load_coefficients(target: Target, spec: CoefficientsSpec) -> Launch:
    """The kernel of a Spec."""
    from cute_kernels.mhc.kernel import coefficients

    return launches.load(coefficients.coefficients_forward, target.arch, spec)


def _make_coefficients_backward(target: Target, spec: CoefficientsBackwardSpec) -> Launch:
    from cute_kernels.mhc.kernel import coefficients

    return launches.load(coefficients.coefficients_backward, target.arch, spec)


def _make_sinkhorn(target: Target, spec: SinkhornSpec) -> Launch:
    from cute_kernels.mhc.kernel import sinkhorn

    return launches.load(sinkhorn.sinkhorn_forward, target.arch, spec)


def _make_sinkhorn_backward(target: Target, spec: SinkhornBackwardSpec) -> Launch:
    from cute_kernels.mhc.kernel import sinkhorn

    return launches.load(sinkhorn.sinkhorn_backward, target.arch, spec)


_coefficients = LaunchCache(load_coefficients)
_coefficients_backward = LaunchCache(_make_coefficients_backward)
_sinkhorn = LaunchCache(_make_sinkhorn)
_sinkhorn_backward = LaunchCache(_make_sinkhorn_backward)
