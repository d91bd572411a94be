"""The kernels of sampling that an installation needs: vocabularies in bf16 and fp32, with filters and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.runtime.targets import expect_arch
from cute_kernels.sampling.config import SampleSpec, cluster_for

VOCABULARIES = 128256, 262144  # and every one between whose rows start and end on 16 bytes


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel."""
    expect_arch(arch)
    from cute_kernels.sampling.kernel import sample_rows

    for dtype in (torch.bfloat16, torch.float32):
        for filtered in (False, True):
            for cluster in sorted({cluster_for(columns, dtype.itemsize, filtered) for columns in VOCABULARIES}):
                yield sample_rows, (arch, SampleSpec(dtype, 16 // dtype.itemsize, cluster, filtered))
