"""Static choices of linear_log_prob, by architecture and number of tokens: the latter changes no bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cute_kernels.common.gemm_config import GemmConfig

if TYPE_CHECKING:
    import torch


class StatisticsSpec(NamedTuple):
    """Statistics of tiles of logits; ``weight_major``: "k", or "n" of a weight whose columns are contiguous.

    ``has_softcap``: of the tanh of each logit times a slope, in its place. ``keeps_logits``: the logits are stored, in
    ``dtype``.
    """

    dtype: torch.dtype
    target: torch.dtype
    weight_major: str
    has_softcap: bool = False
    keeps_logits: bool = False


class LogProbSpec(NamedTuple):
    """The Spec of the kernel that computes log-probabilities from the statistics."""

    target: torch.dtype


class GradientSpec(NamedTuple):
    """Gradients of logits; ``has_dentropy``: the entropy has a gradient; ``has_softcap``: as in StatisticsSpec."""

    dtype: torch.dtype
    target: torch.dtype
    weight_major: str
    has_dentropy: bool
    has_softcap: bool = False


class KeptGradientSpec(NamedTuple):
    """Gradients of logits that the forward has kept, in their place; the rest as in GradientSpec."""

    dtype: torch.dtype
    target: torch.dtype
    has_dentropy: bool
    has_softcap: bool


def vocabulary_tile(arch: str) -> int:
    """Columns of logits that are added up at once, of any kernel: a row's order of summation."""
    return 128 if arch.startswith("sm_9") else 64


def candidates(arch: str) -> tuple[GemmConfig, ...]:
    """Kernels of tiles of 128 columns: for up to 64 tokens, up to 128, and more."""
    if arch == "sm_90a":
        return (
            GemmConfig((64, 128, 128), (1, 1), 4, 1),
            GemmConfig((128, 128, 128), (1, 2), 3, 8),
            GemmConfig((128, 128, 64), (2, 1), 6, 8, ping_pong=True),
        )
    some = GemmConfig((128, 128, 64), (1, 2), 6, 8)
    return some, some, GemmConfig((128, 128, 64), (2, 1), 6, 8)


def config_for(arch: str, m: int) -> GemmConfig:
    """The kernel for m tokens."""
    few, some, many = candidates(arch)
    return few if m <= 64 else some if m <= 128 else many
