"""The quantizers that an installation needs: bf16 to e4m3 with "rceil" scales, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cute_kernels.mxfp8.config import GRIDS, quantize_config, scale_kinds
from cute_kernels.runtime.targets import expect_arch


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel: matrices and experts, each orientation, both, squares; either layout."""
    expect_arch(arch)
    from cutlass import BFloat16 as bf16
    from cutlass import Float8E4M3FN as e4m3

    from cute_kernels.mxfp8.kernel import mxfp8_quantize
    from cute_kernels.mxfp8.kernel_dequantize import mxfp8_dequantize

    # Rank, blocks along k, along n, squares
    matrices = [(2, True, False, False), (2, False, True, False), (2, True, True, False)]
    experts = [(3, along_k, True, square) for along_k in (False, True) for square in (False, True)]
    for rank, along_k, along_n, square in matrices + experts:
        flags = (rank, False, along_k, along_n, square)
        for scale_layout in ("plain", "blocked"):
            kind_k, kind_n = scale_kinds(rank, square, scale_layout)
            kinds = (kind_k if along_k else None, kind_n if along_n else None)
            for config in dict.fromkeys(quantize_config(arch, 2, *kinds, tiles) for tiles in GRIDS):
                yield mxfp8_quantize, (arch, bf16, e4m3, *flags, "rceil", scale_layout, config)
    for rank, transposed, kinds in (
        (2, False, ("columns", "blocked")),
        (2, True, ("columns", "blocked")),
        (3, False, ("columns", "square", "blocked")),
        (3, True, ("rows", "square", "blocked")),
    ):
        for kind in kinds:
            yield mxfp8_dequantize, (arch, e4m3, bf16, rank, transposed, kind)
