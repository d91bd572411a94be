"""The matrix products that an installation needs, forward and backward: bf16 linear layers of any shape, batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cute_kernels.gemm.config import (
    BLOCK,
    choose,
    few_tokens_along_m,
    few_tokens_along_n,
    in_whole_blocks,
    log_prob_candidates,
    many_tokens,
    more_tokens,
)
from cute_kernels.runtime.targets import expect_arch


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel: y, dx, dweight in bf16 and accumulated in fp32; no bias, K in whole blocks.

    For more than 256 tokens also y with silu, logits in fp32, and the fp32 dx of linear_log_prob. Of batches those of
    64 x 1024 x 1024 x 128.
    """
    expect_arch(arch)
    from cutlass import BFloat16 as bf16
    from cutlass import Float32, Int64

    from cute_kernels.gemm.kernel import gemm
    from cute_kernels.gemm.kernel_log_prob import log_prob, log_prob_gradient, log_prob_statistics

    # Majors of a and b, output, accumulated, activation, whether z is kept
    plain = None, False
    forward, dx = ("k", "k", bf16, False, *plain), ("k", "n", bf16, False, *plain)
    dweight, dweight_main = ("m", "n", bf16, False, *plain), ("m", "n", Float32, True, *plain)
    of_models = [("k", "k", bf16, False, "silu", keeps_z) for keeps_z in (True, False)]
    of_models += [("k", "k", Float32, False, *plain)]
    of_models += [("k", "n", Float32, accumulate, *plain) for accumulate in (False, True)]
    configs = [(config, (forward, dx, dweight, dweight_main)) for config in many_tokens(arch)]
    configs += [(config, (forward, dx)) for config in few_tokens_along_m(arch)]
    configs += [(config, of_models) for config in more_tokens(arch)]
    for config, products in configs:
        for a_major, b_major, out, accumulate, activation, keeps_z in products:
            static = (arch, bf16, out, None, activation, keeps_z, a_major, b_major, False, accumulate, False, False)
            in_blocks = config.loads_blocks(arch, (a_major, b_major), BLOCK)
            yield gemm, (*static, config.stores_by_tma(arch, False), in_blocks, config)
    for config in few_tokens_along_n(arch):
        for a_major in ("k",) if config in in_whole_blocks(arch) else ("k", "m"):  # of the weight
            static = (arch, bf16, bf16, None, None, False, a_major, "k", True, False, False, False, False)
            yield gemm, (*static, config.loads_blocks(arch, (a_major, "k"), BLOCK), config)
    config, _ = choose(arch, 1024, 1024, 128, 132, entries=64)
    for a_major, b_major in (("k", "k"), ("k", "n"), ("m", "n")):
        static = (arch, bf16, bf16, None, None, False, a_major, b_major, False, False, False, True)
        yield gemm, (*static, config.stores_by_tma(arch, False), False, config)
    yield log_prob, (arch, Int64)
    for config in dict.fromkeys(log_prob_candidates(arch)):
        yield log_prob_statistics, (arch, bf16, Int64, "k", config)
        for has_dentropy in (False, True):
            yield log_prob_gradient, (arch, bf16, Int64, "k", has_dentropy, config)
