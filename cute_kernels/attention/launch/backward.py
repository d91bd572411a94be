"""The backward of attention.

The operator is ``cute_kernels::attention_backward``, which returns its results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.attention import reference_backward
from cute_kernels.attention.config import (
    PADDED_ROWS,
    BackwardConfig,
    BackwardSpec,
    DeltaSpec,
    backward_config,
    backward_heads_together,
    grid_for,
)
from cute_kernels.attention.launch.forward import LOG2E, regular
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import empties, functional_operator
from cute_kernels.runtime.targets import Target, UnsupportedDeviceError


def _outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = empties(q, (q.shape, q.dtype), (k.shape, k.dtype), (v.shape, v.dtype))
    return dq, dk, dv


@functional_operator(
    "attention_backward",
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, bool causal, float scale",
    "(Tensor, Tensor, Tensor)",
    fake=lambda dout, q, k, v, out, lse, dlse, causal, scale: _outputs(q, k, v),
    cpu=reference_backward.attention_backward,
)
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of dense batches, contiguous; ``out`` and ``lse`` are the forward's, ``dlse`` is contiguous."""
    gradients = _outputs(q, k, v)
    if q.numel() and k.numel():
        spec = BackwardSpec(q.dtype, q.shape[3], causal, q.shape[2] != k.shape[2])
        launch = _backward.get(q.get_device(), spec)
        launch.run(dout, q, k, v, out, lse, dlse, gradients, scale)
    else:
        for gradient in gradients:
            gradient.zero_()
    return gradients


class BackwardLaunch(NamedTuple):
    """The kernels of a backward, and on how many SMs the second one hands out its blocks.

    Attributes:
        delta: what is known of each row; without and with a gradient of lse.
        backward: dk, dv and the sums of dq.
        finish_dq: dq of these.
    """

    delta: tuple[Callable[..., None], Callable[..., None]]
    backward: Callable[..., None]
    finish_dq: Callable[..., None]
    config: BackwardConfig
    num_sms: int

    @staticmethod
    def of(target: Target, spec: BackwardSpec, config: BackwardConfig) -> BackwardLaunch:
        """Raises:
        UnsupportedDeviceError: a GPU other than a Hopper.
        """
        if target.arch != "sm_90a":
            raise UnsupportedDeviceError(
                f"attention: has a backward for compute capability 9.0 alone, got {target.arch}. "
                "Pass backend='reference' to run plain torch"
            )
        from cute_kernels.attention import kernel_backward_sm90, kernel_delta, kernel_finish_dq

        arch, (dtype, d, causal, _) = target.arch, spec
        return BackwardLaunch(
            tuple(launches.load(kernel_delta.delta, arch, DeltaSpec(dtype, d, has)) for has in (False, True)),
            launches.load(kernel_backward_sm90.backward_sm90, arch, spec, config),
            launches.load(kernel_finish_dq.finish_dq, arch, BackwardSpec(dtype, d, causal, False), config),
            config,
            target.num_sms,
        )

    def run(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        gradients: tuple[Tensor, Tensor, Tensor],
        scale: float,
    ) -> None:
        """Write dq, dk and dv."""
        batch, len_q, heads, d = q.shape
        len_k, pairs = k.shape[1], k.shape[2]
        rows, block = self.config.tile_rows, grid_for(d).block
        padded = -(-len_q // PADDED_ROWS) * PADDED_ROWS
        tiles, blocks = -(-len_q // rows) * batch * heads, -(-len_k // block) * batch * pairs
        summed = blocks if heads != pairs else 0
        lines, f32 = (batch, heads, padded), torch.float32
        delta, row_lse, dq_sums, dkv_sums, counters = empties(
            q,
            (lines, f32),
            (lines, f32),
            ((tiles * rows * d,), f32),
            ((summed * 2 * block * d,), f32),
            ((1 + tiles + summed,), torch.int32),
        )
        q, k, v, out, dout = (regular(t) for t in (q, k, v, out, dout))
        dq, dk, dv = (regular(t) for t in gradients)
        together = backward_heads_together(d, q.itemsize, len_q, heads // pairs)
        num_ctas = min(blocks * (heads // pairs), self.num_sms)
        self.delta[dlse is not None](out, dout, lse, dlse, delta, row_lse, counters)
        self.backward(
            q, k, v, dout, row_lse, delta, dk, dv, dq_sums, dkv_sums, counters, scale * LOG2E, scale,
            min(together, batch * heads), num_ctas,
        )  # fmt: skip
        self.finish_dq(dq_sums, dq, scale, len_k)


def _make_backward(target: Target, spec: BackwardSpec) -> BackwardLaunch:
    return BackwardLaunch.of(target, spec, backward_config(spec))


_backward = LaunchCache(_make_backward)
