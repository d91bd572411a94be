"""Every op against the reference in fp64: results and all gradients, the error bounded by torch's own in fp32."""

from dataclasses import replace

import pytest
import torch

from cute_kernels import mhc
from cute_kernels.mhc import reference
from cute_kernels.mhc.variants import VARIANTS
from tests.mhc.cases import (
    BF16,
    FP16,
    FP32,
    OPERATIONS,
    PRESETS,
    SINKHORNS,
    STREAMS,
    WITH_PRODUCTS,
    Case,
    call,
    check,
    differentiate,
    make_inputs,
    make_upstream,
    oracle,
    precision_of,
    product_margins,
    relative_rms,
    saturated_logits,
)
from tests.norm.cases import strided

EVERY_OP = tuple(OPERATIONS)
WITHOUT_PRODUCTS = tuple(op for op in OPERATIONS if op not in WITH_PRODUCTS)
STREAMWISE = ("projection", "aggregate", "expand_combine")

# Each n, layout, orientation, variant, dtype of x and of parameters with each op; odd sizes, rows off 16 bytes, several
# parts of K and several chunks of tokens with those that they concern. A product is the slowest to compile: one or two
# for most cases
CASES = {
    Case(4, 64, (130,), norm_weight=True, bias=True): EVERY_OP,
    Case(1, 64, (13,), FP16, variant="liger", bias=True): (*WITHOUT_PRODUCTS, "head", "hyper_connection"),
    Case(2, 64, (2, 65), FP32, BF16, "transformer_engine", norm_weight=True, bias=True): (
        *WITHOUT_PRODUCTS,
        "projection",
        "pre",
    ),
    Case(8, 64, (13,), BF16, FP32, "tilekernels", norm_weight=True): (*WITHOUT_PRODUCTS, "hyper_connection"),
    Case(4, 64, (130,), FP16, BF16, "megatron", "channels", "io", bias=True): (*WITHOUT_PRODUCTS, "hyper_connection"),
    Case(8, 1000, (13,), FP16, BF16, "megatron_dev", "channels", "oi", bias=True): STREAMWISE,
    Case(2, 1000, (130,), BF16, FP32, "liger", bias=True): ("expand_combine", "hyper_connection"),
    Case(4, 13, (13,), BF16, FP32, "megatron_dev", "channels", norm_weight=True, bias=True): (
        *WITHOUT_PRODUCTS,
        "head",
        "hyper_connection",
    ),
    Case(4, 5129, (1,), BF16, FP32, "transformer_engine", layout="streams", bias=True): ("hyper_connection",),
    Case(4, 5129, (13,), FP32, FP32, "deepseek_v4", "channels"): STREAMWISE,
    Case(1, 5129, (13,), BF16, FP32, norm_weight=True, bias=True): ("hyper_connection",),
    Case(8, 13, (5,), FP32, BF16, "megatron", bias=True): ("aggregate", "expand_combine", "projection"),
    Case(8, 64, (600,), FP32, norm_weight=True): ("projection", "hyper_connection"),  # the most terms, in a ring of two
    Case(8, 4104, (3,), norm_weight=True): ("pre",),  # more parts of K than are asked for at once
    # Tokens that one box holds
    Case(2, 16, (70,), layout="channels", bias=True): ("projection", "hyper_connection"),
    Case(4, 8, (70,), FP32, layout="channels", norm_weight=True): ("projection", "hyper_connection"),
    Case(8, 8, (70,)): ("projection", "head", "hyper_connection"),
    Case(8, 8, (70,), layout="channels"): ("projection", "head"),
    # A CTA sums over a token, of two, four, five, seven or eight warps
    Case(4, 2048, (5,), norm_weight=True, bias=True): ("aggregate", "expand_combine", "hyper_connection"),
    Case(4, 1024, (5,), layout="channels", bias=True): ("aggregate", "expand_combine"),
    Case(4, 5120, (5,), bias=True): ("aggregate", "expand_combine"),
    Case(4, 7168, (3,)): ("aggregate",),
    Case(4, 4096, (3,), layout="channels"): ("aggregate",),
    Case(4, 1280, (1100,), norm_weight=True, bias=True): ("projection", "hyper_connection"),
    Case(2, 1280, (1, 513), FP16, FP32, "megatron", bias=True): ("projection",),
}
DROPPED = [
    Case(4, 64, (130,), bias=True, dropout_p=0.3),
    Case(2, 13, (13,), FP16, variant="transformer_engine", bias=True, dropout_p=0.3),
    Case(8, 64, (13,), FP32, variant="megatron", layout="channels", dropout_p=0.3),
    Case(1, 1000, (5,), FP32, dropout_p=0.3, bias=True),
]
FULL = Case(4, 64, (130,), norm_weight=True, bias=True)


