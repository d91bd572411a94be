"""Experts: routing, plans of rows, ways there and back, the gate, the layer; deterministic, batch-invariant."""

from cute_kernels.moe.op import (
    Plan,
    Routing,
    combine,
    experts,
    load_balancing_loss,
    permute,
    plan,
    route,
    router_logits,
    swiglu,
    z_loss,
)

__all__ = [
    "Plan",
    "Routing",
    "combine",
    "experts",
    "load_balancing_loss",
    "permute",
    "plan",
    "route",
    "router_logits",
    "swiglu",
    "z_loss",
]
