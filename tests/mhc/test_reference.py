"""The references of the hyper-connections against formulas and fp64."""

import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from cute_kernels import mhc
from cute_kernels.mhc import reference
from cute_kernels.mhc.variants import VARIANTS
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
    STREAMS,
    Case,
    call,
    check,
    differentiate,
    in_fp64,
    in_the_other_layout,
    make_inputs,
    make_upstream,
    oracle,
    run_all,
    seeded_generator,
    sublayer,
)

PRECISIONS = ("tf32", "fp32")


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


# Parts of the composite calls


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
    wrong = reference.hyper_connection(t["x"], sublayer, *parameters, variant=name, res_orientation=other, **options)
    assert not torch.equal(found, wrong)


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
    """For each parameter; its hook would be called with None."""
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
