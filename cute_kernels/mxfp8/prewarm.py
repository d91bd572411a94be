"""The quantizers that an installation needs: bf16 to e4m3 with "rceil" scales, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.mxfp8.config import GRIDS, DequantizeSpec, QuantizeSpec, quantize_config
from cute_kernels.runtime.targets import expect_arch

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel: matrices and experts, each orientation, both, squares; either layout."""
    expect_arch(arch)
    from cute_kernels.mxfp8.kernel import mxfp8_quantize
    from cute_kernels.mxfp8.kernel_dequantize import mxfp8_dequantize

    # Rank, blocks along k, along n, squares
    matrices = [(2, True, False, False), (2, False, True, False), (2, True, True, False)]
    experts = [(3, along_k, True, square) for along_k in (False, True) for square in (False, True)]
    for rank, along_k, along_n, square in matrices + experts:
        for scale_layout in ("plain", "blocked"):
            spec = QuantizeSpec(BF16, E4M3, rank, False, along_k, along_n, square, "rceil", scale_layout)
            for config in dict.fromkeys(quantize_config(arch, 2, *spec.pass_kinds, tiles) for tiles in GRIDS):
                yield mxfp8_quantize, (arch, spec, config)
    for rank, transposed, kinds in (
        (2, False, ("columns", "blocked")),
        (2, True, ("columns", "blocked")),
        (3, False, ("columns", "square", "blocked")),
        (3, True, ("rows", "square", "blocked")),
    ):
        for kind in kinds:
            yield mxfp8_dequantize, (arch, DequantizeSpec(E4M3, BF16, rank, transposed, kind))
