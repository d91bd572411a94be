"""The kernels of sums by an index that an installation needs: embeddings of bf16 and fp32, gradients of gathers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.runtime.targets import expect_arch
from cute_kernels.scatter.config import THREADS, ElementsSpec, RowsSpec


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel: of rows from 2,048 elements on, written, and added to fp32 and to their own
    dtype; of elements.
    """
    expect_arch(arch)
    from cute_kernels.scatter.kernel import element_sums, grouped_sums, segment_sums

    bf16, fp32 = torch.bfloat16, torch.float32
    for source, out, store in (
        (bf16, bf16, "write"),
        (fp32, fp32, "write"),
        (bf16, fp32, "add"),
        (fp32, fp32, "add"),
        (bf16, bf16, "onto"),
        (fp32, fp32, "onto"),
    ):
        spec = RowsSpec(source, out, torch.int32, 16 // out.itemsize, THREADS, store)
        yield segment_sums, (arch, spec)
        yield grouped_sums, (arch, spec)
    for dtype in (bf16, fp32):
        yield element_sums, (arch, ElementsSpec(dtype, dtype))
