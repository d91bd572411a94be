"""The norm kernels that an installation needs: the widths of common models in bf16, training and inference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.common.row_layout import Access
from cute_kernels.norm.config import NormBackwardSpec, NormForwardSpec, backward_config, forward_config
from cute_kernels.runtime.targets import expect_arch

BF16, FP32 = torch.bfloat16, torch.float32
# Hidden sizes of widely used models from 1B to 700B parameters, and head sizes of per-head norms
WIDTHS = (64, 128, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384)
# Widths of whole models, as mhc's MODEL_CHANNELS: rms_norm adds to main_grad, too
MODEL_WIDTHS = (4096, 7168)


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel: bf16 x, y and parameters; layer_norm with bias; bf16 and fp32 residuals.

    Of MODEL_WIDTHS rms_norm without a residual, or with one in bf16, also adds to ``main_grad``.
    """
    expect_arch(arch)
    from cute_kernels.norm.kernel import norm_backward, norm_forward

    for n in WIDTHS:
        for kind in ("rms", "layer"):
            bias = BF16 if kind == "layer" else None
            for residual in (None, BF16, FP32):
                access = Access(4 if residual is FP32 else 8, True, True)
                for num_statistics in (1 if kind == "rms" else 2, 0):
                    dtypes = BF16, residual, BF16, bias, BF16
                    forward = NormForwardSpec(
                        kind, n, *dtypes, 0.0, residual is not None, num_statistics, columns_aligned=True, access=access
                    )
                    yield norm_forward, (arch, forward, forward_config(arch, forward))
                backward = NormBackwardSpec(
                    kind,
                    "input",
                    n,
                    # The sum is saved, and returned beside y, in the residual's dtype, as its gradient is
                    saved=residual or BF16,
                    dy=BF16,
                    dh_out=residual,
                    weight=BF16,
                    bias=None,
                    dx=BF16,
                    dresidual=FP32 if residual is FP32 else None,
                    dw=BF16,
                    db=bias,
                    weight_offset=0.0,
                    accumulate_w=False,
                    accumulate_b=False,
                    columns_aligned=True,
                    access=access,
                )
                config = backward_config(arch, backward)
                yield norm_backward, (arch, backward, config)
                if kind == "rms" and residual is not FP32 and n in MODEL_WIDTHS:
                    yield norm_backward, (arch, backward._replace(dw=FP32, accumulate_w=True), config)
