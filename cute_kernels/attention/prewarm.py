"""The kernels of attention that an installation needs: bf16 and fp16, every head size, what models combine.

Over a cache those of dense and packed queries, contiguous and in pages of 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.attention.config import (
    HEAD_SIZES,
    SHORT,
    AppendSpec,
    DecodeConfig,
    DecodeSpec,
    ForwardSpec,
    forward_config,
)
from cute_kernels.runtime.targets import expect_arch

# Masks of all head sizes, dense and packed
MASKS = ({"causal": True}, {"causal": False}, {"causal": False, "window": True})
PACKINGS = ({}, {"packed_q": True, "packed_k": True})
# And, with a causal mask or a window, of the sizes that models have them with
SINKS, SOFTCAP = (64,), (128, 256)
CACHED = ((64, 64), (128, 128))


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
    from cute_kernels.attention.kernel_append import append
    from cute_kernels.attention.kernel_decode_sm90 import decode_sm90
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    for dtype in (torch.bfloat16, torch.float16):
        for spec in forward_specs(dtype):
            for config in dict.fromkeys((forward_config(spec), forward_config(spec, SHORT))):
                yield forward_sm90, (arch, spec, config)
        for d, dv in CACHED:
            for packed in (False, True):
                for rows in (0, 16):
                    yield decode_sm90, (arch, DecodeSpec(dtype, d, dv, packed, rows), DecodeConfig())
                    yield append, (arch, AppendSpec(dtype, d, dv, packed, rows > 0))
