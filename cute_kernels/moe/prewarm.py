"""The kernels of experts that an installation needs: bf16, k experts of E, as models have them.

That is Mixtral, Qwen3, gpt-oss, with its gate and biases, and DeepSeek-V3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.moe.config import OAI, CombineSpec, GateSpec, GatherSpec, PlanSpec, RouteSpec
from cute_kernels.runtime.targets import expect_arch

BF16 = torch.bfloat16
ROUTERS = (
    RouteSpec(8, 2, "chosen"),
    RouteSpec(128, 8, "chosen"),
    RouteSpec(32, 4, "chosen"),
    RouteSpec(128, 4, "chosen"),
    RouteSpec(256, 8, "sigmoid", has_bias=True, groups=8, kept_groups=4, normalize=True),
)
BIASED_K = 4  # gpt-oss'
ALIGNS = 1, 16  # without and with gradients


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel; products of experts are those of gemm."""
    expect_arch(arch)
    from cute_kernels.moe.kernel.gate import gate, gate_backward
    from cute_kernels.moe.kernel.plan import plan
    from cute_kernels.moe.kernel.route import route, route_backward
    from cute_kernels.moe.kernel.rows import combine, gather

    for spec in ROUTERS:
        yield route, (arch, spec)
        yield route_backward, (arch, RouteSpec(spec.num_experts, spec.k, spec.score, normalize=spec.normalize))
    for experts in dict.fromkeys(spec.num_experts for spec in ROUTERS):
        for align, has_table in itertools.product(ALIGNS, (False, True)):
            yield plan, (arch, PlanSpec(experts, align, has_table))
    for k in dict.fromkeys(spec.k for spec in ROUTERS):
        yield gather, (arch, GatherSpec(BF16, k))
        for weighted in (True, False):
            yield combine, (arch, CombineSpec(BF16, k, weighted))
    yield gate, (arch, GateSpec(BF16))
    yield gate_backward, (arch, GateSpec(BF16, weighted=True))
    yield gather, (arch, GatherSpec(BF16, BIASED_K, weighted=True))
    yield combine, (arch, CombineSpec(BF16, BIASED_K, weighted=True, biased=True))
    yield gate, (arch, GateSpec(BF16, True, *OAI, biased=True))
    yield gate_backward, (arch, GateSpec(BF16, True, *OAI, weighted=True, biased=True))
