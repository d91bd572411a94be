"""The coefficients of a token, and Sinkhorn's iterations."""

from __future__ import annotations

import math

from torch import Tensor

from cute_kernels.mhc.launch import plans
from cute_kernels.mhc.launch.plans import (
    VARIANT,
    Launch,
    cutlass_dtypes,
    dtypes_of,
    registered,
    row_alignment,
    rows_key,
    rows_of_sums,
    shared_variant,
    zero,
)

COEFFICIENT_TOKENS = 32  # whose gradients of alpha and beta are added first


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
    function = coefficients_kernel(H.get_device(), pre.shape[1], 0, 0, False, alpha, beta, variant, False, False)
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
        zero((dbeta, accumulate_beta), (dalpha, accumulate_alpha))
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
        rows_key(H, dpre, dpost, dres),
        dtypes_of(alpha, beta, dbeta, dalpha),
        sums is None,
    )
    function = plans.known.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.coefficients import coefficients_backward

        given = (dpre, dpost, dres)
        function = plans.known[key] = coefficients_backward(
            plans.arch_of(H.get_device()),
            n,
            cutlass_dtypes(alpha, beta),
            cutlass_dtypes(dbeta, dalpha),
            accumulate,
            tuple(t is not None for t in given),
            tuple(row_alignment(t) for t in (H, *given)),
            shared_variant(variant),
            columns == n,
            normalises,
            sums is not None,
        )
    if dbeta is not None or dalpha is not None:
        sums = coefficient_sums(H)
    function(H, mean_square, alpha, beta, dpre, dpost, dres, dH, dmean_square, sums, dbeta, dalpha)


def coefficient_sums(H: Tensor) -> Tensor:
    """Room for the partial sums of dbeta and dalpha."""
    return rows_of_sums(H, 2, COEFFICIENT_TOKENS, H.shape[1])


@registered("Tensor logits, Tensor(a!) res, int iterations, str variant, float eps")
def sinkhorn_forward(logits: Tensor, res: Tensor, iterations: int, variant: str, eps: float) -> None:
    """res (M, n n) from logits (M, n n)."""
    if not logits.shape[0]:
        return
    key = ("sinkhorn_forward", iterations, variant, eps, logits.get_device(), rows_key(logits))
    function = plans.known.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.sinkhorn import sinkhorn_forward

        arch, n = plans.arch_of(logits.get_device()), math.isqrt(logits.shape[1])
        function = plans.known[key] = sinkhorn_forward(arch, n, variant, iterations, eps, row_alignment(logits))
    function(logits, res)


@registered("Tensor logits, Tensor dres, Tensor(a!) dlogits, int iterations, str variant, float eps")
def sinkhorn_backward(logits: Tensor, dres: Tensor, dlogits: Tensor, iterations: int, variant: str, eps: float) -> None:
    """dlogits (M, n n) from logits and dres."""
    if not logits.shape[0]:
        return
    key = ("sinkhorn_backward", iterations, variant, eps, logits.get_device(), rows_key(logits, dres))
    function = plans.known.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.sinkhorn import sinkhorn_backward

        arch, n = plans.arch_of(logits.get_device()), math.isqrt(logits.shape[1])
        aligns = (row_alignment(logits), row_alignment(dres))
        function = plans.known[key] = sinkhorn_backward(arch, n, variant, iterations, eps, aligns)
    function(logits, dres, dlogits)


def add_parts(
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
    function = coefficients_kernel(pre.get_device(), n, k, splits, keeps, alpha, beta, variant, head, not head)
    function(partials, H, mean_square, alpha, beta, pre, post, res, pre.shape[0])


def coefficients_kernel(
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
    key = ("coefficients", index, n, k, splits, keeps, dtypes_of(alpha, beta), variant, head, normalises)
    function = plans.known.get(key)
    if function is None:
        from cute_kernels.mhc.kernel.coefficients import coefficients_forward

        arch = plans.arch_of(index)
        dtypes, fields = (None, None) if variant is None else (cutlass_dtypes(alpha, beta), shared_variant(variant))
        function = plans.known[key] = coefficients_forward(arch, n, k, splits, keeps, dtypes, fields, head, normalises)
    return function
