"""Shared by the tests of linear_log_prob: inputs, an fp64 oracle with bounds, a choice of the kernel."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from cute_kernels.common.gemm_config import GemmConfig
from cute_kernels.log_prob import launch
from cute_kernels.runtime import launches
from tests.gemm.cases import BF16, FP32_EPS, Exact, check, randn, steps_of
from tests.norm.cases import name_of, strided

IGNORED = -100


@dataclass(frozen=True)
class Case:
    """One call on (m, k) tokens and a vocabulary of v; one target in seven is ignored."""

    m: int
    v: int
    k: int
    dtype: torch.dtype = BF16
    temperature: float = 1.0
    scale: float = 1.0
    softcap: float = 0.0
    index: torch.dtype = torch.int64
    weight_by_columns: bool = False
    gap: int = 0  # elements between the rows of x and weight, NaN
    entropy: bool = True  # whether it has a gradient
    keep: bool = False  # the logits
    exact: bool = False  # logits without rounding, far from 0, and likely targets; see exact_inputs

    def __str__(self) -> str:
        words = [f"{self.m}x{self.v}x{self.k}", name_of(self.dtype)]
        words += [f"temperature_{self.temperature}"] * (self.temperature != 1.0)
        words += [f"scale_{self.scale}"] * (self.scale != 1.0) + [f"softcap_{self.softcap}"] * (self.softcap > 0.0)
        words += ["keep"] * self.keep + ["exact"] * self.exact
        words += ["int32"] * (self.index is torch.int32) + ["by_columns"] * self.weight_by_columns
        words += [f"gap_{self.gap}"] * (self.gap > 0)
        return "-".join(words + ["no_dentropy"] * (not self.entropy))


@dataclass
class Inputs:
    """Tensors of a call, x and weight require grad; g and h: the gradients of log_prob and entropy."""

    x: Tensor
    weight: Tensor
    target: Tensor
    g: Tensor
    h: Tensor


def make_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """Logits of standard deviation 2 before the temperature: some tokens are likely, most are not."""
    if case.exact:
        x, weight, target = exact_inputs(case, generator)
    else:
        x = randn(case.m, case.k, generator=generator)
        weight = 2 * case.k**-0.5 * randn(case.v, case.k, generator=generator)
        target = torch.randint(case.v, (case.m,), generator=generator, device=x.device)
    x, weight = x.to(case.dtype), weight.to(case.dtype)
    if case.gap:
        x, weight = strided(x, case.gap), strided(weight, case.gap)
    if case.weight_by_columns:
        weight = weight.t().contiguous().t()
    target[3::7] = IGNORED
    g, h = randn(case.m, generator=generator), randn(case.m, generator=generator)
    return Inputs(x.requires_grad_(), weight.requires_grad_(), target.to(case.index), g, h)


def exact_inputs(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, target: logits are a step times integers of 19 bits, 2^18 and up to a thousand more or less.

    The step is the power of 2 below the temperature. Of four tokens two are as usual; the second is sure of its target;
    the third halves its probability between two equal rows of the weight, the first and the last one.
    """
    x, weight = (
        torch.randint(-1, 2, (rows, case.k), generator=generator, device=generator.device).float()
        for rows in (case.m, case.v)
    )
    target = torch.randint(1, case.v - 1, (case.m,), generator=generator, device=generator.device)
    target[2::4] = 0
    weight[-1] = weight[0]
    for likely in (slice(1, None, 4), slice(2, None, 4)):
        x[likely] = 4 * weight[target[likely]]
    x[:, 0], weight[:, 0] = 2.0**18, 1.0
    return x, weight * 2.0 ** math.floor(math.log2(case.temperature)), target


def mask_columns(inputs: Inputs, masked: Tensor, low: float) -> tuple[Inputs, Inputs]:
    """Inputs whose logits of the columns ``masked`` (V,) are ``low``, and inputs without these columns.

    As people do it who pad a vocabulary: a column of ones in x, and rows of weight that are ``low`` there, else 0.
    """
    x, weight = inputs.x.detach().clone(), inputs.weight.detach().clone()
    x[:, 0], weight[masked] = 1.0, 0.0
    weight[masked, 0] = low
    kept = (~masked).nonzero().squeeze(1)
    target = torch.where(inputs.target == IGNORED, IGNORED, inputs.target % len(kept))
    with_them = torch.where(target == IGNORED, IGNORED, kept[target.clamp_min(0)])
    return (
        Inputs(x.requires_grad_(), weight.requires_grad_(), with_them, inputs.g, inputs.h),
        Inputs(x, weight[kept].detach().requires_grad_(), target, inputs.g, inputs.h),
    )


