"""Routing, plans, ways there and back, the gate, and the layer on a GPU: against the reference, and bit by bit.

Most of these run on the CPU, too, over fake kernels: test_dispatch.py.
"""

import itertools
import math

import pytest
import torch

from cute_kernels import check_invariance, moe, nn
from cute_kernels.moe import reference
from tests.gemm.cases import Recorder
from tests.moe.cases import (
    BF16,
    FP16,
    FP32,
    ROUTERS,
    Router,
    assert_same_bits,
    make_layer,
    randn,
    run_layer,
    same_bits,
    ties,
)

TOKENS = 300


# Routing


@pytest.mark.parametrize("router", ROUTERS, ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["random", "ties"])
def test_route(router, tied, generator):
    """The reference's experts, tied ones, too, and its weights; and their gradients."""
    logits = randn(TOKENS, router.experts, generator=generator) * 2
    if tied:
        logits = ties(TOKENS, router.experts, generator)
        logits[:, -1] = 0.5  # one is finite
    options = router.options(generator)
    leaf = logits.clone().requires_grad_()
    found = moe.route(leaf, router.k, **options)
    # Selection in fp32 as the kernel has it: a sum of two scores, or a sigmoid, may tie there alone
    wanted_indices = reference.route(logits, router.k, **options).indices
    same = (found.indices == wanted_indices).all(1)
    assert same.float().mean() >= (1.0 if router.score != "sigmoid" and router.groups is None else 0.99)
    wide = {"score": router.score, "normalize": router.normalize, "eps": router.eps, "scale": router.scale}
    exact_leaf = logits.double().requires_grad_()
    exact = moe.route(exact_leaf, router.k, **wide, indices=found.indices, backend="reference")
    torch.testing.assert_close(found.weights.double(), exact.weights, atol=1e-6, rtol=2e-5, equal_nan=True)
    assert found.indices.dtype is torch.int32 and (found.indices.diff() > 0).all()
    dweights = randn(TOKENS, router.k, generator=generator)
    found.weights.backward(dweights)
    exact.weights.backward(dweights.double())
    assert not leaf.grad.isnan().any()
    torch.testing.assert_close(leaf.grad.double(), exact_leaf.grad, atol=3e-6 * router.scale, rtol=1e-4)


def test_nan_and_signs_of_zero(generator):
    logits = torch.tensor([[0.0, math.nan, 1.0, 2.0], [-0.0, 0.0, -1.0, 0.0], [0.0, -0.0, -0.0, 5.0]])
    indices, weights = moe.route(logits.to(generator.device), 2)
    assert indices.tolist() == [[0, 1], [0, 1], [0, 3]]
    assert weights[0].isnan().all() and weights[1].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("router", [r for r in ROUTERS if not r.biased and r.groups is None], ids=str)
def test_replay(router, generator):
    """The same experts in any order give the same bits; unlikely ones have gradients that are not zero."""
    logits = randn(TOKENS, router.experts, generator=generator) * 2
    options = router.options(generator)
    found = moe.route(logits, router.k, **options)
    order = torch.argsort(randn(TOKENS, router.k, generator=generator), 1)
    for dtype in (torch.int32, torch.int64):
        again = moe.route(logits, router.k, **options, indices=found.indices.gather(1, order).to(dtype))
        assert_same_bits(again.indices, found.indices)
        assert_same_bits(again.weights, found.weights)
    if router.k < router.experts:
        leaf = logits.clone().requires_grad_()
        worst = logits.argsort(1)[:, : router.k]
        weights = moe.route(leaf, router.k, **options, indices=worst).weights
        (weights * randn(TOKENS, router.k, generator=generator)).sum().backward()
        if router.k > 1 or not router.normalize:
            assert (leaf.grad.abs().amax(1) > 0).all()


def test_empty_slots(generator):
    logits = randn(4, 6, generator=generator)
    given = torch.tensor([[5, 6], [-1, 2], [6, 7], [0, 1]], device=logits.device)
    indices, weights = moe.route(logits, 2, indices=given)
    assert indices.tolist() == [[5, 6], [-1, 2], [6, 7], [0, 1]]
    assert weights[:2].tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize("router", [ROUTERS[1], ROUTERS[5], ROUTERS[3]], ids=str)
def test_a_token_does_not_know_its_batch(router, generator):
    logits, options = randn(TOKENS, router.experts, generator=generator), router.options(generator)
    whole = moe.route(logits, router.k, **options)
    for count in (1, 2, 7, 33, 256):
        index = torch.randperm(TOKENS, generator=generator, device=logits.device)[:count]
        for found, wanted in zip(moe.route(logits[index], router.k, **options), whole, strict=True):
            assert_same_bits(found, wanted[index])


