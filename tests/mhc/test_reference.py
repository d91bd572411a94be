"""The references of the hyper-connections against formulas, fp64 and gradcheck; the tests' own oracle and bounds."""

import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from cute_kernels import mhc
from cute_kernels.mhc import reference
from cute_kernels.mhc.checks import num_coefficients
from cute_kernels.mhc.reference.dropout import philox4x32
from cute_kernels.mhc.variants import VARIANTS, Variant
from tests.fakes import fake_kernels
from tests.mhc.cases import (
    BF16,
    CHANNELS,
    FP16,
    FP32,
    FP64,
    LAYOUTS,
    OPERATIONS,
    PRESETS,
    RES_ORIENTATIONS,
    SEED,
    SINKHORNS,
    STREAMS,
    Case,
    call,
    check,
    differentiate,
    in_the_other_layout,
    make_inputs,
    make_upstream,
    oracle,
    saturated_logits,
    seeded_generator,
    sublayer,
)

CPU = torch.device("cpu")
PRECISIONS = ("tf32", "fp32")


def randn64(*shape, generator, scale=1.0):
    return (torch.randn(*shape, generator=generator, dtype=FP64) * scale).requires_grad_()


def in_fp64(tensors):
    return {name: t.detach().double().requires_grad_() for name, t in tensors.items()}


def run_all(case, generator, ops=tuple(OPERATIONS)):
    """(op, found, exact) of each op with one set of inputs."""
    inputs = make_inputs(case, generator)
    for op in ops:
        upstream = make_upstream(op, case, generator)
        yield op, differentiate(reference, op, case, inputs, upstream), oracle(op, case, inputs, upstream)


# Each op against its formula, in fp64


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", STREAMS)
def test_ops_without_coefficients_are_their_formulas(n, layout, generator):
    """By einsum on streams-major copies: values and shapes, for both layouts and orientations."""
    case = Case(n, 13, (2, 3), layout=layout, norm_weight=True, bias=True)
    t = in_fp64(make_inputs(case, generator))
    x, pre, post, res, f, bias = (t[name].detach() for name in ("x", "pre", "post", "res", "f", "bias"))
    s = x if layout == "streams" else x.mT
    t = {name: tensor.detach() for name, tensor in t.items()}

    def found(op, case=case):
        return call(reference, op, case, t, compute_dtype=FP64)

    def laid_out(streams):
        return streams if layout == "streams" else streams.mT

    flat = x.reshape(2, 3, n * 13)
    H, mean_square = found("projection")
    torch.testing.assert_close(H, torch.einsum("abk,jk,k->abj", flat, t["phi"], t["norm_weight"]))
    torch.testing.assert_close(mean_square, (flat * flat).sum(-1) / (n * 13))
    torch.testing.assert_close(found("aggregate")[0], torch.einsum("abi,abic->abc", pre, s))
    torch.testing.assert_close(found("contract")[0], sum(s[:, :, i] for i in range(n)) / n)
    torch.testing.assert_close(found("expand")[0], laid_out(torch.stack([t["h"]] * n, -2)))
    for orientation, formula in (("io", "abio,abic->aboc"), ("oi", "aboi,abic->aboc")):
        out = torch.einsum("abo,abc->aboc", post, f + bias) + torch.einsum(formula, res, s)
        one = dataclasses.replace(case, res_orientation=orientation)
        torch.testing.assert_close(found("expand_combine", one)[0], laid_out(out))


@pytest.mark.parametrize("name", PRESETS)
def test_coefficients_are_their_formula(name, generator):
    v, n = VARIANTS[name], 4
    H, ms = (torch.randn(3, 5, *s, generator=generator, dtype=FP64).square() * 1e-5 for s in ((24,), ()))
    alpha, beta = (torch.randn(s, generator=generator, dtype=FP64) for s in (3, 24))
    pre, post, logits = reference.coefficients(H, ms, alpha, beta, n, variant=name, compute_dtype=FP64)
    rms = (ms + v.rms_eps).sqrt() if v.rms_eps_placement == "inside" else ms.sqrt() + v.rms_eps
    h = H / rms[..., None]
    torch.testing.assert_close(pre, torch.sigmoid(alpha[0] * h[..., :4] + beta[:4]) + v.pre_eps, rtol=1e-12, atol=0)
    torch.testing.assert_close(post, v.post_mult * torch.sigmoid(alpha[1] * h[..., 4:8] + beta[4:8]))
    wanted = (alpha[2] * h[..., 8:] + beta[8:]).view(3, 5, 4, 4)
    torch.testing.assert_close(logits, wanted)


