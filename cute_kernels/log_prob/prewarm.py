"""The kernels of linear_log_prob that an installation needs; the products of its backward are gemm's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.log_prob.config import GradientSpec, KeptGradientSpec, LogProbSpec, StatisticsSpec, candidates
from cute_kernels.runtime.targets import expect_arch


def specializations(arch: str) -> Iterator[tuple[Any, tuple]]:
    """(builder, arguments) of each kernel: bf16, int64 targets, a row-major weight."""
    expect_arch(arch)
    from cute_kernels.log_prob.kernel import log_prob, log_prob_gradient, log_prob_kept_gradient, log_prob_statistics

    call = torch.bfloat16, torch.int64, "k"
    yield log_prob, (arch, LogProbSpec(torch.int64))
    for has_dentropy in (False, True):
        yield log_prob_kept_gradient, (arch, KeptGradientSpec(*call[:2], has_dentropy, False))
    for config in dict.fromkeys(candidates(arch)):
        for keeps_logits in (False, True):
            yield log_prob_statistics, (arch, StatisticsSpec(*call, keeps_logits=keeps_logits), config)
        for has_dentropy in (False, True):
            yield log_prob_gradient, (arch, GradientSpec(*call, has_dentropy), config)
