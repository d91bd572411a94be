"""Experts: routing, plans of rows, ways there and back, the gate, the layer; deterministic, batch-invariant."""

from cute_kernels.moe.op import Plan, Routing, combine, experts, permute, plan, route, swiglu

__all__ = ["Plan", "Routing", "combine", "experts", "permute", "plan", "route", "swiglu"]
