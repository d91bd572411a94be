"""The kernels of attention that an installation needs: bf16 and fp16, every head size.

The forward causal and full; attention over a cache of dense and packed queries, contiguous and in pages of 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.attention.config import (
    DECODE_CONFIGS,
    HEAD_SIZES,
    AppendSpec,
    DecodeSpec,
    ForwardSpec,
    forward_config,
)
from cute_kernels.runtime.targets import expect_arch


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel; none for an architecture that has no kernels yet."""
    expect_arch(arch)
    if arch != "sm_90a":
        return
    from cute_kernels.attention.kernel_append import append
    from cute_kernels.attention.kernel_decode_sm90 import decode_sm90
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    for dtype in (torch.bfloat16, torch.float16):
        for head_size in HEAD_SIZES:
            for causal in (True, False):
                spec = ForwardSpec(dtype, head_size, causal)
                yield forward_sm90, (arch, spec, forward_config(spec))
            parallel, *_ = DECODE_CONFIGS[head_size]
            for packed in (False, True):
                for rows in (0, 16):
                    yield decode_sm90, (arch, DecodeSpec(dtype, head_size, packed, rows), parallel)
                    yield append, (arch, AppendSpec(dtype, head_size, packed, rows > 0))
