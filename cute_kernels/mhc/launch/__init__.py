"""Launches of the hyper-connections: a Spec of the call's tensors, what launches it, the launch.

All take matrices, a row a token, and write to those that they are given; another number of tokens finds the same
kernel. Each launch is also registered as the operator ``cute_kernels::mhc_<name>``, which runs in its place where
graphs are traced. No tokens: nothing is launched, and sums over the tokens are zeros.

Every kernel is a programmatic dependent launch: it starts while the one before it ends, and waits for its results
before it touches memory (the sum of coefficients beside phi_gradient, which waits for nothing that this one writes,
before its own end). Three of a hyper-connection's backward let the next one start earlier than at their own end:
coefficients (a few warps), projection (each CTA with its last tile), phi_gradient. Elsewhere kernels that only wait
stood in the way (bench/experiments/mhc.md).
"""

from cute_kernels.mhc.launch.coefficients import (
    CoefficientGradients,
    coefficient_sums,
    coefficients_backward,
    coefficients_forward,
    sinkhorn_backward,
    sinkhorn_forward,
)
from cute_kernels.mhc.launch.projection import pre_forward, projection_forward
from cute_kernels.mhc.launch.projection_backward import (
    LayerGradient,
    PhiGradients,
    ResidualGradient,
    projection_backward,
)
from cute_kernels.mhc.launch.streams import (
    aggregate_backward,
    aggregate_forward,
    bias_gradient,
    expand_combine_backward,
    expand_combine_forward,
    expand_streams,
)

__all__ = [
    "CoefficientGradients",
    "LayerGradient",
    "PhiGradients",
    "ResidualGradient",
    "aggregate_backward",
    "aggregate_forward",
    "bias_gradient",
    "coefficient_sums",
    "coefficients_backward",
    "coefficients_forward",
    "expand_combine_backward",
    "expand_combine_forward",
    "expand_streams",
    "pre_forward",
    "projection_backward",
    "projection_forward",
    "sinkhorn_backward",
    "sinkhorn_forward",
]
