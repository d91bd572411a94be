"""How the ops take part in autograd: which gradients are computed, where they are added, how often x's is written."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cute_kernels import mhc
from cute_kernels.mhc import reference
from cute_kernels.runtime.operators import OPERATORS
from tests.gemm.cases import same_bits
from tests.mhc.cases import (
    BF16,
    FP32,
    OPERATIONS,
    SEED,
    WITH_PARAMETERS,
    Case,
    call,
    check,
    differentiate,
    make_inputs,
    make_upstream,
    oracle,
    product_margins,
    sublayer,
)

FULL = Case(4, 64, (130,), norm_weight=True, bias=True)
WIDE = replace(FULL, dtype=FP32)


@pytest.mark.parametrize("case", [WIDE, replace(WIDE, parameters=BF16)], ids=str)
@pytest.mark.parametrize("op", WITH_PARAMETERS)
def test_main_grad(op, case, generator):
    """Added to in fp32, whatever the parameter's dtype; .grad stays None."""
    t, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    exact = oracle(op, case, t, upstream)
    before = {}
    for name in WITH_PARAMETERS[op]:
        t[name].main_grad = torch.randn(t[name].shape, generator=generator, device=generator.device)
        before[name] = t[name].main_grad.clone()
    found = differentiate(mhc, op, case, t, upstream)
    for name in WITH_PARAMETERS[op]:
        assert f"d{name}" not in found and t[name].grad is None
        found[f"d{name}"] = t[name].main_grad - before[name]
    margins = {name: 0.0 for name in found} | product_margins(op, case, exact, "tf32")
    for name in WITH_PARAMETERS[op]:
        margins[f"d{name}"] += 4e-7 * (1.0 + before[name].abs().max()).item()
    check(found, exact, margins=margins)


@pytest.mark.parametrize(
    "op, case",
    [(op, FULL) for op in OPERATIONS]
    + [(op, Case(8, 136, (330,), norm_weight=True, bias=True)) for op in ("pre", "hyper_connection")],
    ids=str,
)
def test_one_gradient_at_a_time(op, case, generator):
    """Each input alone requires grad: its gradient to rounding; main_grad of what is frozen stays."""
    case = replace(case, dropout_p=0.2)
    t, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    wanted = differentiate(mhc, op, case, t, upstream)
    for name in OPERATIONS[op][0]:
        alone = {key: tensor.detach().requires_grad_(key == name) for key, tensor in t.items()}
        for key in WITH_PARAMETERS.get(op, ()):
            if key != name:
                alone[key].main_grad = torch.full_like(alone[key], 7.0, dtype=FP32)
        outputs = call(mhc, op, case, alone)
        pairs = [(o, u) for o, u in zip(outputs, upstream.values(), strict=True) if o.requires_grad]
        (found,) = torch.autograd.grad([o for o, _ in pairs], [alone[name]], [u for _, u in pairs])
        torch.testing.assert_close(found, wanted[f"d{name}"], rtol=2e-2, atol=2e-2)
        assert all(alone[key].main_grad.eq(7).all() for key in WITH_PARAMETERS.get(op, ()) if key != name)
    frozen = {key: tensor.detach() for key, tensor in t.items()}
    assert not any(output.requires_grad for output in call(mhc, op, case, frozen))


@pytest.mark.parametrize("case", [WIDE], ids=str)
@pytest.mark.parametrize("op", ["projection", "coefficients", "pre"])
def test_unused_outputs(op, case, generator):
    t, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    leaves = [t[name] for name in OPERATIONS[op][0]]
    for index, name in enumerate(OPERATIONS[op][1]):
        results = []
        for library in (mhc, reference):
            output = call(library, op, case, t)[index]
            results.append(torch.autograd.grad(output, leaves, upstream[name], allow_unused=True))
        for leaf, a, b in zip(leaves, *results, strict=True):
            found, wanted = (torch.zeros_like(leaf) if g is None else g for g in (a, b))
            scale = max(1.0, wanted.abs().max().item())
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("case", [FULL], ids=str)
@pytest.mark.parametrize("op", OPERATIONS)
def test_upstream_of_any_layout(op, case, generator):
    """Incoming gradients that are transposed, that have gaps: the same bits; that are one number: right."""
    t, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    wanted = differentiate(mhc, op, case, t, upstream)
    transposed = {name: u.movedim(0, -1).clone().movedim(-1, 0) for name, u in upstream.items()}
    gapped = {name: torch.stack([u, u], 1)[:, 0] for name, u in upstream.items()}
    for other in (transposed, gapped):
        found = differentiate(mhc, op, case, t, other)
        assert all(same_bits(found[name], wanted[name]) for name in wanted)
    ones = {name: u.new_ones(()).expand(u.shape) for name, u in upstream.items()}
    found = differentiate(mhc, op, case, t, ones)
    dense = differentiate(mhc, op, case, t, {name: u.contiguous() for name, u in ones.items()})
    assert all(same_bits(found[name], dense[name]) for name in dense)
    exact = oracle(op, case, t, ones)
    check(found, exact, margins=product_margins(op, case, exact, "tf32"))


