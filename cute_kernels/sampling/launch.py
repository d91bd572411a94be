"""The launch of sampling, the operator ``cute_kernels::sample_rows``: a Spec of the tensors, and what launches it."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from cute_kernels.runtime import launches
from cute_kernels.runtime.launches import LaunchCache
from cute_kernels.runtime.operators import operator
from cute_kernels.runtime.targets import Target
from cute_kernels.sampling.config import Numbers, SampleSpec, cluster_for


@operator(
    "sample_rows",
    "Tensor logits, Tensor seeds, Tensor positions, Tensor(a!) tokens, "
    "bool noisy, float scale, int top_k, int top_p, float log_min_p",
)
def sample_rows(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    tokens: Tensor,
    noisy: bool,
    scale: float,
    top_k: int,
    top_p: int,
    log_min_p: float,
) -> None:
    """tokens of the rows of logits; the numbers are ``config.Numbers``."""
    rows, columns = logits.shape
    if not rows:
        return
    vec = math.gcd(16 // logits.itemsize, columns, logits.data_ptr() // logits.itemsize)
    if rows > 1:
        vec = math.gcd(vec, logits.stride(0))
    filtered = Numbers(noisy, scale, top_k, top_p, log_min_p).filters
    spec = SampleSpec(logits.dtype, vec, cluster_for(columns, logits.itemsize, filtered), filtered)
    launch = _sample.get(logits.get_device(), spec)
    launch(logits, seeds, positions, tokens, scale, int(noisy), top_k, top_p, log_min_p)


def _make_sample(target: Target, spec: SampleSpec) -> Callable[..., None]:
    from cute_kernels.sampling import kernel

    return launches.load(kernel.sample_rows, target.arch, spec)


_sample = LaunchCache(_make_sample)
