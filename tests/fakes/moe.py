"""Fakes of routing, plans, ways there and back, and the gate."""

import math

import torch

from cute_kernels.moe import reference
from cute_kernels.moe.reference import Plan

SCORES = {"chosen": "softmax_of_topk", "softmax": "softmax", "sigmoid": "sigmoid"}


def route(static, logits, bias, given, indices, weights, eps, scale) -> None:
    spec = static["spec"]
    assert logits.shape[1] == spec.num_experts and indices.shape[1] == spec.k
    assert (bias is not None) == spec.has_bias and (given is not None) == spec.replays
    groups = None if spec.groups == 1 else (spec.groups, spec.kept_groups)
    found = _route(spec, logits, eps, scale, bias=bias, groups=groups, indices=given)
    indices.copy_(found.indices)
    weights.copy_(found.weights)


def route_backward(static, dweights, logits, indices, dlogits, eps, scale) -> None:
    spec = static["spec"]
    valid = (indices >= 0) & (indices < spec.num_experts)
    places = indices.clamp(0, spec.num_experts - 1).long()
    p = logits.sigmoid() if spec.score == "sigmoid" else logits.softmax(1)
    scores = p.gather(1, places)
    if spec.score == "chosen":
        scores = logits.gather(1, places).masked_fill(~valid, -float("inf")).softmax(1)
    scores = scores.masked_fill(~valid, 0.0)
    gradient = (dweights * scale).masked_fill(~valid, 0.0)
    if spec.normalize or spec.score == "chosen":
        total = scores.sum(1, keepdim=True) + eps
        gradient = (gradient - (gradient * scores / total).sum(1, keepdim=True)) / total
    gradient = gradient * scores * ((1 - scores) if spec.score == "sigmoid" else 1)
    dlogits.zero_().scatter_add_(1, places, gradient)
    if spec.score == "softmax":
        dlogits -= gradient.sum(1, keepdim=True) * p


def _route(spec, logits, eps, scale, **options):
    score = SCORES[spec.score]
    normalize = spec.normalize or spec.score == "chosen"
    return reference.route(logits, spec.k, score=score, normalize=normalize, eps=eps, scale=scale, **options)


def plan(static, indices, table, offs, slots, positions, counts, of_warp) -> None:
    spec, blocks = static["spec"], 1 if table is None else table.shape[0]
    assert (table is not None) == spec.has_table and of_warp % 32 == 0
    assert 1024 // 32 * of_warp * blocks >= len(indices) > 1024 // 32 * of_warp * (blocks - 1)
    found = reference.plan(indices.view(-1, 1), spec.num_experts, align=spec.align)
    for target, result in zip((offs, slots, positions, counts), found, strict=True):
        target.copy_(result.view(-1)[: len(target)])


def gather(static, x, slots, positions, weights, other, out, dots) -> None:
    spec = static["spec"]
    assert (weights is not None) == spec.weighted and (dots is not None) == (other is not None) == spec.dots
    assert positions.shape == (len(x), spec.k)
    token, slot = (positions >= 0).nonzero(as_tuple=True)
    places, rows = positions[token, slot].long(), x[token].float()
    out[slots < 0] = 0
    out[places] = (rows if weights is None else rows * weights[token, slot][:, None]).to(out.dtype)
    if dots is not None:
        dots[token, slot] = (rows.double() * other[places].double()).sum(1).float()


def combine(static, rows, positions, weights, experts, bias, y) -> None:
    spec = static["spec"]
    assert (bias is not None) == (experts is not None) == spec.biased
    if bias is not None:
        used, added = positions >= 0, torch.zeros(rows.shape)
        added[positions[used].long()] = bias[experts[used].long()].float()
        rows = rows.float() + added
    assert (weights is not None) == spec.weighted and positions.shape[1] == spec.k
    nothing = torch.zeros(0, dtype=torch.int32)
    slots = torch.zeros(len(rows), dtype=torch.int32)
    y.copy_(reference.combine(rows, Plan(nothing, slots, positions, nothing), weights))


def gate(static, z, slots, experts, bias, h) -> None:
    spec = static["spec"]
    assert (slots is not None) == spec.biased
    h.copy_(_gate(spec, _biased(spec, z, slots, experts, bias)))


def gate_backward(static, dh, z, slots, weights, experts, bias, dz, h, dweights) -> None:
    spec = static["spec"]
    assert (weights is not None) == (h is not None) == (dweights is not None) == spec.weighted
    gradient, z = dh.float(), _biased(spec, z, slots, experts, bias)
    if weights is not None:
        used, safe = (slots >= 0)[:, None], slots.clamp(min=0).long()
        factor = torch.where(used, weights[safe][:, None], 0.0)
        value = _gate(spec, z).to(h.dtype)
        h.copy_(torch.where(used, value.float() * factor, 0.0))
        dweights[safe[used[:, 0]]] = (gradient.double() * value.double()).sum(1).float()[used[:, 0]]
        gradient = gradient * factor
    if spec.function == "silu":
        g, u = z, torch.ones_like(z)
    else:
        g, u = (z[:, ::2], z[:, 1::2]) if spec.interleaved else z.chunk(2, 1)
    inside = torch.ones_like(g), torch.ones_like(u)
    if spec.limit is not None:
        inside = g <= spec.limit, u.abs() <= spec.limit
        g, u = g.clamp(max=spec.limit), u.clamp(-spec.limit, spec.limit)
    alpha = 1.0 if spec.alpha is None else spec.alpha
    u = u if spec.alpha is None else u + 1
    s = torch.sigmoid(alpha * g)
    slope = s * (1 + alpha * g * (1 - s))
    if spec.function == "geglu":
        s = torch.special.ndtr(g)
        slope = s + g * torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
    dg, du = gradient * u * slope * inside[0], gradient * g * s * inside[1]
    if spec.function == "silu":
        dz.copy_(dg)
    else:
        dz.copy_(torch.stack((dg, du), 2).flatten(1) if spec.interleaved else torch.cat((dg, du), 1))


def _biased(spec, z, slots, experts, bias):
    """z in fp32, with the bias."""
    assert (bias is not None) == (experts is not None) == spec.biased
    z = z.detach().float().clone()
    if bias is not None:
        used = slots >= 0
        z[used] += bias[experts[slots[used].long()].long()].float()
    return z


def _gate(spec, z):
    return reference.activated(z, spec.function, spec.interleaved, spec.limit, spec.alpha)
