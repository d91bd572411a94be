"""The kernels of the hyper-connections that an installation needs: DeepSeek-V4's, of four streams in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cute_kernels.mhc.checks import num_coefficients
from cute_kernels.mhc.config import pre_config, product_layout, projection_backward_config, stream_layout
from cute_kernels.mhc.variants import VARIANTS, head_of
from cute_kernels.runtime.targets import expect_arch

N = 4
CHANNELS = (768, 1280, 2560, 4096, 5120, 7168)
MODEL_CHANNELS = (4096, 7168)  # of whole models: with expand, contract and head


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel: pre, expand_combine and hyper_connection, with fp32 parameters.

    With those that a block of recompute adds to them, and, of MODEL_CHANNELS, those of a model's ends, expand, contract
    and head: of all channels they would take a tenth of the time of all tables.
    """
    expect_arch(arch)
    from cutlass import BFloat16 as bf16
    from cutlass import Float32

    from cute_kernels.mhc.kernel.aggregate import aggregate_backward, aggregate_forward, expand_streams
    from cute_kernels.mhc.kernel.coefficients import coefficients_backward, coefficients_forward
    from cute_kernels.mhc.kernel.expand_combine import expand_combine_backward, expand_combine_forward
    from cute_kernels.mhc.kernel.phi_gradient import phi_gradient
    from cute_kernels.mhc.kernel.pre import pre_forward
    from cute_kernels.mhc.kernel.projection_backward import projection_backward

    variant, columns = VARIANTS["deepseek_v4"], num_coefficients(N)
    head = head_of(variant)
    layout, orientation = variant.layout, variant.res_orientation
    names = "bfloat16", "float32", "tf32", True
    fp32 = (Float32, Float32)
    has, aligns = (True, True, True), (4, 4, 4, 4)
    sums = (None, None), (False, False)  # left to phi_gradient
    yield coefficients_backward, (arch, N, fp32, *sums, has, aligns, variant, False, True, True)
    yield coefficients_forward, (arch, N, 0, 0, False, fp32, variant, False, True)
    for channels in CHANNELS:
        k, streams = N * channels, stream_layout(N, channels, layout, 2, 8)
        config = pre_config(N, channels, layout, columns, *names[1:3])
        yield pre_forward, (arch, Float32, None, fp32, variant, True, False, config)
        yield aggregate_forward, (arch, bf16, True, 4, streams)
        yield aggregate_backward, (arch, bf16, False, True, 1, streams)
        for mixes in (orientation, None):  # of hyper_connection, of pre alone
            config = projection_backward_config(N, channels, layout, columns, *names, mixes is not None, True)
            yield projection_backward, (arch, bf16, Float32, None, True, True, mixes, True, config)
        for accumulate in (False, True):  # into main_grads
            outputs = Float32, None, *fp32, (accumulate, False, accumulate, accumulate)
            yield phi_gradient, (arch, Float32, None, *outputs, columns, k, 3)
        for pre_align in (1, 4):  # 4: of a block of recompute, where it aggregates, too
            aligns = (4, 4, pre_align)
            yield expand_combine_forward, (arch, bf16, None, False, pre_align == 4, orientation, aligns, streams)
        for needs_dx in (False, True):  # of hyper_connection, and of expand_combine alone
            needs = (needs_dx, True, True)
            products = product_layout(streams)
            yield expand_combine_backward, (arch, bf16, None, False, *needs, orientation, (4, 4), products)
    yield coefficients_backward, (arch, N, fp32, *sums, (True, False, False), (4, 4, 1, 1), head, True, False, True)
    for channels in MODEL_CHANNELS:
        k, streams = N * channels, stream_layout(N, channels, layout, 2, 8)
        yield expand_streams, (arch, bf16, streams)
        yield aggregate_forward, (arch, bf16, False, 1, streams)  # contract, and the gradient of expand
        config = pre_config(N, channels, layout, N, *names[1:3])
        for keeps in (True, False):  # training, inference
            yield pre_forward, (arch, Float32, None, fp32, head, keeps, True, config)
        config = projection_backward_config(N, channels, layout, N, *names, False, True)
        yield projection_backward, (arch, bf16, Float32, None, True, True, None, True, config)
        for accumulate in (False, True):
            outputs = Float32, None, *fp32, (accumulate, False, accumulate, accumulate)
            yield phi_gradient, (arch, Float32, None, *outputs, N, k, 1)