def assert_accurate(op, case, tensors, upstream, precision="fp32"):
    found = differentiate(mhc, op, case, tensors, upstream, **precision_of(op, precision))
    exact = oracle(op, case, tensors, upstream)
    assert found.keys() == exact.keys()
    for name, result in found.items():
        if name.startswith("d"):
            assert result.dtype is tensors[name[1:]].dtype
    check(found, exact, margins=product_margins(op, case, exact, precision))


@pytest.mark.parametrize("precision", ["fp32"])
@pytest.mark.parametrize("op, case", [(op, case) for case, ops in CASES.items() for op in ops], ids=str)
def test_against_fp64(op, case, precision, generator):
    assert_accurate(op, case, make_inputs(case, generator), make_upstream(op, case, generator), precision)


@pytest.mark.parametrize("case", DROPPED, ids=str)
@pytest.mark.parametrize("op", ["expand_combine"])
def test_dropout(op, case, generator):
    assert_accurate(op, case, make_inputs(case, generator), make_upstream(op, case, generator))


@pytest.mark.parametrize("case", [replace(FULL, variant=name, dtype=FP32) for name in PRESETS], ids=str)
@pytest.mark.parametrize("op", ["coefficients", "sinkhorn", "pre"])
def test_variants(op, case, generator):
    assert_accurate(op, case, make_inputs(case, generator), make_upstream(op, case, generator), "tf32")


TF32 = [
    Case(4, 1280, (1100,), norm_weight=True),
    Case(2, 64, (130,), FP16, variant="transformer_engine"),
    Case(4, 64, (130,), FP32, norm_weight=True),
    Case(8, 64, (13,), BF16, variant="tilekernels", norm_weight=True),
    Case(8, 136, (2100,), norm_weight=True),  # several slices, chunks and turns of a ring, the last tile not whole
    Case(8, 136, (1100,), parameters=BF16, gap=8),
    Case(1, 5129, (130,), FP32),
]
TF32_ERROR = 2.0**-15


@pytest.mark.parametrize("case", TF32, ids=str)
@pytest.mark.parametrize("op", ["projection"])
def test_tf32_products(op, case, generator):
    """Pairs of bf16: H and dphi err by less than 2^-15, root mean square, or rounding; the mean square as in fp32."""
    tensors, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    found = differentiate(mhc, op, case, tensors, upstream, precision="tf32")
    exact = oracle(op, case, tensors, upstream)
    for name in ("H", "dphi", *["dnorm_weight"] * case.norm_weight):
        rounding = torch.finfo(found[name].dtype).eps / 4
        assert relative_rms(found[name], exact[name].value) < max(TF32_ERROR, rounding), name
    check({"mean_square": found.pop("mean_square")}, exact)
    check(found, exact, margins=product_margins(op, case, exact, "tf32"))


COMPOSITES = [
    TF32[0],
    Case(8, 64, (600,), FP32, norm_weight=True),  # the smallest ring, of two slots; sixteen tiles
    # By pairs of warpgroups: slices beyond the end, chunks of an odd number of tiles, the last tile not whole
    Case(8, 24, (70,), res_orientation="oi"),
    Case(8, 136, (2100,), norm_weight=True, bias=True),
    Case(8, 136, (1100,), parameters=BF16, layout="channels", gap=8),
    Case(8, 520, (1, 321), layout="channels", res_orientation="oi", norm_weight=True),
]


@pytest.mark.parametrize("case", COMPOSITES, ids=str)
@pytest.mark.parametrize("op", ["pre", "hyper_connection"])
def test_tf32_composites(op, case, generator):
    assert_accurate(op, case, make_inputs(case, generator), make_upstream(op, case, generator), "tf32")


@pytest.mark.parametrize(
    "case",
    [replace(FULL, gap=gap, layout=layout) for gap, layout in [(1, "streams"), (8, "channels"), (2, "channels")]]
    + [replace(FULL, gap=8), replace(FULL, gap=3, n=2, channels=13)],
    ids=str,
)
@pytest.mark.parametrize("op", ["projection", "aggregate", "expand_combine", "contract", "hyper_connection"])
def test_strided_tokens(op, case, generator):
    """Between the tokens there is NaN, of which nothing comes to the results."""
    assert_accurate(op, case, make_inputs(case, generator), make_upstream(op, case, generator), "tf32")


