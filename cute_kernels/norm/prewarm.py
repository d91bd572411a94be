"""The norm kernels that an installation needs: the widths of common models in bf16, training and inference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cute_kernels.norm.config import backward_config, forward_config
from cute_kernels.runtime.targets import expect_arch

# Hidden sizes of widely used models from 1B to 700B parameters, and head sizes of per-head norms
WIDTHS = (64, 128, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 12288, 16384)
# Of whole models, as in mhc's MODEL_CHANNELS: rms_norm adds to main_grad, too
MODEL_WIDTHS = (4096, 7168)


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel: bf16 x, y and parameters; layer_norm with bias; bf16 and fp32 residuals.

    Of MODEL_WIDTHS rms_norm without a residual, or with one in bf16, also adds to ``main_grad``.
    """
    expect_arch(arch)
    from cutlass import BFloat16 as bf16
    from cutlass import Float32 as fp32

    from cute_kernels.norm.kernel import norm_backward, norm_forward

    for n in WIDTHS:
        for kind in ("rms", "layer"):
            bias = bf16 if kind == "layer" else None
            for residual in (None, bf16, fp32):
                size = 2 if residual is None else residual.width // 8
                streams, vec = (2,) if residual is None else (2, size), 16 // size
                config = forward_config(arch, kind, n, streams, 2 if bias is None else 4, vec, True, True)
                for num_statistics in (1 if kind == "rms" else 2, 0):
                    facts = (bf16, residual, bf16, bias, bf16, 0.0, residual is not None, num_statistics)
                    yield norm_forward, (arch, kind, *facts, 16, config)
                # What is saved, and returned beside y, is the sum: of the residual's dtype, as its gradient is
                sizes = (2, 2) if residual is None else (size, 2, size)
                config = backward_config(arch, kind, "input", n, sizes, vec, True, True)
                dresidual = residual if size == 4 else None
                dtypes = (residual or bf16, bf16, residual, bf16, None, bf16, dresidual)
                yield norm_backward, (arch, kind, "input", *dtypes, bf16, bias, 0.0, (False, False), 16, config)
                if kind == "rms" and residual is not fp32 and n in MODEL_WIDTHS:
                    yield norm_backward, (arch, kind, "input", *dtypes, fp32, None, 0.0, (True, False), 16, config)