FAR = [2**32 + 1, 2**31, -(2**32) + 2, 2**62, -(2**63), 2**63 - 1]


def test_indices_beyond_int32(generator, device):
    """They are empty slots, as -1 is, in each of the functions: not experts of other numbers."""
    far = torch.tensor(FAR, device=device)[:, None]
    here = torch.arange(6, device=device)[:, None]
    indices, wanted = torch.cat([here, far], 1), torch.cat([here, torch.full_like(far, -1)], 1)
    logits = randn(6, 6, generator=generator)
    for given in ({}, {"score": "sigmoid"}):
        found = moe.route(logits, 2, **given, indices=indices)
        assert_same_bits(found.weights.sum(1), moe.route(logits, 2, **given, indices=wanted).weights.sum(1))
        assert ((found.indices >= 0) & (found.indices < 6)).sum(1).eq(1).all()
        assert torch.equal(found.indices, reference.route(logits, 2, **given, indices=indices).indices)
    for a, b in zip(moe.plan(indices, 6), moe.plan(wanted, 6), strict=True):
        assert torch.equal(a, b)


def test_experts_of_indices_beyond_int32(generator, device):
    layer = make_layer(6, 64, 32, 6, generator, biased=True)
    far = torch.tensor(FAR, device=device)[:, None]
    here, weights = torch.arange(6, device=device)[:, None], torch.ones(6, 2, device=device)
    biases = {"gate_up_bias": layer.gate_up_bias, "down_bias": layer.down_bias}
    for activation in ("swiglu_oai", torch.relu):
        gate_up, given = layer.gate_up, biases
        if callable(activation):
            gate_up, given = gate_up[:, :32], biases | {"gate_up_bias": layer.gate_up_bias[:, :32].contiguous()}
        found, wanted = (
            moe.experts(
                layer.x, moe.Routing(torch.cat([here, other], 1), weights), gate_up, layer.down, **given,
                activation=activation,
            )
            for other in (far, torch.full_like(far, -1))
        )  # fmt: skip
        assert_same_bits(found, wanted)


# Plans and rows


@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize(
    "tokens, k, experts",
    [(1, 1, 1), (5, 2, 8), (256, 8, 256), (257, 8, 256), (2049, 4, 7), (3, 32, 1024), (200, 32, 1024), (16385, 8, 40)],
)
def test_plan(tokens, k, experts, align, generator):
    """Every integer, of slots some of which are empty, others twice the same."""
    indices = torch.randint(-1, experts + 1, (tokens, k), generator=generator, device=generator.device)
    for given in (indices, indices.int(), torch.zeros_like(indices)):
        found, wanted = moe.plan(given, experts, align=align), reference.plan(given, experts, align=align)
        for name, a, b in zip(found._fields, found, wanted, strict=True):
            assert a.dtype is torch.int32 and torch.equal(a, b), (name, (a != b).nonzero()[:5].tolist())


def test_plan_of_segments(generator):
    """A segment's rows of an expert are those of a plan of it alone."""
    indices = torch.randint(-1, 6, (50, 3), generator=generator, device=generator.device)
    ends = [9, 9, 31, 50]
    found = moe.plan(indices, 5, align=16, segments=torch.tensor(ends, device=indices.device))
    rows, begin = [[] for _ in range(5)], 0
    for end in ends:
        alone = moe.plan(indices[begin:end], 5, align=16)
        for e, (a, b) in enumerate(itertools.pairwise([0, *alone.offs.tolist()])):
            rows[e] += [s + 3 * begin if s >= 0 else -1 for s in alone.slots[a:b].tolist()]
        begin = end
    wanted = [s for of_expert in rows for s in of_expert]
    assert found.slots.tolist() == wanted + [-1] * (len(found.slots) - len(wanted))
    assert found.offs.tolist() == list(itertools.accumulate(map(len, rows)))
    assert torch.equal(found.counts, moe.plan(indices, 5).counts)
    places = found.positions.flatten()
    assert torch.equal(found.slots[places.long()][places >= 0].long(), (places >= 0).nonzero().flatten())
    assert torch.equal(places >= 0, ((indices >= 0) & (indices < 5)).flatten())


