"""The matrix products that an installation needs, forward and backward: bf16 linear layers of any shape, batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.gemm import config_mxfp8
from cute_kernels.gemm.config import (
    BLOCK,
    GemmSpec,
    choose,
    few_tokens_along_m,
    few_tokens_along_n,
    gemm_arguments,
    in_whole_blocks,
    many_tokens,
    more_tokens,
)
from cute_kernels.gemm.config_grouped import GroupedSpec, grouped_arguments, rows_kernels, sums
from cute_kernels.gemm.config_mxfp8 import GroupedMxfp8Spec
from cute_kernels.gemm.config_tokens import SOME_TOKENS
from cute_kernels.runtime.targets import expect_arch

BF16, FP32 = torch.bfloat16, torch.float32


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel: y, dx, dweight in bf16 and accumulated in fp32; no bias, K in whole blocks.

    For more than 256 tokens also y with silu, logits in fp32, and the fp32 dx of linear_log_prob. Of batches those of
    64 x 1024 x 1024 x 128. Grouped products; of SM90 also with mxfp8 matrices.
    """
    expect_arch(arch)
    from cute_kernels.gemm.kernel import gemm

    forward, dx = GemmSpec(BF16, BF16), GemmSpec(BF16, BF16, b_major="n")
    dweight = GemmSpec(BF16, BF16, a_major="m", b_major="n")
    dweight_main = GemmSpec(BF16, FP32, accumulate=True, a_major="m", b_major="n")
    of_models = [GemmSpec(BF16, BF16, activation="silu", save_preact=saved) for saved in (True, False)]
    of_models += [GemmSpec(BF16, FP32, accumulate=accumulate, b_major="n") for accumulate in (False, True)]
    configs = [(config, (forward, dx, dweight, dweight_main)) for config in many_tokens(arch)]
    configs += [(config, (forward, dx)) for config in few_tokens_along_m(arch)]
    configs += [(config, of_models) for config in more_tokens(arch)]
    for config, specs in configs:
        for spec in specs:
            yield gemm, gemm_arguments(arch, spec, BLOCK, config, False)
    for config in few_tokens_along_n(arch):
        for spec in (forward, dx):
            yield gemm, gemm_arguments(arch, spec, BLOCK, config, True)
    for kernel in in_whole_blocks(arch):
        yield gemm, gemm_arguments(arch, forward, BLOCK, *kernel)
    logits = [(config, False) for config in more_tokens(arch)]
    if arch == "sm_90a":
        logits += [kernel for kernel in SOME_TOKENS if kernel not in logits]  # of 257 to 512 tokens
    for kernel in logits:
        yield gemm, gemm_arguments(arch, GemmSpec(BF16, FP32), BLOCK, *kernel)
    config, _ = choose(arch, 1024, 1024, 128, 132, entries=64)
    for spec in (forward, dx, dweight):
        yield gemm, gemm_arguments(arch, spec._replace(batched=True), BLOCK, config, False)
    yield from _grouped(arch)
    if arch == "sm_90a":
        yield from _grouped_mxfp8(arch)


def _grouped(arch: str) -> Iterator[tuple[Any, tuple]]:
    """Rows of experts, forward and dx; their weights' gradients, bf16 and accumulated in fp32."""
    from cute_kernels.gemm.kernel_grouped import grouped

    for config, transposed in rows_kernels(arch):
        for b_major in ("k", "n"):
            spec = GroupedSpec(BF16, BF16, "rows", b_major=b_major)
            yield grouped, grouped_arguments(arch, spec, BLOCK, config, transposed)
    for config in sums(arch):
        for out in (BF16, FP32):
            spec = GroupedSpec(BF16, out, "sums", out is FP32, "m", "n")
            yield grouped, grouped_arguments(arch, spec, BLOCK, config, False)


def _grouped_mxfp8(arch: str) -> Iterator[tuple[Any, tuple]]:
    """Few rows of experts whose weights are mxfp8, of a K that is a multiple of 128, or of 64."""
    from cute_kernels.gemm.kernel_grouped_mxfp8 import grouped_mxfp8

    for config in config_mxfp8.DECODE.values():
        for scale_vec in (4, 2):
            yield grouped_mxfp8, (arch, GroupedMxfp8Spec(BF16, scale_vec), config)
