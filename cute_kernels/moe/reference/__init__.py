"""Experts in plain torch: the specification of the kernels, and what runs without a supported GPU.

    route    scores of a token's logits --> its k best experts, ascending --> weights
    plan     slots (token, j), stable by expert --> rows
    permute  xs[r] = x[token of r];        combine  y[t] = sum over its rows, ascending, of weight * row, in fp32
    experts  y = combine(swiglu(xs W_gate_up^T) W_down^T), each product and h rounded to x's dtype

The order of the kernels' sums is not imitated: results agree to rounding, not bit by bit.
"""

from cute_kernels.moe.reference.layer import activated, experts, swiglu
from cute_kernels.moe.reference.losses import load_balancing_loss, z_loss
from cute_kernels.moe.reference.route import Routing, as_int32, route, router_logits
from cute_kernels.moe.reference.rows import Plan, combine, in_segments, permute, plan, rows_of

__all__ = [
    "Plan",
    "Routing",
    "activated",
    "as_int32",
    "combine",
    "experts",
    "in_segments",
    "load_balancing_loss",
    "permute",
    "plan",
    "route",
    "router_logits",
    "rows_of",
    "swiglu",
    "z_loss",
]