def check_masked(function: Callable, case: Case, inputs: Inputs, masked: Tensor, low: float) -> dict[str, Tensor]:
    """Fails unless masked columns add 0 to the entropy and to every gradient; returns what there is without them."""
    padded, without = mask_columns(inputs, masked, low)
    found, truth = run(function, case, padded), oracle(case, without)
    for name, value in truth.values.items():
        assert ((found[name].double() - value).abs() <= truth.bounds[name]).all(), name
    assert (found["dw"][masked] == 0.0).all()
    finite = {"dw": found["dw"][~masked]}
    if math.isinf(low):
        assert found["dx"][inputs.target != IGNORED, 0].isnan().all()  # 0 times an infinite weight
    else:
        finite["dx"] = found["dx"]
    check(finite, truth.gradients)
    return found


def run(function: Callable, case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """log_prob, entropy and the gradients of x and weight, without one that went to a main_grad."""
    options = {"temperature": case.temperature, "scale": case.scale, "softcap": case.softcap}
    options["keep_logits"] = case.keep
    results = function(inputs.x, inputs.weight, inputs.target, **options)
    count = 1 + case.entropy
    leaves = [t for t in (inputs.x, inputs.weight) if t.requires_grad]
    gradients = torch.autograd.grad(results[:count], leaves, (inputs.g, inputs.h)[:count], allow_unused=True)
    named = {"dx" if leaf is inputs.x else "dw": d for leaf, d in zip(leaves, gradients, strict=True) if d is not None}
    return {"log_prob": results[0].detach(), "entropy": results[1].detach(), **named}


@dataclass(frozen=True)
class Truth:
    """Results in fp64; ``bounds`` of the errors of log_prob and entropy; gradients as ``check`` takes them."""

    values: dict[str, Tensor]
    bounds: dict[str, Tensor]
    gradients: dict[str, Exact]


def oracle(case: Case, inputs: Inputs) -> Truth:
    """With bounds: a logit's sum is off by a step of fp32 for each k16 unless exact, all else by a few roundings."""
    x, weight, g, h = (t.detach().double() for t in (inputs.x, inputs.weight, inputs.g, inputs.h))
    target, counts = inputs.target.long().clamp_min(0), inputs.target != IGNORED
    logits = case.scale * (x @ weight.t())
    derivative = torch.full_like(logits, case.scale / case.temperature)
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
        derivative *= 1 - (logits / case.softcap) ** 2
    log_p = torch.log_softmax(logits / case.temperature, -1)
    p, log_prob = log_p.exp(), log_p.gather(1, target[:, None]).squeeze(1)
    entropy = -(p * log_p).sum(1)
    h = h if case.entropy else torch.zeros_like(h)
    one = torch.zeros_like(p).scatter_(1, target[:, None], 1.0)
    spread = log_p + entropy[:, None]
    dz = (g[:, None] * (one - p) - h[:, None] * p * spread) * counts[:, None] * derivative
    terms = case.scale / case.temperature * (x.abs() @ weight.abs().t())
    logit_error = 0 * entropy if case.exact else (steps_of(case.k) + 8) * FP32_EPS * terms.amax(1)
    logit_error = logit_error + 4 * FP32_EPS * case.softcap / case.temperature  # tanh's own
    size = (g[:, None].abs() * (one + p) + h[:, None].abs() * p * (log_p.abs() + entropy[:, None])) * derivative
    info = torch.finfo(case.dtype)
    rounding = 0.5 * info.eps * dz.abs().clamp_min(info.smallest_normal)
    p_error = (4 * logit_error + 16 * FP32_EPS * (1 + entropy))[:, None] + 2 * FP32_EPS * log_p.abs()
    # A p below the least normal number is 0 to the kernels
    flushed = 2.0**-126 * (g[:, None].abs() + h[:, None].abs() * (log_p.abs() + entropy[:, None])) * derivative
    # Under a softcap 1 - tanh^2 has the absolute errors of its terms
    of_derivative = 8 * FP32_EPS * (1 + terms / max(case.softcap, 1.0)) * (case.softcap > 0.0) * size / derivative
    margin = rounding + size * p_error + flushed + of_derivative * case.scale / case.temperature
    values = {"log_prob": log_prob * counts, "entropy": entropy * counts}
    bounds = {
        "log_prob": 2 * logit_error + 16 * FP32_EPS * (1 + log_prob.abs()),
        "entropy": 2 * (1 + entropy) * logit_error + 32 * FP32_EPS * (1 + entropy),
    }
    gradients = {
        "dx": Exact(dz @ weight, dz.abs() @ weight.abs(), steps_of(case.v), margin @ weight.abs()),
        "dw": Exact(dz.t() @ x, dz.t().abs() @ x.abs(), steps_of(case.m), margin.t() @ x.abs()),
    }
    return Truth(values, bounds, gradients)


@contextlib.contextmanager
def only_kernel(config: GemmConfig, num_sms: int) -> Iterator[None]:
    """Within it every product with the vocabulary runs on this kernel, as if the GPU had so many SMs."""
    launch_of = launch.launch_of

    def launch_of_this(target, *arguments):
        return launch_of(target._replace(num_sms=num_sms), *arguments, config)

    launches.forget()
    try:
        with mock.patch.object(launch, "launch_of", launch_of_this):
            yield
    finally:
        launches.forget()