def slots_of(tokens, k, experts, generator):
    """Distinct experts of each token, some slots empty, one token without any."""
    indices = torch.rand(tokens, experts, generator=generator, device=generator.device).argsort(1)[:, :k]
    indices[::5, 0] = -1
    indices[tokens // 2] = experts
    return indices


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(
    "tokens, k, experts, hidden",
    [(37, 2, 8, 64), (300, 8, 128, 2048), (5, 1, 3, 8), (9, 6, 64, 1400), (13, 32, 40, 2056), (7, 20, 32, 8200)],
)
def test_rows(tokens, k, experts, hidden, dtype, generator):
    """permute copies; combine's bits are the reference's, which names each operation."""
    plan = moe.plan(slots_of(tokens, k, experts, generator), experts, align=16)
    x = randn(tokens, hidden, generator=generator, dtype=dtype)
    rows = moe.permute(x, plan)
    assert_same_bits(rows, reference.permute(x, plan))
    rows = randn(*rows.shape, generator=generator, dtype=dtype)
    rows[plan.slots < 0] = float("nan")
    weights = randn(tokens, k, generator=generator)
    for given in (weights, None):
        assert_same_bits(moe.combine(rows, plan, given), reference.combine(rows, plan, given))


@pytest.mark.parametrize("tokens, k, experts, hidden", [(61, 4, 16, 136), (11, 20, 32, 2056)])
def test_gradients_of_rows(tokens, k, experts, hidden, generator):
    plan = moe.plan(slots_of(tokens, k, experts, generator), experts, align=16)
    x = randn(tokens, hidden, generator=generator, dtype=BF16).requires_grad_()
    dout = randn(len(plan.slots), hidden, generator=generator, dtype=BF16)
    (dx,) = torch.autograd.grad(moe.permute(x, plan), x, dout)
    assert_same_bits(dx, moe.combine(dout, plan))
    rows = randn(len(plan.slots), hidden, generator=generator, dtype=BF16).requires_grad_()
    weights = randn(tokens, k, generator=generator).requires_grad_()
    dy = randn(tokens, hidden, generator=generator, dtype=BF16)
    drows, dweights = torch.autograd.grad(moe.combine(rows, plan, weights), (rows, weights), dy)
    wide = [t.detach().double().requires_grad_() for t in (rows, weights)]
    exact = torch.autograd.grad(reference.combine(wide[0], plan, wide[1]), wide, dy.double())
    torch.testing.assert_close(drows.double(), exact[0], atol=0, rtol=2**-8)
    torch.testing.assert_close(dweights.double(), exact[1], atol=1e-4, rtol=1e-5)
    assert not dweights[plan.positions < 0].any() and not drows[plan.slots < 0].any()
    (only,) = torch.autograd.grad(moe.combine(rows.detach(), plan, weights), weights, dy)
    assert_same_bits(only, dweights)


def test_combine_does_not_see_other_tokens(generator):
    """Nor the order of its slots."""
    indices = slots_of(40, 4, 16, generator)
    plan, weights = moe.plan(indices, 16), randn(40, 4, generator=generator)
    rows = randn(len(plan.slots), 64, generator=generator, dtype=BF16)
    whole = moe.combine(rows, plan, weights)
    order = torch.tensor([2, 0, 3, 1], device=rows.device)
    other = moe.plan(indices[:, order], 16)
    moved = rows.new_full((len(plan.slots), 64), float("nan"))
    used = plan.positions >= 0
    moved[other.positions[used[:, order]].long()] = rows[plan.positions[:, order][used[:, order]].long()]
    assert_same_bits(moe.combine(moved, other, weights[:, order]), whole)
    alone = moe.plan(indices[7:8], 16)
    mine = plan.positions[7]
    few = rows.new_zeros(4, 64)
    few[alone.positions[0][mine >= 0].long()] = rows[mine[mine >= 0].long()]
    assert_same_bits(moe.combine(few, alone, weights[7:8]), whole[7:8])


# The gate


GATES = [{}, {"interleaved": True}, {"limit": 7.0, "alpha": 1.702, "interleaved": True}, {"limit": 0.5, "alpha": 1.702}]


@pytest.mark.parametrize("options", GATES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_swiglu(dtype, options, generator):
    for rows, width in ((65, 768), (3, 8), (300, 1408)):
        z = (2 * randn(rows, 2 * width, generator=generator)).to(dtype)
        dh = randn(rows, width, generator=generator, dtype=dtype)
        z.requires_grad_()
        h = moe.swiglu(z, **options)
        (dz,) = torch.autograd.grad(h, z, dh)
        wide = z.detach().double().requires_grad_()
        exact = reference.swiglu(wide, **options)
        (exact_dz,) = torch.autograd.grad(exact, wide, dh.double())
        eps = max(torch.finfo(dtype).eps, 1e-6)
        torch.testing.assert_close(h.double(), exact, atol=4 * eps * 0.01 + 1e-6, rtol=eps)
        torch.testing.assert_close(dz.double(), exact_dz, atol=4 * eps * 0.01 + 1e-6, rtol=eps)
        assert_same_bits(moe.swiglu(z[1:2].detach(), **options), h[1:2].detach())


# The layer


@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_experts(dtype, align, generator):
    """As near to fp64 as torch's own arithmetic in this dtype."""
    layer = make_layer(97, 136, 72, 8, generator, dtype)
    found = run_layer(layer, 2, align=align)
    plain = run_layer(layer, 2, backend="reference")
    wide = layer.changed(torch.Tensor.double)
    exact = run_layer(wide, 2, backend="reference")
    for name, result in found.items():
        error, of_torch = ((t.double() - exact[name]).norm().item() for t in (result, plain[name]))
        assert error <= 1.2 * of_torch + 1e-12, f"{name}: {error:.3e}, plain torch {of_torch:.3e}"


def test_a_token_of_a_layer_does_not_know_its_batch(generator):
    """y, dx and dlogits alone, in batches, at other places, beside others of the same experts."""
    layer = make_layer(200, 136, 72, 16, generator)
    whole = run_layer(layer, 4)
    for count in (1, 2, 16, 130):
        index = torch.randperm(200, generator=generator, device=layer.x.device)[:count]
        index[-1] = 199
        found = run_layer(layer, 4, index)
        for name in ("y", "dx", "dlogits"):
            assert_same_bits(found[name], whole[name][index], f"{name} of {count}")
    crowd = run_layer(layer.changed(torch.Tensor.clone), 4)
    for name, result in whole.items():
        assert_same_bits(crowd[name], result, name)
    same = layer.logits[3:4].expand(200, -1).contiguous()
    beside = run_layer(type(layer)(layer.x, same, layer.gate_up, layer.down, layer.dy), 4)
    for name in ("y", "dx", "dlogits"):
        assert_same_bits(beside[name][3], whole[name][3], name)


def test_a_module_by_check_invariance(generator, device):
    """Alone, elsewhere, beside others, NaN among them, and padded: results, gradients, the router's too."""
    torch.manual_seed(0)
    model = nn.MoE(64, 32, 8, 2, score="sigmoid", eps=1e-20, device=device, dtype=BF16)
    report = check_invariance(model, randn(40, 64, generator=generator, dtype=BF16))
    assert report, report


def test_padding_of_experts_changes_no_bit(generator):
    layer = make_layer(200, 136, 72, 16, generator)
    one, other = run_layer(layer, 4, align=1), run_layer(layer, 4, align=16)
    for name, result in one.items():
        assert_same_bits(other[name], result, name)


def test_layouts_of_weights(generator):
    """Transposed, and interleaved: the same bits."""
    layer = make_layer(60, 136, 72, 8, generator)
    wanted = run_layer(layer, 2)
    turned = type(layer)(layer.x, layer.logits, layer.gate_up.mT.contiguous(), layer.down.mT.contiguous(), layer.dy)
    found = run_layer(turned, 2, transposed=True)
    assert_same_bits(found["y"], wanted["y"])
    assert_same_bits(found["dgate_up"], wanted["dgate_up"].mT.contiguous())
    pairs = layer.gate_up.unflatten(1, (2, 72)).transpose(1, 2).flatten(1, 2).contiguous()
    mixed = run_layer(type(layer)(layer.x, layer.logits, pairs, layer.down, layer.dy), 2, interleaved=True)
    for name in ("y", "dx", "dlogits", "ddown"):
        assert_same_bits(mixed[name], wanted[name], name)


def test_main_grads(generator, device):
    layer = make_layer(60, 136, 72, 8, generator)
    wanted = run_layer(layer, 2)
    first, second = (t.clone().requires_grad_() for t in (layer.gate_up, layer.down))
    first.main_grad, second.main_grad = (torch.zeros_like(t, dtype=FP32) for t in (first, second))
    routing = moe.route(layer.logits, 2)
    moe.experts(layer.x, routing, first, second).backward(layer.dy)
    assert first.grad is second.grad is None
    assert_same_bits(first.main_grad.to(BF16), wanted["dgate_up"])
    assert_same_bits(second.main_grad.to(BF16), wanted["ddown"])
    with torch.no_grad():
        assert_same_bits(moe.experts(layer.x, routing, first, second), wanted["y"])


def test_segments(generator):
    """Calls with a segment each into main_grad: the bits of one call with these segments, but not of one without."""
    layer, ends = make_layer(70, 136, 72, 8, generator), [0, 13, 14, 46, 70]
    segments = torch.tensor(ends[1:], dtype=torch.int32, device=layer.x.device)

    def gradients(calls):
        weights = [t.clone().requires_grad_() for t in (layer.gate_up, layer.down)]
        for t in weights:
            t.main_grad = torch.linspace(-1, 1, t.numel(), device=t.device).view_as(t).contiguous()
        for part, given in calls:
            moe.experts(layer.x[part], moe.route(layer.logits[part], 2), *weights, segments=given).backward(
                layer.dy[part]
            )
        return [t.main_grad for t in weights]

    everything = slice(None)
    parts = gradients([(slice(a, b), None) for a, b in itertools.pairwise(ends)])
    for found, wanted in zip(gradients([(everything, segments)]), parts, strict=True):
        assert_same_bits(found, wanted)
    if layer.x.is_cuda:  # a control; the fakes add whole groups
        assert not same_bits(gradients([(everything, None)])[0], parts[0])
    whole = run_layer(layer, 2)
    for name, result in run_layer(layer, 2, segments=segments).items():
        if name in ("y", "dx", "dlogits"):
            assert_same_bits(result, whole[name], name)
    assert_same_bits(run_layer(layer, 2, segments=segments[-1:])["dgate_up"], whole["dgate_up"])


def test_no_tokens(generator):
    layer = make_layer(0, 16, 8, 4, generator)
    found = run_layer(layer, 2)
    assert found["y"].shape == (0, 16) and not found["dgate_up"].any() and not found["ddown"].any()


def test_compile(generator, compile_backend):
    """One graph, forward and backward; eager mode's bits."""
    torch._dynamo.reset()
    layer = make_layer(33, 24, 16, 8, generator)
    wanted = run_layer(layer, 2)

    def call(x, logits, gate_up, down):
        return moe.experts(x, moe.route(logits, 2), gate_up, down)

    compiled = torch.compile(call, fullgraph=True, backend=compile_backend)
    leaves = [t.detach().requires_grad_() for t in (layer.x, layer.logits, layer.gate_up, layer.down)]
    y = compiled(*leaves)
    found = dict(zip(wanted, (y.detach(), *torch.autograd.grad(y, leaves, layer.dy)), strict=True))
    for name, result in wanted.items():
        assert_same_bits(found[name], result, name)


def test_opcheck(generator):
    layer = make_layer(9, 16, 8, 4, generator)
    with Recorder() as recorder:
        run_layer(layer, 2)
    names = [function._schema.name.split("::")[1] for function, _ in recorder.calls]
    assert {name for name in names if name.startswith("moe")} == {
        "moe_route", "moe_route_backward", "moe_plan", "moe_gather", "moe_combine", "moe_gate", "moe_gate_backward",
    }  # fmt: skip
    for function, arguments in recorder.calls:
        torch.library.opcheck(function, arguments)


ACTIVATIONS = [
    {"activation": "swiglu"},
    {"activation": "swiglu_oai", "interleaved": True, "transposed": True},
    {"activation": "geglu"},
    {"activation": "silu"},
]


def make_other(options, generator, tokens=97, hidden=136, experts=8):
    """A layer with biases, of these options."""
    layer = make_layer(tokens, hidden, 72, experts, generator, biased=True, gated=options["activation"] != "silu")
    if options.get("transposed"):
        layer.gate_up, layer.down = (t.mT.contiguous() for t in (layer.gate_up, layer.down))
    return layer


@pytest.mark.parametrize("options", ACTIVATIONS, ids=lambda options: options["activation"])
def test_other_layers(options, generator):
    """As near to fp64 as torch's own arithmetic; rows of down_bias' gradient are rounded before their sum."""
    layer = make_other(options, generator)
    found, plain = run_layer(layer, 2, **options), run_layer(layer, 2, **options, backend="reference")
    exact = run_layer(layer.changed(torch.Tensor.double), 2, **options, backend="reference")
    assert len(found) == 7
    for name, result in found.items():
        error, of_torch = ((t.double() - exact[name]).norm().item() for t in (result, plain[name]))
        most = 1.7 if name == "ddown_bias" else 1.3
        assert error <= most * of_torch + 1e-12, f"{name}: {error:.3e}, plain torch {of_torch:.3e}"


@pytest.mark.parametrize("options", ACTIVATIONS[1:], ids=lambda options: options["activation"])
def test_a_token_of_other_layers_does_not_know_its_batch(options, generator):
    layer = make_other(options, generator)
    whole = run_layer(layer, 2, **options)
    for count in (1, 7, 64):
        index = torch.randperm(97, generator=generator, device=layer.x.device)[:count]
        found = run_layer(layer, 2, index, **options)
        for name in ("y", "dx", "dlogits"):
            assert_same_bits(found[name], whole[name][index], f"{name} of {count}")


def test_main_grads_of_biases(generator):
    """Their bits are those of the gradients, and of calls with a segment each."""
    options, ends = ACTIVATIONS[1], [0, 13, 50, 97]
    layer = make_other(options, generator)
    wanted = run_layer(layer, 2, **options)

    def gradients(calls):
        parameters = [
            t.clone().requires_grad_() for t in (layer.gate_up, layer.down, layer.gate_up_bias, layer.down_bias)
        ]
        for t in parameters:
            t.main_grad = torch.zeros_like(t, dtype=FP32)
        for part, given in calls:
            biases = dict(zip(("gate_up_bias", "down_bias"), parameters[2:], strict=True))
            routing = moe.route(layer.logits[part], 2)
            y = moe.experts(layer.x[part], routing, *parameters[:2], **biases, **options, segments=given)
            y.backward(layer.dy[part])
        assert all(t.grad is None for t in parameters)
        return [t.main_grad for t in parameters]

    everything = slice(None)
    names = ("dgate_up", "ddown", "dgate_up_bias", "ddown_bias")
    for name, result in zip(names, gradients([(everything, None)]), strict=True):
        assert_same_bits(result.to(BF16), wanted[name], name)
    segments = torch.tensor(ends[1:], dtype=torch.int32, device=layer.x.device)
    parts = gradients([(slice(a, b), None) for a, b in itertools.pairwise(ends)])
    for result, other in zip(gradients([(everything, segments)]), parts, strict=True):
        assert_same_bits(result, other)


def test_compile_of_other_layers(generator, compile_backend):
    """One graph, with biases and segments."""
    torch._dynamo.reset()
    layer, segments = make_other(ACTIVATIONS[1], generator, 33), torch.tensor([5, 33], device=generator.device)
    options = {**ACTIVATIONS[1], "segments": segments}
    wanted = run_layer(layer, 2, **options)

    def call(x, logits, gate_up, down, *biases):
        given = dict(zip(("gate_up_bias", "down_bias"), biases, strict=True))
        return moe.experts(x, moe.route(logits, 2), gate_up, down, **given, **options)

    tensors = layer.x, layer.logits, layer.gate_up, layer.down, layer.gate_up_bias, layer.down_bias
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = torch.compile(call, fullgraph=True, backend=compile_backend)(*leaves)
    found = dict(zip(wanted, (y.detach(), *torch.autograd.grad(y, leaves, layer.dy)), strict=True))
    for name, result in wanted.items():
        assert_same_bits(found[name], result, name)


# Below: on a GPU only


def test_another_routing_in_a_captured_graph(generator):
    layer = make_layer(200, 136, 72, 16, generator)
    run_layer(layer, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_layer(layer, 4)
    for _ in range(2):
        layer.logits.copy_(torch.randn_like(layer.logits))
        graph.replay()
        torch.cuda.synchronize()
        replayed = {name: result.clone() for name, result in results.items()}
        for name, result in run_layer(layer, 4).items():
            assert_same_bits(replayed[name], result, name)


def test_a_control(generator):
    """Float atomics in the combine, as others have, differ on this data from batch to batch, or from run to run."""
    rows = randn(8192, 256, generator=generator)
    index = torch.randint(0, 64, (8192,), generator=generator, device="cuda")
    found = [torch.zeros(64, 256, device="cuda").index_add_(0, index, rows) for _ in range(5)]
    assert not all(same_bits(found[0], other) for other in found[1:])


def test_router_of_a_model_agrees_with_topk(generator):
    """Without ties torch's choice is the same."""
    router = Router(128, 8)
    logits = randn(4096, router.experts, generator=generator)
    wanted = logits.topk(router.k, 1).indices.sort(1).values
    assert torch.equal(moe.route(logits, router.k).indices.long(), wanted)
