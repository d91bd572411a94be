"""The kernels of attention that an installation needs: bf16 and fp16, every head size, what models combine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.attention.config import (
    BACKWARD_CONFIGS,
    HEAD_SIZES,
    BackwardSpec,
    DeltaSpec,
    ForwardSpec,
    backward_config,
    finish_dkv_spec,
    finish_dq_spec,
    forward_config,
)
from cute_kernels.runtime.targets import expect_arch

# Masks of all head sizes, dense and packed
MASKS = ({"causal": True}, {"causal": False}, {"causal": False, "window": True})
PACKINGS = ({}, {"packed_q": True, "packed_k": True})
# And, with a causal mask or a window, of the sizes that models have them with
SINKS, SOFTCAP = (64,), (128, 256)


def forward_specs(dtype: torch.dtype) -> Iterator[ForwardSpec]:
    """Those of one dtype."""
    for d, dv in HEAD_SIZES:
        for packing in PACKINGS:
            for mask in MASKS:
                yield ForwardSpec(dtype, d, head_size_v=dv, **mask, **packing)
            for mask in (MASKS[0], MASKS[2]):
                if d in SINKS:
                    yield ForwardSpec(dtype, d, head_size_v=dv, sinks=True, **mask, **packing)
                if d in SOFTCAP:
                    yield ForwardSpec(dtype, d, head_size_v=dv, softcap=True, **mask, **packing)


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel; none for an architecture that has no kernels yet."""
    expect_arch(arch)
    if arch != "sm_90a":
        return
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    for dtype in (torch.bfloat16, torch.float16):
        for spec in forward_specs(dtype):
            yield forward_sm90, (arch, spec, forward_config(spec))
        yield from _backward(arch, dtype)


def _backward(arch: str, dtype: torch.dtype) -> Iterator[tuple[Any, tuple]]:
    from cute_kernels.attention.kernel_backward_sm90 import backward_sm90
    from cute_kernels.attention.kernel_delta import delta
    from cute_kernels.attention.kernel_finish_gradients import finish_dkv, finish_dq

    for d in BACKWARD_CONFIGS:
        for packing in PACKINGS:
            for has_lse_grad in (False, True):
                yield delta, (arch, DeltaSpec(dtype, d, has_lse_grad, bool(packing)))
            for mask in MASKS:
                for grouped in (False, True):
                    spec = BackwardSpec(dtype, d, grouped=grouped, **mask, **packing)
                    yield backward_sm90, (arch, spec, backward_config(spec))
                yield finish_dq, (arch, finish_dq_spec(spec), backward_config(spec))
            yield finish_dkv, (arch, finish_dkv_spec(spec), backward_config(spec))
