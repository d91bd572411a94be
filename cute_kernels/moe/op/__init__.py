"""The experts' functions on torch tensors: the public functions, allocation, autograd."""

from cute_kernels.moe.op.experts import experts
from cute_kernels.moe.op.gate import swiglu
from cute_kernels.moe.op.losses import load_balancing_loss, z_loss
from cute_kernels.moe.op.route import route
from cute_kernels.moe.op.router import router_logits
from cute_kernels.moe.op.rows import combine, permute, plan
from cute_kernels.moe.reference import Plan, Routing

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
