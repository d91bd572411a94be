"""The coefficients and Sinkhorn's iterations: Specs, and the threads of a CTA."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from cute_kernels.mhc.variants import Constants

COEFFICIENT_TOKENS = 32  # whose gradients of alpha and beta are added first


class CoefficientsSpec(NamedTuple):
    """pre, post and res of H and mean_square, or of ``splits`` parts of K that are added up first.

    Args:
        n: number of streams.
        k: of the parts, n C; without parts 0.
        splits: number of parts; 0: H and mean_square are given.
        keeps_h: with parts: H and mean_square are written.
        alpha, beta: dtypes.
        constants: None: H and mean_square are all that is wanted.
        is_head: pre alone.
        has_sinkhorn: res is what Sinkhorn makes of its logits.
    """

    n: int
    k: int
    splits: int
    keeps_h: bool
    alpha: torch.dtype | None
    beta: torch.dtype | None
    constants: Constants | None
    is_head: bool
    has_sinkhorn: bool

    @property
    def columns(self) -> int:
        """N."""
        return self.n if self.is_head else self.n * self.n + 2 * self.n


class CoefficientsBackwardSpec(NamedTuple):
    """The gradients of ``CoefficientsSpec`` without parts.

    Args:
        h_align: elements on which rows of H start.
        dpre_align, dpost_align, dres_align: as well; 0: there is no such gradient.
        alpha, beta, dbeta, dalpha: dtypes.
        leaves_sums: the partial sums of dbeta and dalpha are an output, for ``phi_gradient`` to add up.
    """

    n: int
    h_align: int
    dpre_align: int
    dpost_align: int
    dres_align: int
    alpha: torch.dtype
    beta: torch.dtype
    dbeta: torch.dtype | None
    dalpha: torch.dtype | None
    accumulate_beta: bool
    accumulate_alpha: bool
    constants: Constants
    is_head: bool
    has_sinkhorn: bool
    leaves_sums: bool

    @property
    def columns(self) -> int:
        """N."""
        return self.n if self.is_head else self.n * self.n + 2 * self.n


class SinkhornSpec(NamedTuple):
    """``align``: elements on which matrices of logits start."""

    n: int
    variant: str
    iterations: int
    eps: float
    align: int


class SinkhornBackwardSpec(NamedTuple):
    """As ``SinkhornSpec``; ``dres_align``: of the incoming gradient."""

    n: int
    variant: str
    iterations: int
    eps: float
    align: int
    dres_align: int


def coefficient_threads(splits: int) -> int:
    """Threads of a CTA for 32 tokens: more parts of K to add take more threads that load; ``splits`` 0: H is there.

    H200, 128 -> 512: of 8 parts projection.2048x4x5120 42.0 -> 36.9 us, of H coefficients_sinkhorn.8192 10.5 -> 8.4,
    but of one part layer.65536x4x768 459 -> 466, of two layer.16384x4x1280 200 -> 202.
    """
    return 128 * min(4, splits or 4)
