"""The kernels of the reductions that an installation needs: vocabularies and attention in bf16, losses in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cute_kernels.reduction.config import row_config
from cute_kernels.runtime.targets import expect_arch

# Vocabularies of widely used models, and hidden sizes
WIDTHS = (4096, 32000, 128256, 151936)


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel: softmax and log_softmax of bf16 and fp32 rows, and sums to fp32."""
    expect_arch(arch)
    from cutlass import BFloat16 as bf16
    from cutlass import Float32 as fp32

    from cute_kernels.reduction.kernel import column_sums, row_sums, softmax_backward, softmax_forward

    for dtype in (bf16, fp32):
        size = dtype.width // 8
        vec = 16 // size
        for n in WIDTHS:
            one = row_config(n, (size,), vec, True, True)
            two = row_config(n, (size, size), vec, True, True)
            for log in (False, True):
                yield softmax_forward, (arch, dtype, dtype, log, one)
                yield softmax_backward, (arch, dtype, dtype, dtype, log, two)
            yield row_sums, (arch, dtype, fp32, one)
        yield column_sums, (arch, dtype, fp32, vec)
