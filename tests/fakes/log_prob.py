"""Fakes of linear_log_prob's kernels."""

import math

import torch
from torch import Tensor

from cute_kernels.log_prob.config import vocabulary_tile


def _logits(static: dict, x: Tensor, weight: Tensor) -> Tensor:
    """In fp32, of fp64 sums: what those owe to the number of rows is gone with the rounding. As fp64."""
    weight = weight if static["spec"].weight_major == "k" else weight.t()
    return (x.double() @ weight.double().t()).float().double()


def _capped(static: dict, logits: Tensor, slope: float | None) -> Tensor:
    assert static["spec"].has_softcap == (slope is not None)
    return logits if slope is None else (slope * logits).tanh().float().double()


def log_prob_statistics(static, x, weight, target, statistics, target_logit, kept, scale, slope, num_ctas) -> None:
    logits, width = _logits(static, x, weight)[: len(target)], vocabulary_tile(static["arch"])
    assert static["spec"].keeps_logits == (kept is not None)
    if kept is not None:
        kept.copy_(logits)
    logits = _capped(static, logits, slope)
    assert statistics.shape == (3, -(-logits.shape[1] // width), len(target)) and num_ctas >= 1
    for tile, part in enumerate(logits.split(width, 1)):
        largest = part.amax(1)
        u = scale * (part - largest[:, None])
        statistics[:, tile] = torch.stack((largest, u.exp2().sum(1), (u * u.exp2()).sum(1)))
    good = (target >= 0) & (target < logits.shape[1])
    target_logit[good] = logits[good].gather(1, target[good].long()[:, None]).squeeze(1).float()


def log_prob(
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


def log_prob_gradient(
    static,
    x,
    weight,
    target,
    row_statistics,
    g,
    h,
    dlogits,
    ignore_index,
    vocabulary,
    first,
    scale,
    inverse,
    slope,
    num_ctas,
) -> None:
    logits = _logits(static, x, weight)
    rows = target, row_statistics, g, h
    dlogits.copy_(_gradients(static, logits, *rows, ignore_index, vocabulary, first, scale, inverse, slope))


def log_prob_kept_gradient(static, target, row_statistics, g, h, logits, ignore_index, scale, inverse, slope) -> None:
    rows = target, row_statistics, g, h
    constants = ignore_index, logits.shape[1], 0, scale, inverse, slope
    logits.copy_(_gradients(static, logits.double(), *rows, *constants))


def _gradients(
    static, logits, target, row_statistics, g, h, ignore_index, vocabulary, first, scale, inverse, slope
) -> Tensor:
    target = target.long()  # as in log_prob
    largest, log2_total, entropy = row_statistics.double().t().unsqueeze(-1)
    logits = _capped(static, logits, slope)
    u = scale * (logits - largest) - log2_total
    p, column = u.exp2(), torch.arange(first, first + logits.shape[1])
    factor = g.double()[:, None]
    if static["spec"].has_dentropy:
        factor = factor + h[:, None] * (math.log(2) * u + entropy)
    gradient = inverse * ((column == target[:, None]) * g[:, None] - p * factor)
    if slope is not None:
        gradient = gradient * (1 - logits**2)
    counts = (target >= 0) & (target < vocabulary) & (target != ignore_index)
    return torch.where(counts[:, None], gradient, 0.0)
