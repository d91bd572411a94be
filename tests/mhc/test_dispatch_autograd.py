"""Which gradients the hyper-connections compute over fake kernels, and where they are added."""

import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cute_kernels import mhc
from cute_kernels.mhc import reference
from tests.fakes import fake_kernels
from tests.mhc.cases import (
    BF16,
    FP32,
    OPERATIONS,
    WITH_PARAMETERS,
    Case,
    call,
    check,
    differentiate,
    make_inputs,
    make_upstream,
    oracle,
    sublayer,
)

FULL = Case(4, 16, (5,), FP32, norm_weight=True, bias=True)


@pytest.fixture(autouse=True)
def kernels():
    with fake_kernels() as jobs:
        yield jobs


@pytest.mark.parametrize("op", WITH_PARAMETERS)
def test_main_grad(op, generator):
    """Added to, whatever the parameter's dtype; .grad stays None."""
    for parameters in (FP32, BF16):
        case = dataclasses.replace(FULL, parameters=parameters, dropout_p=0.2)
        t = make_inputs(case, generator)
        upstream = make_upstream(op, case, generator)
        exact = oracle(op, case, t, upstream)
        before = {}
        for name in WITH_PARAMETERS[op]:
            t[name].main_grad = torch.randn(t[name].shape, generator=generator)
            before[name] = t[name].main_grad.clone()
        found = differentiate(mhc, op, case, t, upstream)
        for name in WITH_PARAMETERS[op]:
            assert f"d{name}" not in found
            found[f"d{name}"] = t[name].main_grad - before[name]
        margins = {f"d{name}": 4e-7 * (1.0 + before[name].abs().max()).item() for name in before}
        check(found, exact, margins=margins)


@pytest.mark.parametrize("op", WITH_PARAMETERS)
def test_main_grad_is_left_where_it_is_not_asked_for(op, generator):
    """Gradients of the inputs alone, then of the parameters alone: each is added once."""
    t = make_inputs(FULL, generator)
    upstream = list(make_upstream(op, FULL, generator).values())
    for name in WITH_PARAMETERS[op]:
        t[name].main_grad = torch.zeros(t[name].shape)
    outputs = call(mhc, op, FULL, t)
    outputs = [out for out in outputs if out is not None]
    x = next(t[name] for name in OPERATIONS[op][0] if name not in WITH_PARAMETERS[op])
    torch.autograd.grad(outputs, x, upstream, retain_graph=True)
    assert not any(t[name].main_grad.any() for name in WITH_PARAMETERS[op])
    torch.autograd.backward(outputs, upstream, inputs=[t[name] for name in WITH_PARAMETERS[op]], retain_graph=True)
    once = {name: t[name].main_grad.clone() for name in WITH_PARAMETERS[op]}
    assert all(once[name].any() for name in once)
    for name in once:
        t[name].main_grad.zero_()
    torch.autograd.backward(outputs, upstream)
    assert all(torch.equal(t[name].main_grad, once[name]) for name in once)


def test_a_strided_H_is_not_copied(kernels):
    """27 numbers a token: rows start on 4 bytes, and the backward's kernel gets them as they are."""
    H = torch.zeros(64, 27)[:, :24].requires_grad_()
    outputs = mhc.coefficients(H, torch.ones(64), torch.ones(3), torch.zeros(24), 4, variant="deepseek_v4")
    sum(t.sum() for t in outputs).backward()
    (spec,) = [arguments[1] for builder, arguments in kernels if builder.__name__ == "coefficients_backward"]
    assert spec.h_align == 1


@pytest.mark.parametrize("op", WITH_PARAMETERS)
def test_main_grad_of_one_parameter(op, generator):
    """Added to where it is; the other parameters get the gradients that they get without."""
    t = make_inputs(FULL, generator)
    upstream = make_upstream(op, FULL, generator)
    wanted = differentiate(mhc, op, FULL, t, upstream)
    for name in WITH_PARAMETERS[op]:
        t[name].main_grad = torch.ones_like(t[name])
        found = differentiate(mhc, op, FULL, t, upstream)
        torch.testing.assert_close(t[name].main_grad, 1.0 + wanted[f"d{name}"], rtol=1e-6, atol=1e-6)
        del t[name].main_grad
        assert found.keys() == wanted.keys() - {f"d{name}"}
        assert all(torch.equal(result, wanted[key]) for key, result in found.items())


