"""The matrix products that an installation needs: bf16 linear layers, forward and backward, any shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cute_kernels._target import expect_arch
from cute_kernels.gemm.config import DECODE_32, candidates


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel: y, dx, dweight in bf16 and accumulated in fp32, without a bias."""
    expect_arch(arch)
    from cutlass import BFloat16 as bf16
    from cutlass import Float32

    from cute_kernels.gemm.kernel import gemm

    # Majors of a and b, output, accumulated
    forward, dx = ("k", "k", bf16, False), ("k", "n", bf16, False)
    dweight, dweight_main = ("m", "n", bf16, False), ("m", "n", Float32, True)
    for config in candidates(arch):
        if config is None:
            continue
        if config.group > 1:
            for a_major, b_major, out, accumulate in (forward, dx, dweight, dweight_main):
                dtypes = (bf16, out, None, None, False)
                yield (
                    gemm,
                    (arch, *dtypes, a_major, b_major, False, accumulate, False, config.stores_by_tma(False), config),
                )
        else:
            dtypes = (bf16, bf16, None, None, False)
            # Transposed: the weight is a
            for a_major in ("k", "m"):
                yield gemm, (arch, *dtypes, a_major, "k", True, False, False, False, config)
            if config is DECODE_32:
                for b_major in ("k", "n"):
                    yield gemm, (arch, *dtypes, "k", b_major, False, False, False, False, config)