@pytest.mark.slow
def test_bias_of_many_tokens():
    """More chunks of tokens than one dimension of a grid holds beside another."""
    tokens = 64 * 65_536 + 1
    x = torch.zeros((tokens, 1, 8), dtype=BF16, device="cuda")
    f, bias = x[:, 0].contiguous(), torch.zeros(8, device="cuda", requires_grad=True)
    out = mhc.expand_combine(
        f, torch.ones((tokens, 1), device="cuda"), x, x.new_zeros((tokens, 1, 1)).float(), bias=bias
    )
    out.backward(torch.ones_like(out))
    assert (bias.grad == tokens).all()


@pytest.mark.parametrize("offset", [1, 4])
@pytest.mark.parametrize("op", ["projection", "aggregate", "expand_combine", "contract", "pre"])
def test_unaligned_base(op, offset, generator):
    """x and f begin off 16 bytes; their rows have gaps."""
    tensors = make_inputs(FULL, generator)
    for name in ("x", "f"):
        t = tensors[name].detach()
        moved = strided(t.flatten(1), 4, offset).unflatten(1, t.shape[1:])
        assert moved.data_ptr() % 16 == 2 * offset
        tensors[name] = moved.requires_grad_()
    assert_accurate(op, FULL, tensors, make_upstream(op, FULL, generator), "tf32")


@pytest.mark.parametrize("start", [0, 1, 2])
def test_packed_coefficients(start, generator):
    """pre, post and res as slices of one matrix, with and without an offset."""
    t = make_inputs(FULL, generator)
    packed = torch.zeros(130, 27, device=generator.device)[:, start : start + 24]
    packed.copy_(torch.cat([t["pre"], t["post"], t["res"].flatten(1)], 1).detach())
    sliced = {"pre": packed[:, :4], "post": packed[:, 4:8], "res": packed[:, 8:].unflatten(1, (4, 4))}
    inputs = t | {name: tensor.detach().requires_grad_() for name, tensor in sliced.items()}
    inputs["logits"] = inputs["res"]
    for op in ("aggregate", "expand_combine", "sinkhorn"):
        assert_accurate(op, FULL, inputs, make_upstream(op, FULL, generator))


@pytest.mark.parametrize("case", [replace(FULL, tokens=(0,), dropout_p=0.1)], ids=str)
@pytest.mark.parametrize("op", OPERATIONS)
def test_no_tokens(op, case, generator):
    """Empty results; zeros as gradients of parameters, nothing added to main_grad."""
    tensors, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    found = differentiate(mhc, op, case, tensors, upstream)
    wanted = differentiate(reference, op, case, tensors, upstream)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for tensor in tensors.values():
        tensor.main_grad = torch.ones_like(tensor, dtype=FP32)
    differentiate(mhc, op, case, tensors, upstream)
    assert all(tensor.main_grad.eq(1).all() for tensor in tensors.values())


@pytest.mark.parametrize("size", [50.0, 300.0])
@pytest.mark.parametrize("variant", SINKHORNS)
@pytest.mark.parametrize("n", STREAMS)
def test_saturated_logits(n, variant, size, generator):
    """exp of these overflows, or is 0, in fp32."""
    if variant == "exp_clamp" and size == 50.0:
        size = 40.0  # the exp of -100 is subnormal: 0 for the kernels, and clamped sums make much of the difference
    logits = saturated_logits(n, 130, generator, size)
    upstream = torch.randn(logits.shape, generator=generator, device=logits.device)
    results = []
    for library, dtype, options in (
        (mhc, FP32, {}),
        (reference, FP32, {}),
        (reference, torch.float64, {"compute_dtype": torch.float64}),
    ):
        leaf = logits.to(dtype).requires_grad_()
        res = library.sinkhorn(leaf, variant=variant, **options)
        (gradient,) = torch.autograd.grad(res, leaf, upstream.to(res.dtype))
        results.append((res.detach(), gradient))
    for found, peer, exact in zip(*results, strict=True):
        assert found.isfinite().all()
        bound = 8 * (peer.double() - exact).abs().max() + 8 * 2.0**-23 * exact.abs().max()
        assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("variant", SINKHORNS)