# One write of dx


@pytest.mark.parametrize("layout", ["streams", "channels"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_hyper_connection_is_the_separate_ops(dtype, layout, generator):
    """Its gradient of x, rounded once, is the sum of those of pre and expand_combine, within their roundings."""
    case = replace(FULL, dtype=dtype, layout=layout)
    t, upstream = make_inputs(case, generator), make_upstream("hyper_connection", case, generator)
    found = differentiate(mhc, "hyper_connection", case, t, upstream)
    names = OPERATIONS["hyper_connection"][0]
    layer_input, post, res = call(mhc, "pre", case, t)
    own = {"f": sublayer(layer_input), "post": post, "res": res}
    (out,) = call(mhc, "expand_combine", case, t | own)
    assert same_bits(out.detach(), found["out"])
    gradients = torch.autograd.grad(out, [t[name] for name in names], upstream["out"])
    eps = torch.finfo(dtype).eps
    for name, apart in zip(names, gradients, strict=True):
        together = found[f"d{name}"]
        if name == "x":
            bound = 2 * eps * (apart.abs().float() + upstream["out"].abs().float().max() * 4)
            assert ((together.float() - apart.float()).abs() <= bound).all()
        else:
            scale = apart.float().abs().max().item()
            torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5 * scale)
    again = differentiate(mhc, "hyper_connection", case, t, upstream)
    assert all(same_bits(again[name], found[name]) for name in found)


def test_dx_is_written_once(generator, monkeypatch):
    """No other launch of the backward has x's gradient among its results."""
    written = []
    launches = {"aggregate_backward": 3, "expand_combine_backward": 7, "projection_backward": 9}  # dx among arguments
    for name, position in launches.items():
        found = OPERATORS[f"mhc_{name}"]

        def record(*arguments, real=found.function, position=position, name=name):
            written.append((name, arguments[position] is not None))
            real(*arguments)

        monkeypatch.setattr(found, "function", record)
    t, upstream = make_inputs(FULL, generator), make_upstream("hyper_connection", FULL, generator)
    differentiate(mhc, "hyper_connection", FULL, t, upstream)
    assert written == [
        ("expand_combine_backward", False),
        ("aggregate_backward", False),
        ("projection_backward", True),
    ]


def test_sublayers_of_every_kind(generator):
    """Without gradient, without parameters that learn, with all frozen but its own, under checkpointing."""
    t, upstream = make_inputs(WIDE, generator), make_upstream("hyper_connection", WIDE, generator)["out"]
    names = ("x", "phi", "alpha", "beta")
    weight = (torch.randn(64, 64, generator=generator, device=generator.device) / 8).requires_grad_()

    def gradients(library, layer, frozen=()):
        p = {name: t[name].detach().requires_grad_(name not in frozen) for name in names}
        out = library.hyper_connection(p["x"], layer, p["phi"], p["alpha"], p["beta"])
        leaves = [*[p[name] for name in names if name not in frozen], weight]
        return torch.autograd.grad(out, leaves, upstream, allow_unused=True)

    def linear(h):
        return torch.tanh(h @ weight)

    for layer, frozen in (
        (lambda h: h.detach() * 2.0, ()),
        (linear, ()),
        (linear, names),
        (linear, ("x",)),
        (linear, ("phi", "alpha", "beta")),
        (lambda h: h, ()),
        (lambda h: checkpoint(linear, h, use_reentrant=False), ()),
        (lambda h: h.new_ones(h.shape), ()),
    ):
        for a, b in zip(gradients(mhc, layer, frozen), gradients(reference, layer, frozen), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                scale = max(1.0, b.abs().max().item())
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * scale)


def test_a_chain_of_hyper_connections(generator):
    """Parameters used twice, x used elsewhere, too: autograd adds; the reference's gradients in the end."""
    t = make_inputs(WIDE, generator)

    def loss(library):
        h = t["h"].detach().requires_grad_()
        x = library.expand(h, 4)
        first = library.hyper_connection(x, sublayer, t["phi"], t["alpha"], t["beta"], norm_weight=t["norm_weight"])
        x = library.hyper_connection(first, sublayer, t["phi"], t["alpha"], t["beta"], bias=t["bias"])
        out = library.contract(x) + library.head(x, t["fn"], t["base"], t["scale"]) + first.mean()
        leaves = [h, t["phi"], t["alpha"], t["beta"], t["norm_weight"], t["bias"]]
        return torch.autograd.grad(out.square().sum(), leaves)

    for a, b in zip(loss(mhc), loss(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item())


def test_retained_graph(generator):
    """A second backward through the same graph gives the same bits; a third finds it freed."""
    t, upstream = make_inputs(FULL, generator), make_upstream("hyper_connection", FULL, generator)["out"]
    (out,) = call(mhc, "hyper_connection", FULL, t)
    leaves = [t[name] for name in OPERATIONS["hyper_connection"][0]]
    first = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    copies = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(out, leaves, upstream)
    for one, copy, two in zip(first, copies, second, strict=True):
        assert same_bits(one, copy) and same_bits(two, copy)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, upstream)


def test_second_derivative_is_refused(generator):
    t = make_inputs(WIDE, generator)
    layer_input, post, res = call(mhc, "pre", WIDE, t)
    with pytest.raises(RuntimeError, match="has no second derivative, got create_graph=True"):
        torch.autograd.grad(layer_input.square().sum(), t["x"], create_graph=True)


# Checkpointing and dropout


@pytest.mark.parametrize("dropout_p, seed", [(0.0, None), (0.5, None), (0.5, SEED)], ids=["plain", "drawn", "given"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_activation_checkpointing(reentrant, dropout_p, seed, generator):
    """Bits of the run without; a seed that is drawn is drawn again, from the generator as it was."""
    inputs = make_inputs(FULL, generator)
    upstream = make_upstream("hyper_connection", FULL, generator)["out"]
    names = OPERATIONS["hyper_connection"][0]

    def block(x, phi, alpha, beta, norm_weight, bias):
        options = {"norm_weight": norm_weight, "bias": bias, "dropout_p": dropout_p, "seed": seed}
        return mhc.hyper_connection(x, sublayer, phi, alpha, beta, **options) * 2

    results = []
    for run in (block, lambda *leaves: checkpoint(block, *leaves, use_reentrant=reentrant)):
        leaves = [inputs[name].detach().requires_grad_() for name in names]
        torch.manual_seed(1)
        out = run(*leaves)
        out.backward(upstream)
        results.append([out.detach(), *[leaf.grad for leaf in leaves]])
    for one, two in zip(*results, strict=True):
        assert same_bits(one, two)


def test_a_seed_is_drawn(generator):
    """From torch's generator: another for each call, the same after manual_seed."""
    t = make_inputs(FULL, generator)

    def run():
        return mhc.expand_combine(t["f"], t["post"], t["x"], t["res"], dropout_p=0.5)

    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    assert same_bits(run().detach(), first.detach()) and not same_bits(first.detach(), second.detach())


@pytest.mark.parametrize("layout", ["streams", "channels"])
def test_the_mask_of_the_backward_is_that_of_the_forward(layout, generator):
    """dropout_mask says which elements: the forward leaves them out, and so do df and dbias."""
    case = Case(4, 64, (130,), FP32, layout=layout, bias=True, dropout_p=0.5)
    t, upstream = make_inputs(case, generator), make_upstream("expand_combine", case, generator)
    t["res"] = torch.zeros_like(t["res"]).requires_grad_()
    found = differentiate(mhc, "expand_combine", case, t, upstream)
    seed = torch.tensor([SEED], device=generator.device)
    mask = mhc.dropout_mask(seed, 130, 256, 0.5, generator.device).view(t["x"].shape)
    assert ((found["out"] != 0) == (mask != 0)).float().mean() > 0.999
    streams, dim = (1, 2) if layout == "streams" else (2, 1)
    post = t["post"].detach().unsqueeze(dim)
    kept = (upstream["out"] * post * mask * 2.0).sum(streams)
    torch.testing.assert_close(found["df"], kept, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["dbias"], kept.sum(0), rtol=1e-4, atol=1e-4)
