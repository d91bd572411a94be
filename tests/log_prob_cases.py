"""What the tests of linear_log_prob share: inputs, an fp64 oracle with bounds, a stand-in for the GPU."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from cute_kernels.gemm import launch_log_prob as launch
from cute_kernels.gemm.config import vocabulary_tile
from tests.entry import check_entry
from tests.fakes import fake_kernels
from tests.gemm_cases import BF16, FP32_EPS, Exact, check, randn, steps_of
from tests.norm_cases import name_of, strided

IGNORED = -100


@dataclass(frozen=True)
class Case:
    """One call on (m, k) tokens and a vocabulary of v; one target in seven is ignored."""

    m: int
    v: int
    k: int
    dtype: torch.dtype = BF16
    temperature: float = 1.0
    index: torch.dtype = torch.int64
    weight_by_columns: bool = False
    gap: int = 0  # elements between the rows of x and weight, NaN
    entropy: bool = True  # whether it has a gradient
    exact: bool = False  # logits without rounding, far from 0, and likely targets; see exact_inputs

    def __str__(self) -> str:
        words = [f"{self.m}x{self.v}x{self.k}", name_of(self.dtype)]
        words += [f"temperature_{self.temperature}"] * (self.temperature != 1.0)
        words += ["exact"] * self.exact
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
    results = function(inputs.x, inputs.weight, inputs.target, temperature=case.temperature)
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
    log_p = torch.log_softmax(x @ weight.t() / case.temperature, -1)
    p, log_prob = log_p.exp(), log_p.gather(1, target[:, None]).squeeze(1)
    entropy = -(p * log_p).sum(1)
    h = h if case.entropy else torch.zeros_like(h)
    one = torch.zeros_like(p).scatter_(1, target[:, None], 1.0)
    spread = log_p + entropy[:, None]
    dz = (g[:, None] * (one - p) - h[:, None] * p * spread) * counts[:, None] / case.temperature
    terms = x.abs() @ weight.abs().t() / case.temperature
    logit_error = 0 * entropy if case.exact else (steps_of(case.k) + 8) * FP32_EPS * terms.amax(1)
    size = (g[:, None].abs() * (one + p) + h[:, None].abs() * p * (log_p.abs() + entropy[:, None])) / case.temperature
    info = torch.finfo(case.dtype)
    rounding = 0.5 * info.eps * dz.abs().clamp_min(info.smallest_normal)
    p_error = (4 * logit_error + 16 * FP32_EPS * (1 + entropy))[:, None] + 2 * FP32_EPS * log_p.abs()
    # A p below the least normal number is 0 to the kernels
    flushed = 2.0**-126 * (g[:, None].abs() + h[:, None].abs() * (log_p.abs() + entropy[:, None])) / case.temperature
    margin = rounding + size * p_error + flushed
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
def log_prob_stand_in(arch: str = "sm_90a", computes: bool = True) -> Iterator[list[tuple]]:
    """``fake_kernels`` with these kernels, too, in plain torch; yields all builder calls."""
    from cute_kernels.gemm import kernel_log_prob as kernels

    def replaced(name: str, compute: Callable, jobs: list) -> Callable:
        builder = getattr(kernels, name)

        def build(*arguments):
            jobs.append((builder, arguments))
            static, program = inspect.signature(builder.build).bind(*arguments).arguments, builder.build(*arguments)

            def function(*values):
                check_entry(program, values)
                if computes:
                    compute(static, *values)

            return function

        return build

    functions = {"log_prob_statistics": _statistics, "log_prob": _log_prob, "log_prob_gradient": _gradient}
    with fake_kernels(arch, computes) as jobs, contextlib.ExitStack() as stack:
        for name, compute in functions.items():
            stack.enter_context(mock.patch.object(kernels, name, replaced(name, compute, jobs)))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: True)))
        stack.enter_context(mock.patch.object(launch, "arch_of", lambda index: arch))
        stack.enter_context(mock.patch.object(launch, "sm_count", lambda index: 132))
        library = stack.enter_context(torch.library._scoped_library("cute_kernels", "IMPL"))
        library.impl("log_prob_forward", launch.run_forward, "CPU")
        library.impl("log_prob_backward", launch.run_backward, "CPU")
        yield jobs


def _logits(static: dict, x: Tensor, weight: Tensor) -> Tensor:
    """In fp32, of fp64 sums: what those owe to the number of rows is gone with the rounding. As fp64."""
    weight = weight if static["weight_major"] == "k" else weight.t()
    return (x.double() @ weight.double().t()).float().double()


def _statistics(static, x, weight, target, statistics, target_logit, scale, num_ctas) -> None:
    logits, width = _logits(static, x, weight)[: len(target)], vocabulary_tile(static["arch"])
    assert statistics.shape == (3, -(-logits.shape[1] // width), len(target)) and num_ctas >= 1
    for tile, part in enumerate(logits.split(width, 1)):
        largest = part.amax(1)
        u = scale * (part - largest[:, None])
        statistics[:, tile] = torch.stack((largest, u.exp2().sum(1), (u * u.exp2()).sum(1)))
    good = (target >= 0) & (target < logits.shape[1])
    target_logit[good] = logits[good].gather(1, target[good].long()[:, None]).squeeze(1).float()


def _log_prob(
    static, statistics, target, target_logit, log_prob, entropy, row_statistics, vocabulary, ignore_index, scale
) -> None:
    target = target.long()  # torch would compare int32 with an ignore_index modulo 2^32
    of_tiles, total, moment = statistics.double()
    largest = of_tiles.amax(0)
    shift = scale * (of_tiles - largest)
    moment = (shift.exp2() * (shift * total + moment)).sum(0)
    total = (shift.exp2() * total).sum(0)
    log_prob.copy_(math.log(2) * (scale * (target_logit - largest) - total.log2()))
    entropy.copy_(math.log(2) * (total.log2() - moment / total))
    for result in (log_prob, entropy):
        result[(target < 0) | (target >= vocabulary)] = math.nan
        result[target == ignore_index] = 0.0
    row_statistics.copy_(torch.stack((largest, total.log2(), entropy.double()), 1))


def _gradient(
    static, x, weight, target, row_statistics, g, h, dlogits, ignore_index, vocabulary, first, scale, inverse, num_ctas
) -> None:
    target = target.long()  # as in _log_prob
    largest, log2_total, entropy = row_statistics.double().t().unsqueeze(-1)
    u = scale * (_logits(static, x, weight) - largest) - log2_total
    p, column = u.exp2(), torch.arange(first, first + dlogits.shape[1])
    factor = g.double()[:, None]
    if static["has_dentropy"]:
        factor = factor + h[:, None] * (math.log(2) * u + entropy)
    gradient = inverse * ((column == target[:, None]) * g[:, None] - p * factor)
    counts = (target >= 0) & (target < vocabulary) & (target != ignore_index)
    dlogits.copy_(torch.where(counts[:, None], gradient, 0.0))