@pytest.mark.parametrize("name", ["deepseek_v4", "megatron", "megatron_dev", "tilekernels"])
def test_head_is_its_formula(name, generator):
    case = Case(4, 13, (5,), variant=name, norm_weight=True)
    t = {name: tensor.detach() for name, tensor in in_fp64(make_inputs(case, generator)).items()}
    v = VARIANTS[name]
    for scale in (1.0, 1e-3):
        t["x"] = t["x"] * scale
        flat = t["x"].flatten(1)
        ms = flat.square().mean(1, keepdim=True)
        H = flat @ (t["fn"] * t["norm_weight"]).t()
        pre = torch.sigmoid(t["scale"] * H / (ms + v.rms_eps).sqrt() + t["base"]) + v.pre_eps
        wanted = (pre[:, :, None] * t["x"]).sum(1)
        (found,) = call(reference, "head", case, t, compute_dtype=FP64)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_autocast_changes_nothing(layout, generator):
    """Forward and backward: no product in the 16 bits that autocast would have it in."""
    case = Case(4, 16, (5,), layout=layout, norm_weight=True)
    inputs = make_inputs(case, generator)
    for op in OPERATIONS:
        upstream = make_upstream(op, case, generator)
        wanted = differentiate(reference, op, case, inputs, upstream)
        with torch.autocast("cpu", dtype=BF16):
            found = differentiate(reference, op, case, inputs, upstream)
        for name, result in wanted.items():
            assert found[name].dtype is result.dtype and torch.equal(found[name], result), (op, name)


def test_one_graph_for_every_number_of_tokens(generator):
    """After the first, which torch traces with its own sizes; with dropout, and with the gradients of x."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(x, case, tensors):
        return call(reference, "expand_combine", case, tensors | {"x": x})[0]

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for tokens in (3, 5, 9, 17):
        case = Case(4, 16, (tokens,), dropout_p=0.5)
        inputs = make_inputs(case, generator)
        x = inputs.pop("x")
        for result in (compiled(x, case, inputs), function(x, case, inputs)):
            assert torch.autograd.grad(result.float().sum(), x)[0].shape == x.shape
    assert counter.frame_count <= 2


# Gradients by finite differences


def gradcheck(op, case, generator, fast_mode=False):
    """By every element; by one random direction with ``fast_mode``."""
    inputs = in_fp64(make_inputs(case, generator))
    names = [name for name in OPERATIONS[op][0] if name in inputs]

    def function(*leaves):
        return call(reference, op, case, dict(zip(names, leaves, strict=True)), compute_dtype=FP64)

    assert torch.autograd.gradcheck(function, tuple(inputs[name] for name in names), fast_mode=fast_mode)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["projection", "aggregate", "expand", "contract", "head", "pre"])
def test_gradcheck(op, layout, generator):
    gradcheck(op, Case(2, 8, (2,), layout=layout, norm_weight=True), generator)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("orientation", RES_ORIENTATIONS)
def test_gradcheck_of_expand_combine(orientation, layout, dropout_p, generator):
    case = Case(4, 8, (2,), layout=layout, res_orientation=orientation, bias=True, dropout_p=dropout_p)
    gradcheck("expand_combine", case, generator)


@pytest.mark.parametrize("name", PRESETS)
def test_gradcheck_of_a_hyper_connection(name, generator):
    gradcheck(
        "hyper_connection", Case(2, 8, (2,), variant=name, norm_weight=True, bias=True, dropout_p=0.3), generator, True
    )


@pytest.mark.parametrize("placement", ["inside", "outside"])
def test_gradcheck_of_eps(placement, generator):
    """A mean square of eps' own size: the place of eps decides the gradient."""
    inside = placement == "inside"
    own = dataclasses.replace(VARIANTS["deepseek_v4"], rms_eps=0.1, rms_eps_placement=placement)
    leaves = [randn64(3, 8, generator=generator), (torch.rand(3, generator=generator, dtype=FP64) * 0.2 + 0.01)]
    leaves = [*leaves, randn64(3, generator=generator), randn64(8, generator=generator)]
    leaves[1].requires_grad_()

    def function(*leaves):
        return reference.coefficients(*leaves, 2, variant=own, compute_dtype=FP64)

    assert torch.autograd.gradcheck(function, leaves)
    H, ms, alpha, beta = leaves
    grad = torch.autograd.grad(function(*leaves)[2].sum(), ms)[0]
    rms = (ms + 0.1).sqrt() if inside else ms.sqrt() + 0.1
    drms = 0.5 / (ms + 0.1).sqrt() if inside else 0.5 / ms.sqrt()
    torch.testing.assert_close(grad, -(alpha[2] * H[:, 4:]).sum(1) / rms**2 * drms)


@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("variant", SINKHORNS)
def test_gradcheck_of_sinkhorn(variant, n, iterations, generator):
    """With an eps below all sums, and one above some."""
    logits = randn64(2, n, n, generator=generator, scale=2.0)
    for eps in (1e-3, 0.7):

        def function(logits, eps=eps):
            return reference.sinkhorn(logits, variant=variant, iterations=iterations, eps=eps, compute_dtype=FP64)

        assert torch.autograd.gradcheck(function, logits)


# Sinkhorn


