"""The kernels of sampling that an installation needs: vocabularies in bf16 and fp32, with filters and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.runtime.targets import expect_arch
from cute_kernels.sampling.config import SampleSpec, cluster_for

VOCABULARY = 128256  # and every larger one whose rows start and end on 16 bytes


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel."""
    expect_arch(arch)
    from cute_kernels.sampling.kernel import sample_rows

    for dtype in (torch.bfloat16, torch.float32):
        for filtered in (False, True):
            yield sample_rows, (arch, SampleSpec(dtype, 16 // dtype.itemsize, cluster_for(VOCABULARY), filtered))
