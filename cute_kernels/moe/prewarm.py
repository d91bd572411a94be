"""The kernels of experts that an installation needs: bf16, k experts of E, as models have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.moe.config import CombineSpec, GateSpec, GatherSpec, PlanSpec, RouteSpec
from cute_kernels.runtime.targets import expect_arch

BF16 = torch.bfloat16
MODELS = {(8, 2): "chosen", (128, 8): "chosen", (128, 4): "chosen"}  # (E, k) -> score
ALIGN = 16


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel; products of experts are those of gemm."""
    expect_arch(arch)
    from cute_kernels.moe.kernel.gate import gate, gate_backward
    from cute_kernels.moe.kernel.plan import plan
    from cute_kernels.moe.kernel.route import route, route_backward
    from cute_kernels.moe.kernel.rows import combine, gather

    for (experts, k), score in MODELS.items():
        spec = RouteSpec(experts, k, score)
        yield route, (arch, spec)
        yield route_backward, (arch, spec)
    for experts in dict.fromkeys(experts for experts, _ in MODELS):
        yield plan, (arch, PlanSpec(experts, ALIGN))
    for k in dict.fromkeys(k for _, k in MODELS):
        yield gather, (arch, GatherSpec(BF16, k))
        for weighted in (True, False):
            yield combine, (arch, CombineSpec(BF16, k, weighted))
    yield gate, (arch, GateSpec(BF16))
    yield gate_backward, (arch, GateSpec(BF16, weighted=True))
