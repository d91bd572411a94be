"""The backward of attention.

The operator is ``cute_kernels::attention_backward``, which returns its results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_kernels import reduction
from cute_kernels.attention import reference_backward
from cute_kernels.attention.config import (
    LOG2E,
    UNBOUNDED,
    BackwardConfig,
    BackwardSpec,
    backward_block,
    backward_config,
    backward_heads_together,
    backward_sizes,
    delta_spec,
    finish_dkv_spec,
    finish_dq_spec,
    lacks_a_box,
    score_factors,
    takes_steps_of_80,
    window_bounds,
)
from cute_kernels.attention.launch.forward import regular
from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import empties, functional_operator
from cute_kernels.runtime.targets import Target, UnsupportedDeviceError

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def gradients_of(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Gradients:
    """(dq, dk, dv, dsinks) of plain tensors."""
    of_sinks = (0 if sinks is None else sinks.shape[0],), torch.float32
    dq, dk, dv, dsinks = empties(q, *((t.shape, t.dtype) for t in (q, k, v)), of_sinks)
    return dq, dk, dv, dsinks


def _fake(dout, q, k, v, out, lse, dlse, causal, scale, left=-1, right=-1, softcap=0.0, sinks=None, *_, **__):
    of_sinks = q.new_empty(0 if sinks is None else sinks.shape[0], dtype=torch.float32)
    return *(t.new_empty(t.shape) for t in (q, k, v)), of_sinks


@functional_operator(
    "attention_backward",
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, bool causal, float scale, "
    "int left=-1, int right=-1, float softcap=0., Tensor? sinks=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? seqused_k=None",
    "(Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
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
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
) -> Gradients:
    """(dq, dk, dv, dsinks), contiguous, arguments as of ``attention_forward``; ``out`` and ``lse`` are its results.

    ``dlse`` is contiguous. dsinks is fp32, without sinks of no elements. Tensors of packed sequences, or with used
    keys, whose head size lacks a whole box of the kernel's (``lacks_a_box``) are copied with the channels filled.
    """
    gradients = gradients_of(q, k, v, sinks)
    if not q.numel() or (not k.numel() and sinks is None) or (cu_seqlens_q is not None and len(cu_seqlens_q) == 1):
        for gradient in gradients:
            gradient.zero_()
        return gradients
    left, right = window_bounds(causal, (left, right))
    window = left != UNBOUNDED or right not in (0, UNBOUNDED)
    d, dv = sizes = backward_sizes(q.shape[-1], v.shape[-1])
    sequences = cu_seqlens_q, cu_seqlens_k, seqused_k
    wanted = gradients
    if any(t is not None for t in sequences) and any(map(lacks_a_box, (q.shape[-1], v.shape[-1]), sizes)):
        # The base of a ragged tensor is no address in memory, and a box without channels reads there (H200)
        q, k = (F.pad(t, (0, d - t.shape[-1])) for t in (q, k))
        v, out, dout = (F.pad(t, (0, dv - t.shape[-1])) for t in (v, out, dout))
        gradients = gradients_of(q, k, v, sinks)
    spec = BackwardSpec(
        q.dtype,
        d,
        right == 0 and not window,
        q.shape[-2] != k.shape[-2],
        window,
        softcap != 0.0,
        cu_seqlens_q is not None,
        cu_seqlens_k is not None,
        seqused_k is not None,
        (q.shape[-1], v.shape[-1]) != sizes,
        0 if d == dv else dv,
    )
    if takes_steps_of_80(spec, q.shape[-3]):
        spec = spec._replace(steps_of_80=True)
    launch = _backward.get(q.get_device(), spec)
    launch.run(dout, q, k, v, out, lse, dlse, gradients, scale, left, right, softcap, sinks, *sequences)
    if gradients is not wanted:
        for narrow, t in zip(wanted, gradients, strict=True):
            narrow.copy_(t[..., : narrow.shape[-1]])
    return wanted


class BackwardLaunch(NamedTuple):
    """The kernels of a backward, and on how many SMs the second one hands out its blocks.

    Attributes:
        delta: what is known of each row; without and with a gradient of lse.
        backward: dk, dv and the sums of dq.
        finish_dq: dq of these.
        finish_dkv: dk and dv of the sums of groups.
    """

    delta: tuple[Callable[..., None], Callable[..., None]]
    backward: Callable[..., None]
    finish_dq: Callable[..., None]
    finish_dkv: Callable[..., None] | None
    spec: BackwardSpec
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
        from cute_kernels.attention import kernel_backward_sm90, kernel_delta, kernel_finish_gradients

        arch, finish_dkv = target.arch, kernel_finish_gradients.finish_dkv
        of_delta = (delta_spec(spec, has_lse_grad, config) for has_lse_grad in (False, True))
        return BackwardLaunch(
            tuple(launches.load(kernel_delta.delta, arch, found) for found in of_delta),
            launches.load(kernel_backward_sm90.backward_sm90, arch, spec, config),
            launches.load(kernel_finish_gradients.finish_dq, arch, finish_dq_spec(spec), config),
            launches.load(finish_dkv, arch, finish_dkv_spec(spec), config) if spec.grouped else None,
            spec,
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
        gradients: Gradients,
        scale: float,
        left: int = UNBOUNDED,
        right: int = UNBOUNDED,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
    ) -> None:
        """Write dq, dk, dv and dsinks; ``left`` and ``right`` as of ``window_bounds``."""
        spec, rows, d = self.spec, self.config.tile_rows, self.spec.head_size
        *gradients, dsinks = gradients
        if spec.packed_q:  # rows that are no sequence's
            gradients[0].zero_()
        if spec.packed_k or spec.used_k:
            for gradient in gradients[1:]:
                gradient.zero_()
        q, out, dout, dq = (as_batch(t, spec.packed_q) for t in (q, out, dout, gradients[0]))
        k, v, dk, dv = (as_batch(t, spec.packed_k) for t in (k, v, *gradients[1:]))
        if spec.packed_q:
            lse, dlse = lse.unsqueeze(0), None if dlse is None else dlse.unsqueeze(0)
        heads, pairs, block = q.shape[2], k.shape[2], backward_block(d)
        sequences = cu_seqlens_q.shape[0] - 1 if spec.packed_q else q.shape[0]
        padded_rows = self.config.padded_rows
        padded = number_of_tiles(q, padded_rows, spec.packed_q, sequences) * padded_rows
        tiles = number_of_tiles(q, rows, spec.packed_q, sequences)
        blocks = number_of_tiles(k, block, spec.packed_k, sequences)
        summed = blocks * pairs if spec.grouped else 0
        lines, f32 = (heads, padded), torch.float32
        delta, row_lse, dq_sums, dkv_sums, counters = empties(
            q,
            (lines, f32),
            (lines, f32),
            ((tiles * heads * rows * d,), f32),
            ((summed * 2 * block * d,), f32),
            ((1 + tiles * heads + summed,), torch.int32),
        )
        together = backward_heads_together(d, q.itemsize, q.shape[1], heads // pairs, left, right)
        before_tanh, score_scale = score_factors(scale, softcap)
        self.delta[dlse is not None](out, dout, lse, dlse, cu_seqlens_q, delta, row_lse, counters)
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_k
        if blocks:
            self.backward(
                q, k, v, dout, row_lse, delta, dk, dv, dq_sums, dkv_sums, counters, *lengths, score_scale, before_tanh,
                scale, left, right, tiles, blocks, min(together, sequences * heads), min(blocks * heads, self.num_sms),
            )  # fmt: skip
        self.finish_dq(dq_sums, dq, *lengths, scale, right, k.shape[1], tiles)
        if summed:
            self.finish_dkv(dkv_sums, dk, dv, cu_seqlens_k, seqused_k, scale, blocks)
        if sinks is not None:
            of_sinks = torch.exp2(sinks * LOG2E - row_lse.t().contiguous()).mul_(delta.t())
            torch.neg(reduction.sum(of_sinks, 0), out=dsinks)


def as_batch(t: Tensor, packed: bool) -> Tensor:
    """Packed sequences as a batch of one; strides as TMA's descriptor takes them."""
    return regular(t.unsqueeze(0) if packed else t)


def number_of_tiles(t: Tensor, rows: int, packed: bool, sequences: int) -> int:
    """The number of tiles of all sequences for one head; see ``kernel_sequences``."""
    return t.shape[1] // rows + sequences if packed else -(-t.shape[1] // rows) * sequences


def _make_backward(target: Target, spec: BackwardSpec) -> BackwardLaunch:
    return BackwardLaunch.of(target, spec, backward_config(spec))


_backward = LaunchCache(_make_backward)
