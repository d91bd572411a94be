"""Manifold-constrained hyper-connections: n residual streams that every sublayer reads from, mixes and adds to.

``hyper_connection`` is a sublayer with all of it; ``pre`` and ``expand_combine`` are what comes before and after the
sublayer; ``projection``, ``coefficients``, ``sinkhorn`` and ``aggregate`` are ``pre``, step by step. ``expand`` begins
a model, ``contract`` or ``head`` ends it. ``VARIANTS`` are the conventions of the systems in use.

Source: Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv 2512.24880.
"""

from cute_kernels.mhc.op import (
    aggregate,
    coefficients,
    contract,
    expand,
    expand_combine,
    head,
    hyper_connection,
    pre,
    projection,
    sinkhorn,
)
from cute_kernels.mhc.reference import dropout_mask
from cute_kernels.mhc.variants import VARIANTS, Variant

__all__ = [
    "VARIANTS",
    "Variant",
    "aggregate",
    "coefficients",
    "contract",
    "dropout_mask",
    "expand",
    "expand_combine",
    "head",
    "hyper_connection",
    "pre",
    "projection",
    "sinkhorn",
]
