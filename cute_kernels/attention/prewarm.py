"""The kernels of attention that an installation needs: bf16 and fp16, causal and full, every head size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.attention.config import HEAD_SIZES, ForwardSpec, config_for
from cute_kernels.runtime.targets import expect_arch


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel."""
    expect_arch(arch)
    if arch == "sm_90a":
        from cute_kernels.attention.kernel_forward_sm90 import forward_sm90 as forward
    else:
        from cute_kernels.attention.kernel_forward_sm100 import forward_sm100 as forward

    for dtype in (torch.bfloat16, torch.float16):
        for head_size in HEAD_SIZES:
            for causal in (True, False):
                spec = ForwardSpec(dtype, head_size, causal)
                yield forward, (arch, spec, config_for(arch, spec))
