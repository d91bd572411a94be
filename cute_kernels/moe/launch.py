"""Launches of routing, plans, ways there and back, and the gate: a Spec of the call's tensors, the launch.

Each launch is also an operator, ``cute_kernels::<name>``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from cute_kernels.moe.config import (
    CombineSpec,
    GateSpec,
    GatherSpec,
    PlanSpec,
    RouteSpec,
    plan_blocks,
)
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import operator
from cute_kernels.runtime.targets import Target


def _cache(module: str, builder: str) -> LaunchCache:
    def make(target: Target, spec: Any) -> Callable[..., None]:
        import importlib

        found = getattr(importlib.import_module(f"cute_kernels.moe.kernel.{module}"), builder)
        return launches.load(found, target.arch, spec)

    return LaunchCache(make)


_route, _route_backward = _cache("route", "route"), _cache("route", "route_backward")
_plan = _cache("plan", "plan")
_gather, _combine = _cache("rows", "gather"), _cache("rows", "combine")
_gate, _gate_backward = _cache("gate", "gate"), _cache("gate", "gate_backward")


@operator(
    "moe_route",
    "Tensor logits, Tensor? bias, Tensor? given, Tensor(a!) indices, Tensor(b!) weights, str score, int groups, "
    "int kept_groups, bool normalize, float eps, float scale",
)
def moe_route(
    logits: Tensor,
    bias: Tensor | None,
    given: Tensor | None,
    indices: Tensor,
    weights: Tensor,
    score: str,
    groups: int,
    kept_groups: int,
    normalize: bool,
    eps: float,
    scale: float,
) -> None:
    """Fill indices (T, k) int32 and weights (T, k) fp32 of logits (T, E); ``given``: indices that are taken."""
    tokens, num_experts = logits.shape
    if tokens:
        k = indices.shape[1]
        spec = RouteSpec(num_experts, k, score, bias is not None, groups, kept_groups, normalize, given is not None)
        launch = _route.get(logits.get_device(), spec)
        launch(logits, bias, given, indices, weights, eps, scale)


@operator(
    "moe_route_backward",
    "Tensor dweights, Tensor logits, Tensor indices, Tensor(a!) dlogits, str score, bool normalize, float eps, "
    "float scale",
)
def moe_route_backward(
    dweights: Tensor,
    logits: Tensor,
    indices: Tensor,
    dlogits: Tensor,
    score: str,
    normalize: bool,
    eps: float,
    scale: float,
) -> None:
    """Fill dlogits (T, E)."""
    tokens, num_experts = logits.shape
    if tokens:
        spec = RouteSpec(num_experts, indices.shape[1], score, normalize=normalize)
        launch = _route_backward.get(logits.get_device(), spec)
        launch(dweights, logits, indices, dlogits, eps, scale)


@operator(
    "moe_plan",
    "Tensor indices, Tensor(a!)? table, Tensor(b!) offs, Tensor(c!) slots, Tensor(d!) positions, Tensor(e!) counts, "
    "int align",
)
def moe_plan(
    indices: Tensor,
    table: Tensor | None,
    offs: Tensor,
    slots: Tensor,
    positions: Tensor,
    counts: Tensor,
    align: int,
) -> None:
    """Fill what ``Plan`` holds, of indices (T, k) int32; table: a workspace of ``config.plan_blocks``, of several."""
    indices = indices.view(-1)
    launch = _plan.get(indices.get_device(), PlanSpec(offs.shape[0], align, table is not None))
    of_warp = plan_blocks(indices.shape[0])[1]
    launch(indices, table, offs, slots, positions.view(-1), counts, of_warp)


@operator(
    "moe_gather",
    "Tensor x, Tensor slots, Tensor positions, Tensor? weights, Tensor? other, Tensor(a!) out, Tensor(b!)? dots",
)
def moe_gather(
    x: Tensor,
    slots: Tensor,
    positions: Tensor,
    weights: Tensor | None,
    other: Tensor | None,
    out: Tensor,
    dots: Tensor | None,
) -> None:
    """out (R, H): rows of x (T, H) at positions (T, k), times weights (T, k), zeros where slots (R,) have none.

    dots (T, k): of x's rows and other's (R, H).
    """
    if slots.shape[0] and x.shape[1]:
        spec = GatherSpec(x.dtype, positions.shape[1], weights is not None, dots is not None)
        launch = _gather.get(x.get_device(), spec)
        launch(x, slots, positions, weights, other, out, dots)


@operator(
    "moe_combine",
    "Tensor rows, Tensor positions, Tensor? weights, Tensor? experts, Tensor? bias, Tensor(a!) y",
)
def moe_combine(
    rows: Tensor,
    positions: Tensor,
    weights: Tensor | None,
    experts: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
) -> None:
    """y (T, H): sums of rows (R, H) by positions (T, k), times weights (T, k); bias (E, H) of experts (T, k)."""
    tokens, k = positions.shape
    if tokens and rows.shape[1]:
        launch = _combine.get(rows.get_device(), CombineSpec(rows.dtype, k, weights is not None, bias is not None))
        launch(rows, positions, weights, experts, bias, y)


@operator(
    "moe_gate",
    "Tensor z, Tensor? slots, Tensor? experts, Tensor? bias, Tensor(a!) h, str function, bool interleaved, "
    "float? limit, float? alpha",
)
def moe_gate(
    z: Tensor,
    slots: Tensor | None,
    experts: Tensor | None,
    bias: Tensor | None,
    h: Tensor,
    function: str,
    interleaved: bool,
    limit: float | None,
    alpha: float | None,
) -> None:
    """h (R, I) of z (R, 2 I); with bias (E, 2 I) of the experts (T, k) of slots (R,)."""
    if h.numel():
        spec = GateSpec(z.dtype, interleaved, limit, alpha, function=function, biased=bias is not None)
        launch = _gate.get(z.get_device(), spec)
        experts = None if experts is None else experts.view(-1)
        launch(z, slots, experts, bias, h)


@operator(
    "moe_gate_backward",
    "Tensor dh, Tensor z, Tensor? slots, Tensor? weights, Tensor? experts, Tensor? bias, Tensor(a!) dz, Tensor(b!)? h, "
    "Tensor(c!)? dweights, str function, bool interleaved, float? limit, float? alpha",
)
def moe_gate_backward(
    dh: Tensor,
    z: Tensor,
    slots: Tensor | None,
    weights: Tensor | None,
    experts: Tensor | None,
    bias: Tensor | None,
    dz: Tensor,
    h: Tensor | None,
    dweights: Tensor | None,
    function: str,
    interleaved: bool,
    limit: float | None,
    alpha: float | None,
) -> None:
    """dz (R, 2 I); with weights (T, k) of slots (R,) also the weighted h (R, I), and dweights (T, k)."""
    if dh.numel():
        spec = GateSpec(z.dtype, interleaved, limit, alpha, weights is not None, function, bias is not None)
        launch = _gate_backward.get(z.get_device(), spec)
        weights, experts, dweights = (None if t is None else t.view(-1) for t in (weights, experts, dweights))
        launch(dh, z, slots, weights, experts, bias, dz, h, dweights)
