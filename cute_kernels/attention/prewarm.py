"""The kernels of attention that an installation needs: bf16 and fp16, every head size, what models combine.

Over a cache those of dense and packed queries, contiguous and in pages of 16, of decode and of chunks of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.attention.config import (
    BACKWARD_CONFIGS,
    HEAD_SIZES,
    AppendSpec,
    BackwardSpec,
    DecodeConfig,
    DecodeSpec,
    DeltaSpec,
    ForwardSpec,
    backward_config,
    configs_for,
    delta_spec,
    finish_dkv_spec,
    finish_dq_spec,
    forward_config,
    prefill_spec,
    takes_steps_of_80,
)
from cute_kernels.runtime.targets import expect_arch

# Masks of all head sizes, dense and packed
MASKS = ({"causal": True}, {"causal": False}, {"causal": False, "window": True})
PACKINGS = ({}, {"packed_q": True, "packed_k": True})
# And, with a causal mask or a window, of the sizes that models have them with
SINKS, SOFTCAP = (64,), (128, 256)
CACHED = ((64, 64), (128, 128))
MANY_QUERIES = 4096  # of a sequence in training


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
    """(builder, arguments) of each kernel."""
    expect_arch(arch)
    if arch == "sm_90a":
        from cute_kernels.attention.kernel_forward_sm90 import forward_sm90 as forward
    else:
        from cute_kernels.attention.kernel_forward_sm100 import forward_sm100 as forward

    for dtype in (torch.bfloat16, torch.float16):
        for spec in forward_specs(dtype):
            for config in configs_for(arch, spec):
                yield forward, (arch, spec, config)
    if arch != "sm_90a":
        return
    from cute_kernels.attention.kernel_append import append
    from cute_kernels.attention.kernel_decode_sm90 import decode_sm90

    for dtype in (torch.bfloat16, torch.float16):
        for d, dv in CACHED:
            for packed in (False, True):
                for rows in (0, 16):
                    spec = DecodeSpec(dtype, d, dv, packed, rows)
                    for few_rows in (False, True):
                        for late in (False, True):
                            yield decode_sm90, (arch, spec, DecodeConfig(few_rows=few_rows, merges_late=late))
                    yield forward, (arch, prefill_spec(spec), forward_config(prefill_spec(spec)))
                    yield append, (arch, AppendSpec(dtype, d, dv, packed, rows > 0))
        yield from _backward(arch, dtype)


def _backward(arch: str, dtype: torch.dtype) -> Iterator[tuple[Any, tuple]]:
    from cute_kernels.attention.kernel_backward_sm90 import backward_sm90
    from cute_kernels.attention.kernel_delta import delta
    from cute_kernels.attention.kernel_finish_gradients import finish_dkv, finish_dq

    deltas: dict[DeltaSpec, None] = {}
    for d, dv in BACKWARD_CONFIGS:
        for packing in PACKINGS:
            of_v = 0 if d == dv else dv
            specs = [
                BackwardSpec(dtype, d, grouped=grouped, head_size_v=of_v, **mask, **packing)
                for mask in MASKS
                for grouped in (False, True)
            ]
            specs += [s._replace(steps_of_80=True) for s in specs if takes_steps_of_80(s, MANY_QUERIES)]
            for spec in specs:
                yield backward_sm90, (arch, spec, backward_config(spec))
                if not spec.grouped:
                    yield finish_dq, (arch, finish_dq_spec(spec), backward_config(spec))
            for found in dict.fromkeys((finish_dkv_spec(s), backward_config(s)) for s in specs if s.grouped):
                yield finish_dkv, (arch, *found)
            deltas |= {delta_spec(s, lse, backward_config(s)): None for s in specs for lse in (False, True)}
    for found in deltas:  # of the head size of v, whatever that of q is
        yield delta, (arch, found)
