"""The kernels of the reductions that an installation needs: vocabularies and attention in bf16, losses in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.common.row_layout import Access
from cute_kernels.reduction.config import (
    ColumnSumSpec,
    LogSumExpSpec,
    PrefixSumSpec,
    RowSumSpec,
    SoftmaxBackwardSpec,
    SoftmaxSpec,
    VarianceSpec,
    WholeSumSpec,
    row_config,
)
from cute_kernels.runtime.targets import expect_arch

# Vocabularies of widely used models, and hidden sizes
WIDTHS = (4096, 32000, 128256, 151936)


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel: softmax, log_softmax and logsumexp of bf16 and fp32 rows, and sums to fp32;
    sums and norms of whole tensors, prefix sums of rows whose length is a multiple of 4, variances of 4096.
    """
    expect_arch(arch)
    from cute_kernels.reduction.kernel import column_sums, row_sums, softmax_backward, softmax_forward
    from cute_kernels.reduction.kernel_statistics import log_sum_exp, prefix_sums, variances
    from cute_kernels.reduction.kernel_whole import whole_sums

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
            logs = LogSumExpSpec(n, dtype, access)
            yield log_sum_exp, (arch, logs, row_config(logs))
        yield column_sums, (arch, ColumnSumSpec(dtype, torch.float32, vec))
        for squares in (False, True):
            yield whole_sums, (arch, WholeSumSpec(dtype, torch.float32, vec, squares))
        spread = VarianceSpec(4096, dtype, access)
        yield variances, (arch, spread, row_config(spread))
        yield prefix_sums, (arch, PrefixSumSpec(dtype, dtype, 4))