def test_a_weighted_bf16_phi_has_the_terms_of_fp32(kernels, generator):
    """The product of two bf16 numbers has 16 bits."""
    case = dataclasses.replace(FULL, dtype=BF16, parameters=BF16)
    differentiate(mhc, "pre", case, make_inputs(case, generator), make_upstream("pre", case, generator))
    products = [job for job in kernels if job[0].__name__ in ("pre_forward", "projection_backward")]
    terms = {builder.__name__: arguments[-1].phi_terms for builder, arguments in products}
    assert terms == {"pre_forward": 2, "projection_backward": 2}


@pytest.mark.parametrize("op", OPERATIONS)
def test_one_gradient_at_a_time(op, generator):
    """Each input alone requires grad: its gradient is what it is with all; without any nothing is recorded."""
    case = dataclasses.replace(FULL, dropout_p=0.2)
    t = make_inputs(case, generator)
    upstream = make_upstream(op, case, generator)
    wanted = differentiate(mhc, op, case, t, upstream)
    for name in OPERATIONS[op][0]:
        alone = {key: tensor.detach().requires_grad_(key == name) for key, tensor in t.items()}
        outputs = [t for t in call(mhc, op, case, alone) if t.requires_grad]
        incoming = [u for u, o in zip(upstream.values(), call(mhc, op, case, alone), strict=True) if o.requires_grad]
        (found,) = torch.autograd.grad(outputs, [alone[name]], incoming)
        torch.testing.assert_close(found, wanted[f"d{name}"])
    frozen = {key: tensor.detach() for key, tensor in t.items()}
    assert not any(output.requires_grad for output in call(mhc, op, case, frozen))


@pytest.mark.parametrize("op", ["projection", "coefficients", "pre"])
def test_unused_outputs(op, generator):
    t = make_inputs(FULL, generator)
    upstream = make_upstream(op, FULL, generator)
    leaves = [t[name] for name in OPERATIONS[op][0]]
    for index, name in enumerate(OPERATIONS[op][1]):
        found = torch.autograd.grad(call(mhc, op, FULL, t)[index], leaves, upstream[name], allow_unused=True)
        wanted = torch.autograd.grad(call(reference, op, FULL, t)[index], leaves, upstream[name], allow_unused=True)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a if a is not None else torch.zeros_like(b), b if b is not None else a * 0)


def test_sublayers_of_every_kind(generator):
    """Without gradient, without parameters that learn, with all frozen but its own, under checkpointing, twice x."""
    t = make_inputs(FULL, generator)
    names = ("x", "phi", "alpha", "beta")
    weight = torch.randn(16, 16, generator=generator).requires_grad_()
    upstream = make_upstream("hyper_connection", FULL, generator)["out"]

    def gradients(library, layer, frozen=()):
        p = {name: t[name].detach().requires_grad_(name not in frozen) for name in names}
        out = library.hyper_connection(p["x"], layer, p["phi"], p["alpha"], p["beta"])
        leaves = [*[p[name] for name in names if name not in frozen], weight]
        return torch.autograd.grad(out, leaves, upstream, allow_unused=True)

    def linear(h):
        return torch.tanh(h @ weight)

    layers = {
        "detached": (lambda h: h.detach() * 2.0, ()),
        "linear": (linear, ()),
        "all frozen": (linear, names),
        "x frozen": (linear, ("x",)),
        "x alone": (linear, ("phi", "alpha", "beta")),
        "identity": (lambda h: h, ()),
        "checkpoint": (lambda h: checkpoint(linear, h, use_reentrant=False), ()),
        "no grad": (lambda h: h.new_ones(h.shape), ()),
    }
    for layer, frozen in layers.values():
        found, wanted = gradients(mhc, layer, frozen), gradients(reference, layer, frozen)
        for a, b in zip(found, wanted, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_chain_of_hyper_connections(generator):
    """x used elsewhere, too: autograd adds what it must; the reference's gradients in the end."""
    t = make_inputs(FULL, generator)

    def loss(library):
        h = t["h"].detach().requires_grad_()
        x = library.expand(h, 4)
        first = library.hyper_connection(x, sublayer, t["phi"], t["alpha"], t["beta"], norm_weight=t["norm_weight"])
        x = library.hyper_connection(first, sublayer, t["phi"], t["alpha"], t["beta"], bias=t["bias"])
        out = library.contract(x) + library.head(x, t["fn"], t["base"], t["scale"]) + first.mean()
        return torch.autograd.grad(
            out.square().sum(), [h, t["phi"], t["alpha"], t["beta"], t["norm_weight"], t["bias"]]
        )

    for a, b in zip(loss(mhc), loss(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
