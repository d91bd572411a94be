"""The kernels of attention that an installation needs: bf16 and fp16, causal and full, every head size, gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.attention.config import (
    HEAD_SIZES,
    BackwardSpec,
    DeltaSpec,
    ForwardSpec,
    backward_config,
    forward_config,
)
from cute_kernels.runtime.targets import expect_arch


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel; none for an architecture that has no kernels yet."""
    expect_arch(arch)
    if arch != "sm_90a":
        return
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    for dtype in (torch.bfloat16, torch.float16):
        for head_size in HEAD_SIZES:
            for causal in (True, False):
                spec = ForwardSpec(dtype, head_size, causal)
                yield forward_sm90, (arch, spec, forward_config(spec))
    yield from _backward(arch)


def _backward(arch: str) -> Iterator[tuple[Any, tuple]]:
    from cute_kernels.attention.kernel_backward_sm90 import backward_sm90
    from cute_kernels.attention.kernel_delta import delta
    from cute_kernels.attention.kernel_finish_dq import finish_dq

    for dtype in (torch.bfloat16, torch.float16):
        for head_size in HEAD_SIZES:
            for has_lse_grad in (False, True):
                yield delta, (arch, DeltaSpec(dtype, head_size, has_lse_grad))
            for causal in (True, False):
                for grouped in (False, True):
                    spec = BackwardSpec(dtype, head_size, causal, grouped)
                    yield backward_sm90, (arch, spec, backward_config(spec))
                spec = BackwardSpec(dtype, head_size, causal, False)
                yield finish_dq, (arch, spec, backward_config(spec))
