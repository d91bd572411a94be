"""Fakes of routing, plans, ways there and back, and the gate."""

import torch

from cute_kernels.moe import reference
from cute_kernels.moe.reference import Plan

SCORES = {"chosen": "softmax_of_topk", "softmax": "softmax", "sigmoid": "sigmoid"}


def route(static, logits, bias, given, indices, weights, eps, scale, num_ctas) -> None:
    spec = static["spec"]
    assert num_ctas >= 1 and logits.shape[1] == spec.num_experts and indices.shape[1] == spec.k
    assert (bias is not None) == spec.has_bias and (given is not None) == spec.replays
    groups = None if spec.groups == 1 else (spec.groups, spec.kept_groups)
    found = _route(spec, logits, eps, scale, bias=bias, groups=groups, indices=given)
    indices.copy_(found.indices)
    weights.copy_(found.weights)


def route_backward(static, dweights, logits, indices, dlogits, eps, scale, num_ctas) -> None:
    leaf = logits.detach().clone().requires_grad_()
    with torch.enable_grad():
        found = _route(static["spec"], leaf, eps, scale, indices=indices)
        dlogits.copy_(torch.autograd.grad(found.weights, leaf, dweights)[0])


def _route(spec, logits, eps, scale, **options):
    score = SCORES[spec.score]
    normalize = spec.normalize or spec.score == "chosen"
    return reference.route(logits, spec.k, score=score, normalize=normalize, eps=eps, scale=scale, **options)


def plan(static, indices, offs, slots, positions, counts) -> None:
    spec = static["spec"]
    found = reference.plan(indices.view(-1, 1), spec.num_experts, align=spec.align)
    for target, result in zip((offs, slots, positions, counts), found, strict=True):
        target.copy_(result.view(-1)[: len(target)])


def gather(static, x, slots, weights, other, out, dots, num_ctas) -> None:
    spec = static["spec"]
    assert (weights is not None) == spec.weighted and (dots is not None) == (other is not None) == spec.dots
    used = (slots >= 0)[:, None]
    safe = slots.clamp(min=0).long()
    rows = x[safe // spec.k].float()
    out.copy_(torch.where(used, rows if weights is None else rows * weights[safe][:, None], 0.0))
    if dots is not None:
        found = (rows.double() * other.double()).sum(1).float()
        dots[safe[used[:, 0]]] = found[used[:, 0]]


def combine(static, rows, positions, weights, y, num_ctas) -> None:
    spec = static["spec"]
    assert (weights is not None) == spec.weighted and positions.shape[1] == spec.k
    nothing = torch.zeros(0, dtype=torch.int32)
    slots = torch.zeros(len(rows), dtype=torch.int32)
    y.copy_(reference.combine(rows, Plan(nothing, slots, positions, nothing), weights))


def gate(static, z, h, num_ctas) -> None:
    h.copy_(_gate(static["spec"], z))


def gate_backward(static, dh, z, slots, weights, dz, h, dweights, num_ctas) -> None:
    spec = static["spec"]
    assert (weights is not None) == (h is not None) == (dweights is not None) == spec.weighted
    gradient = dh.float()
    if weights is not None:
        used, safe = (slots >= 0)[:, None], slots.clamp(min=0).long()
        factor = torch.where(used, weights[safe][:, None], 0.0)
        value = _gate(spec, z)
        h.copy_(torch.where(used, value.float() * factor, 0.0))
        dweights[safe[used[:, 0]]] = (gradient.double() * value.double()).sum(1).float()[used[:, 0]]
        gradient = gradient * factor
    leaf = z.float().requires_grad_()
    with torch.enable_grad():
        dz.copy_(torch.autograd.grad(_gate(spec, leaf), leaf, gradient)[0])


def _gate(spec, z):
    return reference.swiglu(z, interleaved=spec.interleaved, limit=spec.limit, alpha=spec.alpha)