@pytest.mark.parametrize("variant", SINKHORNS)
@pytest.mark.parametrize("n", STREAMS)
def test_sinkhorn_is_doubly_stochastic_where_it_converges(n, variant, generator):
    logits = torch.randn(50, n, n, generator=generator)
    p = reference.sinkhorn(logits, variant=variant, iterations=50)
    assert (p > 0).all()
    torch.testing.assert_close(p.sum(-2), torch.ones(50, n), rtol=0, atol=1e-5)
    torch.testing.assert_close(p.sum(-1), torch.ones(50, n), rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", SINKHORNS)
def test_the_variants_agree_without_eps(variant, generator):
    """Three forms of one algorithm: with a tiny eps and after as many iterations, the same matrix."""
    logits = torch.randn(9, 4, 4, generator=generator, dtype=FP64)
    p = torch.exp(logits)
    for _ in range(3):
        p = p / p.sum(-1, keepdim=True)
        p = p / p.sum(-2, keepdim=True)
    found = reference.sinkhorn(logits, variant=variant, iterations=3, eps=1e-15, compute_dtype=FP64)
    torch.testing.assert_close(found, p, rtol=1e-10, atol=1e-12)


def test_defaults_of_sinkhorn(generator):
    logits = torch.randn(3, 4, 4, generator=generator)
    assert torch.equal(reference.sinkhorn(logits), reference.sinkhorn(logits, variant="log", iterations=20))
    found = reference.sinkhorn(logits, variant="softmax_eps")
    assert torch.equal(found, reference.sinkhorn(logits, variant="softmax_eps", iterations=20, eps=1e-6))
    assert not torch.equal(found, reference.sinkhorn(logits, variant="softmax_eps", eps=2e-6))
    assert not torch.equal(found, reference.sinkhorn(logits, variant="softmax_eps", iterations=10))


@pytest.mark.parametrize("variant", SINKHORNS)
@pytest.mark.parametrize("n", STREAMS)
def test_saturated_logits(n, variant, generator):
    """+50 and -50: finite, with finite gradients, and near those of fp64.

    exp(-100), of "exp_clamp", has five bits in fp32, none where subnormal numbers are 0; so there +40 and -40 are near.
    """
    for size in (50.0, 40.0):
        logits = saturated_logits(n, 200, generator, size).requires_grad_()
        upstream = torch.randn(200, n, n, generator=generator)
        p = reference.sinkhorn(logits, variant=variant)
        (gradient,) = torch.autograd.grad(p, logits, upstream)
        wide = logits.detach().double().requires_grad_()
        exact = reference.sinkhorn(wide, variant=variant, compute_dtype=FP64)
        (wanted,) = torch.autograd.grad(exact, wide, upstream.double())
        assert p.isfinite().all() and gradient.isfinite().all()
        if size == 40.0 or variant != "exp_clamp":
            # 50 + 50 has an absolute error of 4e-6 in fp32, which the exponential turns into a relative one
            torch.testing.assert_close(p.double(), exact, rtol=2e-4, atol=2e-4)
            torch.testing.assert_close(gradient.double(), wanted, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_saturated_coefficients(name, generator):
    """A beta of +50 and -50 in pre, post and res: finite from end to end."""
    case = Case(4, 16, (7,), variant=name)
    inputs = make_inputs(case, generator)
    with torch.no_grad():
        inputs["beta"].copy_(50.0 * torch.randn(24, generator=generator).sign())
    found = differentiate(
        reference, "hyper_connection", case, inputs, make_upstream("hyper_connection", case, generator)
    )
    assert all(t.isfinite().all() for t in found.values())


def test_second_derivative_of_sinkhorn_is_refused(generator):
    logits = randn64(2, 4, 4, generator=generator)
    p = reference.sinkhorn(logits, variant="exp_clamp", compute_dtype=FP64)
    with pytest.raises(RuntimeError, match="has no second derivative, got create_graph=True"):
        torch.autograd.grad(p.square().sum(), logits, create_graph=True)


# Sizes, dtypes, layouts


@pytest.mark.parametrize("n", STREAMS)
@pytest.mark.parametrize("channels", CHANNELS)
def test_sizes(channels, n, generator):
    case = Case(n, channels, (2,), norm_weight=True, bias=True)
    for op, found, exact in run_all(case, generator):
        check(found, exact)
        assert found.keys() == exact.keys(), op


DTYPE_CASES = [
    Case(dtype=dtype, parameters=parameters, tokens=tokens, norm_weight=True, bias=True, dropout_p=p, variant=name)
    for dtype, parameters, tokens, p, name in [
        (BF16, BF16, (2, 3), 0.1, "transformer_engine"),
        (FP16, FP32, (), 0.0, "megatron"),
        (FP16, BF16, (4,), 0.5, "liger"),
        (FP32, FP32, (1, 2, 3), 0.25, "megatron_dev"),
        (FP32, BF16, (13,), 0.0, "tilekernels"),
    ]
] + [Case(gap=24), Case(gap=3, dtype=FP16, layout="channels", tokens=(2, 3))]


@pytest.mark.parametrize("case", DTYPE_CASES, ids=str)
def test_dtypes(case, generator):
    """Results within the bounds, of the dtypes that the ops promise; gradients of the inputs' own."""
    inputs = make_inputs(case, generator)
    for op, (names, outputs) in OPERATIONS.items():
        upstream = make_upstream(op, case, generator)
        found = differentiate(reference, op, case, inputs, upstream)
        check(found, oracle(op, case, inputs, upstream))
        for name in outputs:
            assert found[name].shape == upstream[name].shape and found[name].dtype is upstream[name].dtype, (op, name)
            assert found[name].is_contiguous(), (op, name)
        for name in names:
            if name in inputs:
                assert found["d" + name].dtype is inputs[name].dtype, (op, name)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("n", STREAMS)
def test_layouts_agree(n, name, generator):
    """Permuted in, permuted out: the same numbers, in fp64."""
    case = Case(n, 13, (3,), variant=name, norm_weight=True, bias=True)
    one = in_fp64(make_inputs(case, generator))
    other_case, two = in_the_other_layout(case, one)
    for op in ("projection", "aggregate", "expand_combine", "expand", "contract", "head", "pre", "hyper_connection"):
        upstream = make_upstream(op, case, generator)
        other_upstream = {name: t.mT if name in ("x", "out") else t for name, t in upstream.items()}
        found = differentiate(reference, op, case, one, upstream, compute_dtype=FP64)
        other = differentiate(reference, op, other_case, two, other_upstream, compute_dtype=FP64)
        rows = (n, 13) if case.axes == "channels" else (13, n)
        for key, t in other.items():
            if key in ("x", "out", "dx"):
                t = t.mT
            elif key in ("dphi", "dfn", "dnorm_weight"):
                t = t.unflatten(-1, rows).mT.flatten(-2)
            torch.testing.assert_close(found[key], t, rtol=1e-10, atol=1e-12)


def test_orientations_are_transposes(generator):
    case = Case(4, 13, (3,))
    t = make_inputs(case, generator)
    io = reference.expand_combine(t["f"], t["post"], t["x"], t["res"])
    transposed = t["res"].mT.contiguous()
    assert torch.equal(io, reference.expand_combine(t["f"], t["post"], t["x"], transposed, res_orientation="oi"))
    assert not torch.equal(io, reference.expand_combine(t["f"], t["post"], t["x"], t["res"], res_orientation="oi"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tokens(layout, generator):
    """Empty results; gradients of parameters are 0."""
    case = Case(4, 16, (0,), layout=layout, norm_weight=True, bias=True, dropout_p=0.1)
    inputs = make_inputs(case, generator)
    for op in OPERATIONS:
        upstream = make_upstream(op, case, generator)
        found = differentiate(reference, op, case, inputs, upstream)
        for name, t in found.items():
            wanted = inputs[name[1:]].shape if name not in OPERATIONS[op][1] else upstream[name].shape
            assert t.shape == wanted and not t.any(), (op, name)


def test_fp16_whose_squares_overflow(generator):
    """300 squared is beyond fp16, and the sum of 16384 of them is 1.5e9."""
    x = (300.0 * torch.randn(2, 4, 4096, generator=generator).sign()).to(FP16)
    phi = torch.randn(24, 4 * 4096, generator=generator) / 128
    H, mean_square = reference.projection(x, phi)
    torch.testing.assert_close(mean_square, torch.full((2,), 90000.0), rtol=1e-6, atol=0)
    torch.testing.assert_close(H, (x.flatten(1).double() @ phi.double().t()).float(), rtol=1e-4, atol=1e-2)
    x.requires_grad_()
    out = reference.hyper_connection(x, sublayer, phi, torch.ones(3), torch.zeros(24))
    (dx,) = torch.autograd.grad(out, x, torch.randn(out.shape, generator=generator).to(FP16))
    assert out.isfinite().all() and dx.isfinite().all() and out.dtype is FP16


@pytest.mark.parametrize("name", PRESETS)
def test_tokens_of_zeros(name, generator):
    """Padding: coefficients are those of beta, gradients are finite."""
    case = Case(4, 16, (3,), variant=name)
    inputs = make_inputs(case, generator)
    with torch.no_grad():
        inputs["x"][1] = 0.0
    found = differentiate(reference, "pre", case, inputs, make_upstream("pre", case, generator))
    assert all(t.isfinite().all() for t in found.values()) and not found["layer_input"][1].any()
    post = VARIANTS[name].post_mult * torch.sigmoid(inputs["beta"][4:8].detach())
    torch.testing.assert_close(found["post"][1], post)


@pytest.mark.parametrize("name", PRESETS)
def test_a_mean_square_of_nan_is_seen(name, generator):
    """In that token's coefficients and gradients, and in no other's."""
    case = Case(4, 16, (3,), variant=name)
    inputs = make_inputs(case, generator)
    with torch.no_grad():
        inputs["mean_square"][1] = torch.nan
    found = differentiate(reference, "coefficients", case, inputs, make_upstream("coefficients", case, generator))
    for result in ("pre", "post", "logits", "dH", "dmean_square"):
        assert found[result][1].isnan().all() and found[result][::2].isfinite().all(), result


@pytest.mark.parametrize("variant", ["deepseek_v4", "transformer_engine", "megatron"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_of_tokens(layout, variant, generator):
    """Leading dimensions that do not collapse: the reference takes them, and returns contiguous results."""
    case = Case(4, 16, (3, 5), layout=layout, variant=variant, norm_weight=True, bias=True)
    inputs = make_inputs(case, generator)
    moved = dict(inputs)
    for name in ("x", "f", "h", "logits", "H", "pre", "post", "res"):
        moved[name] = inputs[name].detach().transpose(0, 1).contiguous().transpose(0, 1)
        assert not moved[name].is_contiguous()
    for op, (_, outputs) in OPERATIONS.items():
        results = call(reference, op, case, moved), call(reference, op, case, inputs)
        for name, one, two in zip(outputs, *results, strict=True):
            torch.testing.assert_close(one, two)
            assert name in ("layer_input", "h") or one.is_contiguous(), (op, name)


# What the composite calls are made of


@pytest.mark.parametrize("name", PRESETS)
def test_pre_is_its_four_ops(name, generator):
    """Bit for bit."""
    case = Case(4, 40, (5,), variant=name, norm_weight=True)
    t = make_inputs(case, generator)
    v = VARIANTS[name]
    H, mean_square = reference.projection(t["x"], t["phi"], norm_weight=t["norm_weight"], layout=v.layout)
    pre, post, logits = reference.coefficients(H, mean_square, t["alpha"], t["beta"], 4, variant=v)
    choice = {"variant": v.sinkhorn, "iterations": v.iterations}
    res = reference.sinkhorn(logits, **choice, **({} if v.sinkhorn == "log" else {"eps": v.sinkhorn_eps}))
    wanted = reference.aggregate(t["x"], pre, layout=v.layout), post, res
    for variant in (name, v):
        found = reference.pre(t["x"], t["phi"], t["alpha"], t["beta"], norm_weight=t["norm_weight"], variant=variant)
        for one, two in zip(found, wanted, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("name", PRESETS)
def test_hyper_connection_is_pre_and_expand_combine(name, generator):
    """Bit for bit; layout and orientation are the variant's, unless given."""
    case = Case(4, 40, (5,), variant=name, bias=True, dropout_p=0.2)
    t = make_inputs(case, generator)
    v = VARIANTS[name]
    parameters = t["phi"], t["alpha"], t["beta"]
    options = {"bias": t["bias"], "dropout_p": 0.2, "seed": 3}
    layer_input, post, res = reference.pre(t["x"], *parameters, variant=name)
    choice = {"layout": v.layout, "res_orientation": v.res_orientation}
    wanted = reference.expand_combine(sublayer(layer_input), post, t["x"], res, **choice, **options)
    found = reference.hyper_connection(t["x"], sublayer, *parameters, variant=name, **options)
    assert torch.equal(found, wanted)
    other = "io" if v.res_orientation == "oi" else "oi"
    turned = reference.hyper_connection(t["x"], sublayer, *parameters, variant=name, res_orientation=other, **options)
    assert not torch.equal(found, turned)


def test_composites_default_to_deepseek_v4(generator):
    case = Case(4, 16, (5,))
    t = make_inputs(case, generator)
    parameters = t["phi"], t["alpha"], t["beta"]
    one, two = (reference.pre(t["x"], *parameters, **choice) for choice in ({}, {"variant": "deepseek_v4"}))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert torch.equal(
        reference.head(t["x"], t["fn"], t["base"], t["scale"]),
        reference.head(t["x"], t["fn"], t["base"], t["scale"], variant="deepseek_v4", layout="streams"),
    )


def test_the_gradient_of_x_is_rounded_once(generator):
    """x is read by projection, aggregate and expand_combine: their gradients are added in fp32, not in bf16."""
    inputs = make_inputs(Case(4, 256, (64,)), generator)
    wide = inputs["x"].detach().float().requires_grad_()
    parameters = [inputs[name] for name in ("phi", "alpha", "beta")]
    upstream = torch.randn(wide.shape, generator=generator).to(BF16)

    def gradient(x, layer):
        return torch.autograd.grad(reference.hyper_connection(x, layer, *parameters), x, upstream.to(x.dtype))[0]

    rounded = gradient(wide, lambda layer_input: sublayer(layer_input.to(BF16)).float())
    assert torch.equal(gradient(inputs["x"], sublayer), rounded.to(BF16))

    def pre_gradient(x):
        outputs = reference.pre(x, *parameters)
        return torch.autograd.grad(outputs, x, [upstream[:, 0].to(x.dtype), outputs[1], outputs[2]])[0]

    assert torch.equal(pre_gradient(inputs["x"]), pre_gradient(wide).to(BF16))


def test_fp64_on_request(generator):
    """bf16 inputs: coefficients in fp64, the others the exact result rounded once."""
    case = Case(4, 64, (9,), norm_weight=True)
    inputs = make_inputs(case, generator)
    wide = in_fp64(inputs)
    layer_input, post, res = call(reference, "pre", case, inputs, compute_dtype=FP64)
    exact = call(reference, "pre", case, wide, compute_dtype=FP64)
    assert layer_input.dtype is BF16 and torch.equal(layer_input, exact[0].to(BF16))
    assert post.dtype is res.dtype is FP64 and torch.equal(post, exact[1]) and torch.equal(res, exact[2])


def test_precision_changes_nothing(generator):
    case = Case(4, 64, (9,), norm_weight=True)
    inputs = make_inputs(case, generator)
    for op in ("projection", "head", "pre", "hyper_connection"):
        results = [
            call(reference, op, case, inputs, **choice) for choice in ({}, *({"precision": p} for p in PRECISIONS))
        ]
        for other in results[1:]:
            assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_shapes_of_meta_tensors():
    case = Case(4, 64, (2, 3), norm_weight=True, bias=True)
    generator = seeded_generator("meta", "cpu")
    inputs = {name: t.to("meta") for name, t in make_inputs(case, generator).items()}
    for op, (_, outputs) in OPERATIONS.items():
        upstream = make_upstream(op, case, generator)
        for name, t in zip(outputs, call(reference, op, case, inputs), strict=True):
            assert t.is_meta and t.shape == upstream[name].shape and t.dtype is upstream[name].dtype, (op, name)


def test_expand_makes_new_memory():
    for n in STREAMS:
        for layout in LAYOUTS:
            h = torch.ones(2, 8)
            x = reference.expand(h, n, layout=layout)
            h.zero_()
            assert x.is_contiguous() and x.all()


# Parameters with a main_grad

PARAMETERS = {"phi", "norm_weight", "alpha", "beta", "bias", "fn", "base", "scale"}


@pytest.mark.parametrize("op", ["projection", "coefficients", "expand_combine", "head", "pre", "hyper_connection"])
def test_main_grad_is_added_to(op, generator):
    """Every parameter's gradient is added in fp32, and its grad stays None."""
    case = Case(4, 16, (5,), parameters=BF16, norm_weight=True, bias=True)
    inputs = make_inputs(case, generator)
    upstream = make_upstream(op, case, generator)
    exact = oracle(op, case, inputs, upstream)
    found = differentiate(reference, op, case, inputs, upstream)
    parameters = {name: inputs[name] for name in OPERATIONS[op][0] if name in PARAMETERS}
    assert parameters
    start = {}
    for name, parameter in parameters.items():
        parameter.main_grad = torch.randn(parameter.shape, generator=generator)
        start[name] = parameter.main_grad.double()
    for times in (1, 2):
        outputs = call(reference, op, case, inputs)
        torch.autograd.backward(outputs, [upstream[name] for name in OPERATIONS[op][1]])
        for name, parameter in parameters.items():
            assert parameter.grad is None
            value = exact["d" + name].value
            rtol = 3e-2 if op == "hyper_connection" else 1e-4
            allowed = rtol * value.abs().max() + 1e-5
            assert (parameter.main_grad.double() - start[name] - times * value).abs().max() <= times * allowed, name
        for name in set(OPERATIONS[op][0]) - PARAMETERS:
            assert torch.equal(inputs[name].grad, times * found["d" + name])


@pytest.mark.parametrize(
    "main_grad",
    [torch.zeros(24), torch.zeros(24, 64, dtype=BF16), torch.zeros(64, 24).t()],
    ids=["shape", "dtype", "strides"],
)
def test_bad_main_grad(main_grad, generator):
    inputs = make_inputs(Case(4, 16, (5,)), generator)
    inputs["phi"].main_grad = main_grad
    H, _ = reference.projection(inputs["x"], inputs["phi"])
    with pytest.raises(ValueError, match=r"^projection: phi.main_grad must be contiguous float32 of shape \(24, 64\)"):
        H.sum().backward()


@pytest.mark.parametrize("module", [reference, mhc], ids=["reference", "kernels"])
@pytest.mark.parametrize("op", ["projection", "coefficients", "expand_combine", "head", "pre", "hyper_connection"])
def test_a_main_grad_beside_a_tensor_hook_is_refused(op, module, generator):
    """Of each parameter; its hook would be called with None."""
    case = Case(4, 16, (5,), norm_weight=True, bias=True)
    for name in PARAMETERS.intersection(OPERATIONS[op][0]):
        inputs = make_inputs(case, generator)
        inputs[name].main_grad = torch.zeros(inputs[name].shape)
        inputs[name].register_hook(lambda gradient: gradient * 2)
        upstream = make_upstream(op, case, generator)
        with (
            fake_kernels(),
            pytest.raises(ValueError, match=rf"^\w+: {name}.main_grad must be of a parameter without "),
        ):
            torch.autograd.backward(call(module, op, case, inputs), [upstream[output] for output in OPERATIONS[op][1]])


# Dropout

VECTORS = [  # Random123's known answers of philox4x32 with 10 rounds: counter, key, words
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize("counter, key, words", VECTORS, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(counter, key, words):
    found = philox4x32(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert " ".join(f"{word.item():08x}" for word in found) == words


def philox_in_python(counter, key):
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def test_philox_is_exact_for_all_words(generator):
    """Against Python's integers: products beyond 2^63 and sums beyond 2^32."""
    words = torch.randint(0, 2**32, (6, 500), generator=generator)
    words[:, :64] = torch.cartesian_prod(*[torch.tensor([0, 0xFFFFFFFF])] * 6).t()
    found = torch.stack(philox4x32(tuple(words[:4]), tuple(words[4:]))).t().tolist()
    for column, row in zip(words.t().tolist(), found, strict=True):
        assert tuple(row) == philox_in_python(column[:4], column[4:])


@pytest.mark.parametrize("seed", [0, 1, SEED, -1, -(2**63), 2**63 - 1])
def test_dropout_mask_is_its_definition(seed):
    """Counter (k // 4, m, 0, 0), key (low, high), word k % 4; K need not be a multiple of 4."""
    key = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for p in (0.1, 0.5):
        mask = reference.dropout_mask(seed, 3, 13, p, CPU)
        assert mask.shape == (3, 13) and mask.dtype is torch.bool
        for m in range(3):
            for k in range(13):
                word = philox_in_python((k // 4, m, 0, 0), key)[k % 4]
                assert mask[m, k].item() == (word >= int(p * 2**32))
        assert torch.equal(mask, reference.dropout_mask(torch.tensor([seed]), 3, 13, p, CPU))
    threshold = philox_in_python((0, 0, 0, 0), key)[0]
    assert reference.dropout_mask(seed, 1, 1, threshold / 2**32, CPU).all()
    assert not reference.dropout_mask(seed, 1, 1, (threshold + 1) / 2**32, CPU).any()


def test_dropout_mask_keeps_its_share():
    masks = torch.stack([reference.dropout_mask(seed, 100, 1000, 0.3, CPU) for seed in (1, 2, 1 << 32)]).double()
    assert (masks.mean((1, 2)) - 0.7).abs().max() < 0.01  # five standard deviations are 0.007
    assert (masks.mean(1) - 0.7).abs().max() < 0.3 and (masks.mean(2) - 0.7).abs().max() < 0.1
    assert (torch.corrcoef(masks.flatten(1)) - torch.eye(3)).abs().max() < 0.02
    assert reference.dropout_mask(1, 10, 100, 0.0, CPU).all()
    assert not reference.dropout_mask(1, 10, 100, 1.0 - 2.0**-53, CPU).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_of_expand_combine(layout, generator):
    """Of the added part alone, each stream with a mask of its own; backward with the same mask."""
    case = Case(4, 16, (2, 3), FP32, layout=layout, bias=True, dropout_p=0.3)
    t = make_inputs(case, generator)
    nothing = torch.zeros_like(t["x"])
    arguments = t["f"], t["post"]
    options = {"bias": t["bias"], "layout": layout}
    added = reference.expand_combine(*arguments, nothing, t["res"], **options)
    mixed = reference.expand_combine(torch.zeros_like(t["f"]), t["post"], t["x"], t["res"], layout=layout)
    out = reference.expand_combine(*arguments, t["x"], t["res"], dropout_p=0.3, seed=SEED, **options)
    mask = reference.dropout_mask(SEED, 6, 64, 0.3, CPU).view(t["x"].shape)
    torch.testing.assert_close(out, torch.where(mask, added / 0.7, 0.0) + mixed)
    assert mask.float().mean() < 1.0 and not torch.equal(mask[..., 0], mask[..., 1])
    upstream = torch.randn(out.shape, generator=generator)
    df, dx = torch.autograd.grad(out, (t["f"], t["x"]), upstream)
    df_masked, dx_all = torch.autograd.grad(added + mixed, (t["f"], t["x"]), upstream)[0:2]
    masked = torch.autograd.grad(
        reference.expand_combine(*arguments, nothing, t["res"], **options), t["f"], upstream * mask / 0.7
    )[0]
    torch.testing.assert_close(df, masked)
    torch.testing.assert_close(dx, dx_all)
    assert not torch.allclose(df, df_masked)


def test_the_scale_of_dropout_is_of_the_compute_dtype(generator):
    """In fp64 to the last bit."""
    case = Case(4, 16, (2, 3), bias=True)
    t = in_fp64(make_inputs(case, generator)) | {"x": torch.zeros(case.residual_shape, dtype=FP64)}
    (added,) = call(reference, "expand_combine", case, t, compute_dtype=FP64)
    dropped = dataclasses.replace(case, dropout_p=0.3)
    (out,) = call(reference, "expand_combine", dropped, t, compute_dtype=FP64)
    mask = reference.dropout_mask(SEED, 6, 64, 0.3, CPU).view(out.shape)
    assert torch.equal(out, torch.where(mask, added * (1.0 / 0.7), 0.0))


def test_the_default_dtype_changes_nothing(generator):
    case = Case(4, 16, (5,), FP32, norm_weight=True, bias=True, dropout_p=0.3)
    inputs = make_inputs(case, generator)
    for op in OPERATIONS:
        upstream = make_upstream(op, case, generator)
        wanted = differentiate(reference, op, case, inputs, upstream)
        torch.set_default_dtype(BF16)
        try:
            found = differentiate(reference, op, case, inputs, upstream)
        finally:
            torch.set_default_dtype(FP32)
        for name, result in wanted.items():
            assert found[name].dtype is result.dtype and torch.equal(found[name], result), (op, name)


def test_seeds(generator):
    """An int and a tensor of it are one seed; another gives another mask; without dropout it changes nothing."""
    case = Case(4, 16, (5,))
    t = make_inputs(case, generator)

    def out(seed, p=0.5):
        return reference.expand_combine(t["f"], t["post"], t["x"], t["res"], dropout_p=p, seed=seed)

    assert torch.equal(out(7), out(torch.tensor(7))) and torch.equal(out(7), out(torch.tensor([7])))
    assert torch.equal(out(-1), out(torch.tensor([-1])))
    assert not torch.equal(out(7), out(8)) and not torch.equal(out(7), out(7 + 2**32))
    assert torch.equal(out(7, 0.0), out(None, 0.0)) and torch.equal(out(7, 0), out(7, 0.0))


def test_dropout_under_checkpointing(generator):
    """Recomputed in the backward, the mask is the same: the seed is an argument, no state."""
    from torch.utils.checkpoint import checkpoint

    case = Case(4, 16, (5,), FP32, bias=True, dropout_p=0.4)
    inputs = make_inputs(case, generator)
    upstream = torch.randn(case.residual_shape, generator=generator)
    leaves = [inputs[name] for name in OPERATIONS["hyper_connection"][0] if name in inputs]
    plain = call(reference, "hyper_connection", case, inputs)[0]
    again = checkpoint(lambda: call(reference, "hyper_connection", case, inputs)[0], use_reentrant=False)
    assert torch.equal(plain, again)
    one, two = (torch.autograd.grad(out, leaves, upstream) for out in (plain, again))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# What the tests are made of


@pytest.mark.parametrize("wrong", ["one percent", "nan", "one element", "one step", "biased"])
def test_the_check_fails_on_a_wrong_result(wrong, generator):
    case = Case(4, 64, (40,))
    inputs = make_inputs(case, generator)
    upstream = make_upstream("aggregate", case, generator)
    exact = oracle("aggregate", case, inputs, upstream)
    y = exact["layer_input"].value.to(BF16)
    check({"layer_input": y}, exact)
    if wrong == "one percent":
        y = (y.float() * 1.01).to(BF16)
    elif wrong == "nan":
        y[3, 5] = float("nan")
    elif wrong == "one element":
        y[3, 5] += 0.1
    elif wrong == "one step":
        y[3, 5] = torch.nextafter(torch.nextafter(y[3, 5], 9e9 * y[3, 5]), 9e9 * y[3, 5])
    else:  # fp32, each element within the bound, all off one way
        y = exact["layer_input"].value.float()
        check({"layer_input": y}, exact)
        noise = (exact["layer_input"].peer.double() - exact["layer_input"].value).abs().max()
        y = y + 7 * noise.float()
    with pytest.raises(AssertionError, match=r"times the bound|rms error" if wrong != "biased" else "rms error"):
        check({"layer_input": y}, exact)
    check({"layer_input": y}, exact, margins={"layer_input": 1.0}) if wrong != "nan" else None


def test_the_data_has_no_symmetry(generator):
    """Gradients of all inputs, none of them 0: a result that ignores an input cannot pass."""
    for op, _, exact in run_all(Case(norm_weight=True, bias=True), generator):
        for name, t in exact.items():
            assert t.value.norm() > 0 and t.value.isfinite().all(), (op, name)
    logits = make_inputs(Case(tokens=(100,)), generator)["logits"]
    assert 0.5 < logits.std() < 2.0


def test_gaps_hold_nan(generator):
    inputs = make_inputs(Case(4, 16, (5,), gap=3), generator)
    for name, stride in (("x", 67), ("f", 19)):
        t = inputs[name]
        assert t.stride(0) == stride and t.isfinite().all()
        memory = torch.as_strided(t.detach(), (5 * stride,), (1,), 0)
        assert memory.isnan().sum() == 15


def test_number_of_coefficients():
    assert [num_coefficients(n) for n in STREAMS] == [3, 8, 24, 80]
    assert isinstance(Case().preset, Variant)
