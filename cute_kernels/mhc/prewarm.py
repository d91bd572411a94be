"""The kernels of the hyper-connections that an installation needs: DeepSeek-V4's, of four streams in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.mhc.checks import num_coefficients
from cute_kernels.mhc.config import (
    AggregateBackwardSpec,
    AggregateSpec,
    CoefficientsBackwardSpec,
    CoefficientsSpec,
    ExpandCombineBackwardSpec,
    ExpandCombineSpec,
    ExpandSpec,
    PhiGradientSpec,
    PreSpec,
    ProjectionBackwardSpec,
    layout_of,
    pre_config,
    projection_backward_config,
)
from cute_kernels.mhc.variants import VARIANTS, Constants
from cute_kernels.runtime.targets import expect_arch

N = 4
CHANNELS = (768, 1280, 2560, 4096, 5120, 7168)
MODEL_CHANNELS = (4096, 7168)  # of whole models: with expand, contract and head
BF16, FP32 = torch.bfloat16, torch.float32


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel: pre, expand_combine and hyper_connection, with fp32 parameters.

    With those that a block of recompute adds to them, and, of MODEL_CHANNELS, those of a model's ends, expand, contract
    and head: of all channels they would take a tenth of the time of all tables.
    """
    expect_arch(arch)
    from cute_kernels.mhc.kernel.aggregate import aggregate_backward, aggregate_forward, expand_streams
    from cute_kernels.mhc.kernel.coefficients import coefficients_backward, coefficients_forward
    from cute_kernels.mhc.kernel.expand_combine import expand_combine_backward, expand_combine_forward
    from cute_kernels.mhc.kernel.projection_cluster import pre_forward

    variant = VARIANTS["deepseek_v4"]
    constants, head = variant.constants, variant.head_constants
    orientation = variant.res_orientation
    yield coefficients_backward, (arch, _coefficients_backward(constants, (4, 4, 4, 4)))
    yield coefficients_forward, (arch, CoefficientsSpec(N, 0, 0, False, FP32, FP32, constants, False, True))
    for channels in CHANNELS:
        streams = N, channels, variant.layout, BF16, 8
        yield _with_layout(aggregate_forward, arch, AggregateSpec(*streams, has_pre=True, pre_align=4))
        spec = AggregateBackwardSpec(*streams, needs_dx=False, needs_dpre=True, pre_align=1)
        yield _with_layout(aggregate_backward, arch, spec)
        spec = _pre(channels, constants)
        yield pre_forward, (arch, spec, pre_config(spec))
        for residual in (orientation, None):  # of hyper_connection, of pre alone
            yield _projection_backward(arch, channels, num_coefficients(N), residual)
        yield from _phi_gradients(arch, num_coefficients(N), N * channels, 3)
        for has_pre in (False, True):  # of a block of recompute, where it aggregates, too
            spec = ExpandCombineSpec(
                *streams,
                bias=None,
                has_dropout=False,
                has_pre=has_pre,
                orientation=orientation,
                post_align=4,
                res_align=4,
                pre_align=4 if has_pre else 1,
            )
            yield _with_layout(expand_combine_forward, arch, spec)
        for needs_dx in (False, True):  # of hyper_connection, and of expand_combine alone
            spec = ExpandCombineBackwardSpec(
                *streams,
                bias=None,
                has_dropout=False,
                needs_dx=needs_dx,
                needs_df=True,
                needs_coefficients=True,
                orientation=orientation,
                post_align=4,
                res_align=4,
            )
            yield _with_layout(expand_combine_backward, arch, spec)
    yield coefficients_backward, (arch, _coefficients_backward(head, (4, 4, 0, 0), is_head=True))
    for channels in MODEL_CHANNELS:
        streams = N, channels, variant.layout, BF16, 8
        yield _with_layout(expand_streams, arch, ExpandSpec(*streams))
        # contract, and the gradient of expand
        yield _with_layout(aggregate_forward, arch, AggregateSpec(*streams, has_pre=False, pre_align=1))
        for keeps_h in (True, False):  # training, inference
            spec = _pre(channels, head, is_head=True, keeps_h=keeps_h)
            yield pre_forward, (arch, spec, pre_config(spec))
        yield _projection_backward(arch, channels, N, None)
        yield from _phi_gradients(arch, N, N * channels, 1)


def _with_layout(builder: Any, arch: str, spec: Any) -> tuple[Any, tuple]:
    return builder, (arch, spec, layout_of(spec))


def _pre(channels: int, constants: Constants, is_head: bool = False, keeps_h: bool = True) -> PreSpec:
    return PreSpec(
        n=N,
        channels=channels,
        layout="streams",
        columns=N if is_head else num_coefficients(N),
        precision="tf32",
        phi=FP32,
        norm_weight=None,
        alpha=FP32,
        beta=FP32,
        constants=constants,
        keeps_h=keeps_h,
        writes_pre=is_head,
    )


def _coefficients_backward(
    constants: Constants, aligns: tuple[int, int, int, int], is_head: bool = False
) -> CoefficientsBackwardSpec:
    """Whose sums are left to phi_gradient."""
    return CoefficientsBackwardSpec(
        N,
        *aligns,
        alpha=FP32,
        beta=FP32,
        dbeta=None,
        dalpha=None,
        accumulate_beta=False,
        accumulate_alpha=False,
        constants=constants,
        is_head=is_head,
        has_sinkhorn=not is_head,
        leaves_sums=True,
    )


def _projection_backward(arch: str, channels: int, columns: int, orientation: str | None) -> tuple[Any, tuple]:
    from cute_kernels.mhc.kernel.projection_backward_mma import projection_backward

    spec = ProjectionBackwardSpec(
        n=N,
        channels=channels,
        layout="streams",
        columns=columns,
        precision="tf32",
        x=BF16,
        phi=FP32,
        norm_weight=None,
        needs_dx=True,
        needs_dphi=True,
        orientation=orientation,
        has_layer_grad=True,
        rows_on_16=True,
        all_on_16=False,
    )
    return projection_backward, (arch, spec, projection_backward_config(spec))


def _phi_gradients(arch: str, columns: int, k: int, alphas: int) -> Iterator[tuple[Any, tuple]]:
    """New gradients, and sums into main_grads."""
    from cute_kernels.mhc.kernel.phi_gradient import phi_gradient

    for accumulate in (False, True):
        spec = PhiGradientSpec(
            columns=columns,
            k=k,
            alphas=alphas,
            phi=FP32,
            norm_weight=None,
            dphi=FP32,
            dnorm_weight=None,
            dbeta=FP32,
            dalpha=FP32,
            accumulate_phi=accumulate,
            accumulate_norm_weight=False,
            accumulate_beta=accumulate,
            accumulate_alpha=accumulate,
        )
        yield phi_gradient, (arch, spec)
