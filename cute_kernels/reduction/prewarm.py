"""The kernels of the reductions that an installation needs: vocabularies and attention in bf16, losses in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.common.row_layout import Access
from cute_kernels.reduction.config import ColumnSumSpec, RowSumSpec, SoftmaxBackwardSpec, SoftmaxSpec, row_config
from cute_kernels.runtime.targets import expect_arch

# Vocabularies of widely used models, and hidden sizes
WIDTHS = (4096, 32000, 128256, 151936)


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel: softmax and log_softmax of bf16 and fp32 rows, and sums to fp32."""
    expect_arch(arch)
    from cute_kernels.reduction.kernel import column_sums, row_sums, softmax_backward, softmax_forward

    for dtype in (torch.bfloat16, torch.float32):
        vec = 16 // dtype.itemsize
        access = Access(vec, True, True)
        for n in WIDTHS:
            for log in (False, True):
                forward = SoftmaxSpec(n, dtype, dtype, log, access)
                yield softmax_forward, (arch, forward, row_config(forward))
                backward = SoftmaxBackwardSpec(n, dtype, dtype, dtype, log, access)
                yield softmax_backward, (arch, backward, row_config(backward))
            sums = RowSumSpec(n, dtype, torch.float32, access)
            yield row_sums, (arch, sums, row_config(sums))
        yield column_sums, (arch, ColumnSumSpec(dtype, torch.float32, vec))