@pytest.mark.parametrize("n", STREAMS)
def test_a_logit_that_is_not_finite(n, variant, value, generator):
    """NaN where the reference has it, forward and backward; the other matrices are what they are without it."""
    logits = torch.randn(40, n, n, generator=generator, device=generator.device)
    upstream = torch.randn(logits.shape, generator=generator, device=logits.device)
    logits[7, n - 1, 0] = value
    results = []
    for library in (mhc, reference):
        leaf = logits.clone().requires_grad_()
        res = library.sinkhorn(leaf, variant=variant)
        results.append((res.detach(), *torch.autograd.grad(res, leaf, upstream)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("case", [replace(FULL, variant=name) for name in PRESETS], ids=str)
@pytest.mark.parametrize("op", ["coefficients"])
def test_a_mean_square_of_nan(op, case, generator):
    tensors, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
    with torch.no_grad():
        tensors["mean_square"][7] = torch.nan
    found, wanted = (differentiate(library, op, case, tensors, upstream) for library in (mhc, reference))
    assert wanted["dmean_square"].isnan().sum() == 1
    for name, result in wanted.items():
        torch.testing.assert_close(found[name], result, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("placement, eps", [("inside", 1e-28), ("outside", 1e-14)])
def test_tiny_eps(placement, eps, generator):
    """And tokens as small: powers of 1 / rms overflow, the gradient of the mean square does not."""
    case = replace(FULL, variant=replace(VARIANTS["deepseek_v4"], rms_eps=eps, rms_eps_placement=placement))
    tensors = make_inputs(case, generator)
    for name, scale in (("H", 1e-14), ("mean_square", 1e-28)):
        tensors[name] = (tensors[name].detach() * scale).requires_grad_()
    assert_accurate("coefficients", case, tensors, make_upstream("coefficients", case, generator))


@pytest.mark.parametrize("case", [replace(FULL, variant=name) for name in PRESETS], ids=str)
@pytest.mark.parametrize("op", ["coefficients"])
def test_saturated_coefficients(op, case, generator):
    tensors = make_inputs(case, generator)
    tensors["H"] = (50.0 * tensors["H"].detach().sign()).requires_grad_()
    assert_accurate(op, case, tensors, make_upstream(op, case, generator))


@pytest.mark.parametrize(
    "case", [Case(4, 4096, (13,), FP16), Case(4, 64, (13,), FP16, layout="channels", norm_weight=True)], ids=str
)
@pytest.mark.parametrize("op", ["pre"])
def test_fp16_whose_squares_overflow(op, case, generator):
    tensors = make_inputs(case, generator)
    x = tensors["x"].detach() * 3e3  # the sum of the streams does not overflow
    assert x.isfinite().all() and x.square().isinf().any()
    tensors["x"] = x.requires_grad_()
    assert all(t.isfinite().all() for t in call(mhc, op, case, tensors))
    assert_accurate(op, case, tensors, make_upstream(op, case, generator), "tf32")


def test_tokens_of_zeros(generator):
    """rms is the root of eps: finite results, the reference's."""
    tensors = make_inputs(FULL, generator)
    x = tensors["x"].detach()
    x[:7] = 0.0
    tensors["x"] = x.requires_grad_()
    for op in WITH_PRODUCTS:
        upstream = make_upstream(op, FULL, generator)
        found = differentiate(mhc, op, FULL, tensors, upstream)
        exact = oracle(op, FULL, tensors, upstream)
        assert all(t.isfinite().all() for t in found.values())
        check(found, exact, margins=product_margins(op, FULL, exact, "tf32"))


def test_inputs_are_left_alone(generator):
    tensors = make_inputs(FULL, generator)
    before = {name: t.detach().clone() for name, t in tensors.items()}
    for op in OPERATIONS:
        upstream = make_upstream(op, FULL, generator)
        copies = {name: t.clone() for name, t in upstream.items()}
        differentiate(mhc, op, FULL, tensors, upstream)
        assert all(torch.equal(upstream[name], copies[name]) for name in upstream)
    assert all(torch.equal(tensors[name], before[name]) for name in before)


@pytest.mark.parametrize("fill", [float("nan"), 1.0])
def test_results_do_not_depend_on_what_memory_held(fill, generator):
    """Results and partial sums are allocated, not cleared: every element is written."""
    case = Case(4, 13, (130,), BF16, FP32, "megatron_dev", "channels", norm_weight=True, bias=True)
    tensors, upstream = make_inputs(case, generator), make_upstream("hyper_connection", case, generator)
    wanted = differentiate(mhc, "hyper_connection", case, tensors, upstream)
    dirty = [torch.full((2**power,), fill, device=generator.device) for power in range(8, 20) for _ in range(4)]
    del dirty
    found = differentiate(mhc, "hyper_connection", case, tensors, upstream)
    for name in wanted:
        assert found[name].isfinite().all() and torch.equal(found[name], wanted[name]), name
