"""The specification of the experts' functions."""

import math

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import moe
from tests.moe.cases import FP32, ROUTERS, ties

FP64 = torch.float64


@pytest.mark.parametrize("router", ROUTERS, ids=str)
def test_route_chooses_the_best(router, generator):
    """Whatever is not chosen is no better, of equals later."""
    options = router.options(generator)
    for logits in (torch.randn(50, router.experts, generator=generator), ties(50, router.experts, generator)):
        indices, weights = moe.route(logits, router.k, **options)
        scores = (torch.sigmoid(logits) if router.score == "sigmoid" else logits) + options.get("bias", 0.0)
        assert (indices.diff() > 0).all() and weights.dtype is FP32
        if router.groups is not None:
            groups, kept = router.groups
            size = router.experts // groups
            assert all(len(set(row)) <= kept for row in (indices // size).tolist())
            continue
        for row, chosen in zip(scores.tolist(), indices.tolist(), strict=True):
            order = sorted(range(router.experts), key=lambda e: (-row[e], e))
            assert sorted(order[: router.k]) == chosen


def test_weights_of_models():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    p = logits.softmax(1)[0, 2:]
    torch.testing.assert_close(moe.route(logits, 2).weights[0], p / p.sum())
    torch.testing.assert_close(moe.route(logits, 2, normalize=False, scale=16.0).weights[0], 16 * p)
    torch.testing.assert_close(moe.route(logits, 2, score="softmax_of_topk").weights[0], logits[0, 2:].softmax(0))
    s = logits.sigmoid()[0]
    found = moe.route(logits, 2, score="sigmoid", bias=torch.tensor([9.0, 0, 0, 0]), eps=1e-20, scale=2.5)
    assert found.indices.tolist() == [[0, 3]]
    torch.testing.assert_close(found.weights[0], 2.5 * s[[0, 3]] / (s[0] + s[3]))


@pytest.mark.parametrize("router", [r for r in ROUTERS if r.experts < 100], ids=str)
def test_gradients_of_weights(router, generator):
    logits = torch.randn(3, router.experts, generator=generator, dtype=FP64).requires_grad_()
    options = router.options(generator)
    assert torch.autograd.gradcheck(lambda t: moe.route(t, router.k, **options).weights, logits)


def test_plan_by_hand():
    plan = moe.plan(torch.tensor([[2, 0], [5, 2], [2, -1]]), 4, align=2)
    assert plan.offs.tolist() == [2, 2, 6, 6] and plan.counts.tolist() == [1, 0, 3, 0]
    assert plan.slots.tolist() == [1, -1, 0, 3, 4, -1, -1, -1, -1, -1]
    assert plan.positions.tolist() == [[2, 0], [-1, 3], [4, -1]]


def test_indices_beyond_int32():
    indices = torch.tensor([[2**32 + 1, 2], [-(2**32), 0]])
    assert moe.route(torch.zeros(2, 3), 2, indices=indices).indices.tolist() == [[2, 2**31 - 1], [-(2**31), 0]]
    assert moe.plan(indices, 3).counts.tolist() == [1, 0, 1]


OPTIONS = [
    {},
    {"interleaved": True},
    {"limit": 1.0, "alpha": 1.702},
    {"activation": "swiglu_oai", "interleaved": True},
    {"activation": "geglu"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_the_layer(options, generator):
    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=FP64).requires_grad_()

    leaves = randn(7, 6), randn(7, 5), randn(5, 8, 6), randn(5, 6, 4), randn(5, 8), randn(5, 6)

    def call(x, logits, gate_up, down, *biases):
        given = dict(zip(("gate_up_bias", "down_bias"), biases, strict=True))
        return moe.experts(x, moe.route(logits, 2), gate_up, down, **options, **given)

    assert torch.autograd.gradcheck(call, leaves)


def test_the_layer_is_a_loop_over_experts(generator):
    x, logits = torch.randn(9, 6, generator=generator), torch.randn(9, 4, generator=generator)
    gate_up, down = torch.randn(4, 16, 6, generator=generator), torch.randn(4, 6, 8, generator=generator)
    routing = moe.route(logits, 2)
    wanted = torch.zeros_like(x)
    for t in range(9):
        for e, weight in zip(routing.indices[t].tolist(), routing.weights[t], strict=True):
            g, u = (gate_up[e] @ x[t]).chunk(2)
            wanted[t] += weight * (down[e] @ (F.silu(g) * u))
    torch.testing.assert_close(moe.experts(x, routing, gate_up, down), wanted)
    biases = {
        "gate_up_bias": torch.randn(4, 16, generator=generator),
        "down_bias": torch.randn(4, 6, generator=generator),
    }
    given = torch.zeros_like(x)
    for t in range(9):
        for e, weight in zip(routing.indices[t].tolist(), routing.weights[t], strict=True):
            g, u = (gate_up[e] @ x[t] + biases["gate_up_bias"][e]).chunk(2)
            given[t] += weight * (down[e] @ (F.gelu(g) * u) + biases["down_bias"][e])
    torch.testing.assert_close(moe.experts(x, routing, gate_up, down, **biases, activation="geglu"), given)
    turned = moe.experts(x, routing, gate_up.mT.contiguous(), down.mT.contiguous(), transposed=True)
    torch.testing.assert_close(turned, wanted)


def test_main_grads():
    x, routing = torch.ones(2, 4), moe.route(torch.zeros(2, 2), 1)
    weights = [torch.ones(2, 8, 4), torch.ones(2, 4, 4)]
    plain = [t.clone().requires_grad_() for t in weights]
    moe.experts(x, routing, *plain).sum().backward()
    held = [t.clone().requires_grad_() for t in weights]
    for t in held:
        t.main_grad = torch.ones_like(t)
    moe.experts(x, routing, *held).sum().backward()
    for a, b in zip(plain, held, strict=True):
        assert b.grad is None
        torch.testing.assert_close(b.main_grad, a.grad + 1)


def test_balance_by_hand_and_as_transformers():
    """Experts that have the same: k. transformers' loss, of all tokens and of some."""
    logits = torch.eye(4)
    torch.testing.assert_close(moe.load_balancing_loss(logits, moe.route(logits, 1)), torch.tensor(1.0))
    torch.testing.assert_close(moe.load_balancing_loss(logits, moe.route(logits, 4)), torch.tensor(4.0))
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    torch.manual_seed(0)
    layers = torch.randn(3, 10, 8).unbind()
    together, mask = torch.cat(layers), torch.rand(10) > 0.4
    routing = moe.route(together, 2)
    for given, wanted in ((None, None), (mask.repeat(3), mask[None].int())):
        exact = mixtral.load_balancing_loss_func(layers, 8, 2, wanted)
        torch.testing.assert_close(moe.load_balancing_loss(together, routing, mask=given), exact)


def test_z_loss_by_hand():
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    torch.testing.assert_close(moe.z_loss(logits).item(), (math.log(2) ** 2 + (1 + math.log(2)) ** 2) / 2)


def test_logits_by_hand():
    x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    found = moe.router_logits(x.bfloat16(), weight, torch.tensor([0.5, 0.0]))
    assert found.tolist() == [[11.5, 17.0]] and found.dtype is FP32
