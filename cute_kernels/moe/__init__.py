"""Experts: routing, plans of rows, ways there and back, the gate, the layer; deterministic, batch-invariant."""

from cute_kernels.moe.expert_parallel import ExpertParallel
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
from cute_kernels.moe.transformers import register_with_transformers

__all__ = [
    "ExpertParallel",
    "Plan",
    "Routing",
    "combine",
    "experts",
    "load_balancing_loss",
    "permute",
    "plan",
    "register_with_transformers",
    "route",
    "router_logits",
    "swiglu",
    "z_loss",
]
