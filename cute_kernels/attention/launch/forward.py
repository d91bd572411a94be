"""The forward of attention.

The operator is ``cute_kernels::attention_forward``, which returns its results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.attention import reference
from cute_kernels.attention.config import (
    LOG2E,
    ForwardConfig,
    ForwardSm100Config,
    ForwardSpec,
    config_for,
    grid_for,
    heads_together,
    workspace_numbers,
)
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import empties, functional_operator
from cute_kernels.runtime.targets import Target


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    batch, len_q, heads, _ = q.shape
    out, lse = empties(q, (q.shape, q.dtype), ((batch, heads, len_q), torch.float32))
    return out, lse


def _reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return reference.attention(q, k, v, causal=causal, scale=scale, return_lse=True)


@functional_operator(
    "attention_forward",
    "Tensor q, Tensor k, Tensor v, bool causal, float scale",
    "(Tensor, Tensor)",
    fake=lambda q, k, v, causal, scale: _outputs(q),
    cpu=_reference,
)
def attention_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of dense batches; out is contiguous."""
    out, lse = _outputs(q)
    if out.numel():
        if k.shape[1]:
            launch = _forward.get(q.get_device(), ForwardSpec(q.dtype, q.shape[3], causal))
            launch.run(q, k, v, out, lse, scale)
        else:
            out.zero_()
            lse.fill_(-math.inf)
    return out, lse


class ForwardLaunch(NamedTuple):
    """A kernel, and on how many SMs it walks over its tiles."""

    function: Callable[..., None]
    config: ForwardConfig | ForwardSm100Config
    num_sms: int
    workspace: bool  # of rows of several splits

    @staticmethod
    def of(target: Target, spec: ForwardSpec, config: ForwardConfig | ForwardSm100Config) -> ForwardLaunch:
        if isinstance(config, ForwardSm100Config):
            from cute_kernels.attention import kernel_forward_sm100

            function = launches.load(kernel_forward_sm100.forward_sm100, target.arch, spec, config)
        else:
            from cute_kernels.attention import kernel_forward_sm90

            function = launches.load(kernel_forward_sm90.forward_sm90, target.arch, spec, config)
        return ForwardLaunch(function, config, target.num_sms, isinstance(config, ForwardSm100Config))

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
        """Write out and lse."""
        batch, len_q, heads, d = q.shape
        len_k, pairs = k.shape[1], k.shape[2]
        tiles = -(-len_q // self.config.tile_rows) * batch * heads
        together = min(heads_together(d, q.itemsize, len_k, heads // pairs), batch * heads)
        num_ctas = min(tiles, self.num_sms)
        if batch == 1 or heads == 1 or len_q == 1 or len_k == 1 or pairs == 1:
            q, k, v = regular(q), regular(k), regular(v)
        results = out, lse
        if self.workspace:
            splits = len_k > grid_for(d).split
            merged = lse.new_empty((num_ctas if splits else 1, workspace_numbers(d)))
            results = out, lse, merged
        self.function(q, k, v, *results, scale * LOG2E, together, num_ctas)


def regular(t: Tensor) -> Tensor:
    """``t``, whose strides of dimensions of size 1 may be anything, with such as TMA's descriptor takes."""
    if all(stride % 8 == 0 for stride in t.stride()[:3]):
        return t
    strides = [stride if size > 1 else t.shape[3] for size, stride in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(t.shape, (*strides[:3], 1))


def _make_forward(target: Target, spec: ForwardSpec) -> ForwardLaunch:
    return ForwardLaunch.of(target, spec, config_for(target.arch, spec))


_forward = LaunchCache(_make_forward)
