"""The kernels' path of the hyper-connections on the CPU: Specs, launches, allocation, results.

Fakes, plain torch, take the place of the compiled kernels; all above them is what runs on a GPU. Gradients:
``test_dispatch_autograd.py``; graphs and operators: ``test_dispatch_torch.py``.
"""

import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cute_kernels import mhc
from cute_kernels.mhc import launch, reference
from cute_kernels.mhc.config import ProjectionBackwardConfig, WarpgroupBackwardConfig
from cute_kernels.mhc.op.common import rows
from cute_kernels.mhc.variants import VARIANTS
from cute_kernels.runtime import launches
from cute_kernels.runtime.targets import Target
from tests.fakes import fake_kernels
from tests.mhc.cases import (
    BF16,
    FP16,
    FP32,
    LAYOUTS,
    OPERATIONS,
    PRESETS,
    RES_ORIENTATIONS,
    SEED,
    STREAMS,
    WITH_PARAMETERS,
    Case,
    call,
    check,
    differentiate,
    make_inputs,
    make_upstream,
    oracle,
    seeded_generator,
    sublayer,
)

FULL = Case(4, 16, (5,), FP32, norm_weight=True, bias=True)


@pytest.fixture(autouse=True)
def kernels():
    with fake_kernels() as jobs:
        yield jobs


@pytest.mark.parametrize("tokens", [5, 2000])
def test_a_gpu_of_one_sm(tokens, generator, monkeypatch):
    """One CTA has all the items; of 2000 tokens these are groups of chunks."""
    monkeypatch.setattr(launches, "target_of", lambda index: Target("sm_90a", 1))
    schedule, found = ProjectionBackwardConfig.schedule, []
    monkeypatch.setattr(ProjectionBackwardConfig, "schedule", lambda *a: found.append(schedule(*a)) or found[-1])
    assert_as_the_reference("hyper_connection", Case(4, 256, (tokens,)), generator)
    assert found == [(4 if tokens == 2000 else 1, 1)]


def assert_as_the_reference(op, case, generator):
    inputs = make_inputs(case, generator)
    upstream = make_upstream(op, case, generator)
    found = differentiate(mhc, op, case, inputs, upstream)
    exact = oracle(op, case, inputs, upstream)
    assert found.keys() == exact.keys()
    check(found, exact)


@pytest.mark.parametrize("autograd", [False, True])
@pytest.mark.parametrize("op", ["expand_combine", "hyper_connection"])
def test_a_first_call_amid_another(op, autograd, generator, monkeypatch):
    """As two threads make them, one while the other's kernel is launched: later calls have all that they need."""
    case = Case(4, 24, (5,), BF16)
    inputs = make_inputs(case, generator)
    wanted = call(reference, op, case, inputs)
    combine, calls, threads = launch.expand_combine_forward.function, [], iter([2])

    def another_thread_is_here(*arguments):
        if next(threads, None):
            with torch.set_grad_enabled(autograd):
                calls.append(call(mhc, op, case, inputs))
        combine(*arguments)

    monkeypatch.setattr(launch.expand_combine_forward, "function", another_thread_is_here)
    with torch.set_grad_enabled(autograd):
        calls += [call(mhc, op, case, inputs) for _ in range(3)]
    assert len(calls) == 4
    for (found,) in calls:
        assert torch.allclose(found, wanted[0], rtol=2e-2, atol=2e-2) and found.requires_grad is autograd


# Results and gradients


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", STREAMS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_streams_and_layouts(op, n, layout, generator):
    assert_as_the_reference(op, Case(n, 24, (2, 3), FP32, layout=layout, norm_weight=True, bias=True), generator)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("orientation", RES_ORIENTATIONS)
@pytest.mark.parametrize("op", ["expand_combine", "hyper_connection"])
def test_orientations_and_dropout(op, orientation, layout, dropout_p, generator):
    case = dataclasses.replace(FULL, res_orientation=orientation, layout=layout, dropout_p=dropout_p)
    assert_as_the_reference(op, case, generator)


@pytest.mark.parametrize("variant", PRESETS)
@pytest.mark.parametrize("op", ["coefficients", "sinkhorn", "head", "pre", "hyper_connection"])
def test_variants(op, variant, generator):
    assert_as_the_reference(op, dataclasses.replace(FULL, variant=variant), generator)


@pytest.mark.parametrize("parameters", [FP32, BF16])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("op", OPERATIONS)
def test_dtypes(op, dtype, parameters, generator):
    case = dataclasses.replace(FULL, dtype=dtype, parameters=parameters, channels=13)
    assert_as_the_reference(op, case, generator)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gap", [1, 2, 8])
@pytest.mark.parametrize(
    "op", ["projection", "aggregate", "expand_combine", "contract", "head", "pre", "hyper_connection"]
)
def test_strided_tokens(op, gap, layout, generator):
    assert_as_the_reference(op, dataclasses.replace(FULL, dtype=BF16, layout=layout, gap=gap), generator)


def test_many_tokens():
    """Several chunks of each sum, several parts of K. The three sums of dalpha are of terms that nearly cancel: a fixed
    seed, since where the reference is right by chance no other order of theirs is as right.
    """
    case = dataclasses.replace(FULL, channels=1280, tokens=(1100,))
    for op in ("pre", "hyper_connection"):
        assert_as_the_reference(op, case, seeded_generator("many tokens", "cpu"))


@pytest.mark.parametrize("start", [0, 1, 2])
def test_packed_coefficients(start, generator):
    """Slices of one matrix with an offset, and a matrix H with gaps: no copy in the forward, right in the backward."""
    t = make_inputs(FULL, generator)
    wide = torch.zeros(5, 27)
    wide[:, start : start + 24] = torch.cat([t["pre"], t["post"], t["res"].flatten(1)], 1).detach()
    packed = wide[:, start : start + 24]
    sliced = {"pre": packed[:, :4], "post": packed[:, 4:8], "res": packed[:, 8:].unflatten(1, (4, 4))}
    wide_h = torch.zeros(5, 27)
    wide_h[:, start : start + 24] = t["H"].detach()
    sliced |= {"logits": sliced["res"], "H": wide_h[:, start : start + 24]}
    inputs = t | {name: tensor.detach().requires_grad_() for name, tensor in sliced.items()}
    for op in ("aggregate", "expand_combine", "sinkhorn", "coefficients"):
        upstream = make_upstream(op, FULL, generator)
        check(differentiate(mhc, op, FULL, inputs, upstream), oracle(op, FULL, inputs, upstream))


@pytest.mark.parametrize("tokens", [1, 5])
def test_numbers_that_torch_negates_when_it_reads_them(tokens, generator):
    """One stream's coefficients, and their gradients, count as rows of contiguous numbers, which they are not."""
    case = dataclasses.replace(FULL, n=1, tokens=(tokens,))
    plain = make_inputs(case, generator)

    def negated(t):
        t = torch.complex(torch.zeros_like(t), -t.detach()).conj().imag
        assert t.is_neg()
        return t

    odd = plain | {name: negated(plain[name]).requires_grad_() for name in ("pre", "post", "res", "logits")}
    for op in ("aggregate", "expand_combine", "sinkhorn", "coefficients", "pre"):
        upstream = make_upstream(op, case, generator)
        wanted = differentiate(mhc, op, case, plain, upstream)
        incoming = {name: negated(t) if name in odd and t.shape[-1] == 1 else t for name, t in upstream.items()}
        assert any(t.is_neg() for t in incoming.values()) == (op in ("sinkhorn", "coefficients", "pre"))
        found = differentiate(mhc, op, case, odd, incoming)
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)

    names = ("scale", "base", "mean_square")[: 3 if tokens == 1 else 2]  # of one element: contiguous at any stride
    odd = plain | {name: negated(plain[name]).requires_grad_() for name in names}
    for op in ("coefficients", "head", "projection"):
        upstream = make_upstream(op, case, generator)
        wanted = differentiate(mhc, op, case, plain, upstream)
        incoming = upstream | {name: negated(t) for name, t in upstream.items() if name == "mean_square"}
        found = differentiate(mhc, op, case, odd, incoming)
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("op", OPERATIONS)
def test_upstream_of_any_layout(op, generator):
    """Incoming gradients that are transposed, that have gaps, that are one number."""
    inputs = make_inputs(FULL, generator)
    upstream = make_upstream(op, FULL, generator)
    wanted = differentiate(mhc, op, FULL, inputs, upstream)
    transposed = {name: t.movedim(0, -1).clone().movedim(-1, 0) for name, t in upstream.items()}
    gapped = {name: torch.stack([t, t], 1)[:, 0] for name, t in upstream.items()}
    for other in (transposed, gapped):
        found = differentiate(mhc, op, FULL, inputs, other)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    ones = {name: torch.ones(()).expand(t.shape) for name, t in upstream.items()}
    check(differentiate(mhc, op, FULL, inputs, ones), oracle(op, FULL, inputs, ones))


# The composite is its parts


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("variant", PRESETS)
def test_pre_is_its_parts(variant, dtype, generator):
    case = dataclasses.replace(FULL, variant=variant, dtype=dtype, channels=1280)
    t = make_inputs(case, generator)
    with torch.no_grad():
        H, mean_square = call(mhc, "projection", case, t)
        steps = t | {"H": H, "mean_square": mean_square}
        pre, post, logits = call(mhc, "coefficients", case, steps)
        (res,) = call(mhc, "sinkhorn", case, {"logits": logits})
        (layer_input,) = call(mhc, "aggregate", case, t | {"pre": pre})
        (out,) = call(mhc, "expand_combine", case, t | {"f": sublayer(layer_input), "post": post, "res": res})
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            found = call(mhc, "pre", case, t)
            whole = call(mhc, "hyper_connection", case, t)[0]
        assert all(torch.equal(a, b) for a, b in zip(found, (layer_input, post, res), strict=True))
        assert torch.equal(whole, out)


@pytest.mark.parametrize("offsets", [(0, 1), (1, 0)])
@pytest.mark.parametrize("channels", [64, 12])
def test_eight_streams_by_where_phi_lies(channels, offsets, kernels, generator):
    """By warpgroups where phi starts on 16 bytes, whatever was called before; of the width K alone counts."""
    t = make_inputs(Case(8, channels, (5,), BF16), generator)
    memory = torch.zeros(1 + t["phi"].numel())
    for offset in offsets:
        phi = memory[offset : offset + t["phi"].numel()].view_as(t["phi"]).copy_(t["phi"].detach())
        kernels.clear()
        H, mean_square = mhc.projection(t["x"], phi.detach().requires_grad_())
        (H.sum() + mean_square.sum()).backward()
        found = {name for name in names_of(kernels) if name.endswith("_sm90")}
        assert found == (set() if offset else {"projection_forward_sm90", "projection_backward_sm90"})


@pytest.mark.parametrize("offsets", [(0, 1), (1, 0)])
def test_eight_streams_by_where_coefficients_lie(offsets, kernels, generator):
    """pre and res that a hook gives back off 16 bytes: another kernel, whatever was called before."""
    t = make_inputs(Case(8, 64, (5,), BF16), generator)

    for offset in offsets:

        def moved(tensor, offset=offset):
            if tensor.shape not in {(5, 8), (5, 8, 8)}:
                return tensor
            return torch.empty(tensor.numel() + offset)[offset:].view(tensor.shape).copy_(tensor)

        kernels.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, moved):
            call(mhc, "hyper_connection", Case(8, 64, (5,), BF16), t)[0].sum().backward()
        found = [name for name in names_of(kernels) if name.startswith("projection_backward")]
        assert found == ["projection_backward" if offset else "projection_backward_sm90"]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", ["pre", "head", "expand_combine", "hyper_connection"])
def test_a_call_alike_one_before(op, layout, grad, kernels, generator):
    """It compiles nothing, and has the same results; nor does another number of tokens."""
    for leading in ((64,), (4, 8)):
        case = Case(4, 64, leading, BF16, layout=layout, norm_weight=True, bias=True)
        t, upstream = make_inputs(case, generator), make_upstream(op, case, generator)
        if not grad:
            t = {name: tensor.detach() for name, tensor in t.items()}

        def results(t=t, case=case, upstream=upstream):
            return differentiate(mhc, op, case, t, upstream) if grad else dict(enumerate(call(mhc, op, case, t)))

        before = len(kernels)
        first = results()
        assert kernels and (len(leading) == 1 or len(kernels) == before)
        before = len(kernels)
        again = results()
        assert again.keys() == first.keys() and len(kernels) == before
        for name, result in first.items():
            assert torch.equal(again[name], result) and again[name].stride() == result.stride()


def test_what_is_not_for_warpgroups(kernels, generator):
    """In "fp32", of a dH off 16 bytes, of one token that stands for all, of tokens or streams that one box holds."""

    def found(run) -> set[str]:
        kernels.clear()
        launches.forget()
        run()
        return {name.removeprefix("projection_") for name in names_of(kernels) if name.startswith("projection")}

    def project(x, dH, **options):
        H, _ = mhc.projection(x, t["phi"], **options)
        torch.autograd.grad(H, t["phi"], dH)

    by_warpgroups, by_warps = {"forward_sm90", "backward_sm90"}, {"forward_sm90", "backward"}
    case = Case(8, 64, (5,), BF16)
    t = make_inputs(case, generator)
    dH, shifted = torch.randn(5, 80), torch.randn(401)[1:].view(5, 80)
    arguments = t["x"], torch.zeros_like, *(t[name] for name in ("phi", "alpha", "beta"))  # no gradient of layer_input
    assert found(lambda: mhc.hyper_connection(*arguments).sum().backward()) == by_warpgroups
    assert found(lambda: mhc.hyper_connection(*arguments, precision="fp32").sum().backward()) == by_warps
    assert found(lambda: project(t["x"], dH)) == by_warpgroups
    assert found(lambda: project(t["x"], dH, precision="fp32")) == by_warps
    assert found(lambda: project(t["x"], shifted)) == by_warps
    assert found(lambda: project(t["x"][:1].expand(5, 8, 64), dH)) == {"forward", "backward"}
    for layout, one_box, more in (("streams", 16, 24), ("channels", 8, 16)):
        for channels, kinds in ((one_box, by_warps), (more, by_warpgroups)):
            case = Case(8, channels, (5,), BF16, layout=layout)
            t = make_inputs(case, generator)
            for op in ("pre", "hyper_connection"):
                assert found(lambda op=op, case=case, t=t: call(mhc, op, case, t)[0].sum().backward()) == kinds


@pytest.mark.parametrize("n, channels, layout", [(2, 32, "channels"), (4, 16, "channels"), (8, 8, "streams")])
def test_tokens_that_one_box_holds(n, channels, layout, kernels, generator):
    """The projection's backward does not read them by TMA: the matrix has no second box to name a coordinate of.

    Streams-major it has one for each stream.
    """
    for width, by_tma in ((channels, layout == "streams"), (2 * channels, True)):
        case = Case(n, width, (5,), BF16, layout=layout)
        t = make_inputs(case, generator)
        kernels.clear()
        sum(result.sum() for result in call(mhc, "projection", case, t)).backward()
        (config,) = [job[1][-1] for job in kernels if job[0].__name__.startswith("projection_backward")]
        assert getattr(config, "tma", True) == by_tma
        assert isinstance(config, WarpgroupBackwardConfig) == (n == 8 and width > channels)


def test_launches(kernels, generator):
    """Two for pre, one for a head, three where clusters cannot hold phi or x is not bf16; one dx for a
    hyper-connection, and no product where only the coefficients' parameters learn."""
    in_three = ["projection_forward", "coefficients_forward", "aggregate_forward"]
    bf16 = dataclasses.replace(FULL, dtype=BF16)
    for case, wanted in (
        (bf16, ["pre_forward", "coefficients_forward"]),
        (dataclasses.replace(bf16, n=8), ["projection_forward_sm90", *in_three[1:]]),
        (FULL, in_three),
    ):
        for op, names in (("pre", wanted), ("head", in_three if case is FULL else ["pre_forward"])):
            kernels.clear()
            launches.forget()
            with torch.no_grad():
                call(mhc, op, case, make_inputs(case, generator))
            assert names_of(kernels) == names
    kernels.clear()
    t = make_inputs(FULL, generator)
    call(mhc, "hyper_connection", FULL, t)[0].sum().backward()
    assert sorted(names_of(kernels)[-5:]) == [
        "aggregate_backward",
        "bias_gradient",
        "coefficients_backward",
        "phi_gradient",
        "projection_backward",
    ]
    specs = {job[0].__name__: job[1][1] for job in kernels}
    combine, aggregate = specs["expand_combine_backward"], specs["aggregate_backward"]
    assert (combine.needs_dx, combine.needs_df, combine.needs_coefficients) == (False, True, True)
    assert (aggregate.needs_dx, aggregate.needs_dpre) == (False, True)
    project = specs["projection_backward"]
    assert project.needs_dx and project.needs_dphi and project.orientation == "io" and project.has_layer_grad
    # Into main_grads: other sums at the end, no other kernel before them
    once = list(kernels)
    for name in ("phi", "alpha", "beta"):
        t[name].main_grad = torch.zeros_like(t[name])
    call(mhc, "hyper_connection", FULL, t)[0].sum().backward()
    assert names_of(job for job in kernels if job not in once) == ["phi_gradient"]
    kernels.clear()
    frozen = {name: tensor.detach().requires_grad_(name in ("alpha", "beta")) for name, tensor in t.items()}
    call(mhc, "pre", FULL, frozen)[1].sum().backward()
    assert "projection_backward" not in names_of(kernels) and "aggregate_backward" not in names_of(kernels)


def names_of(jobs):
    return [builder.__name__ for builder, _ in jobs]


def test_another_number_of_tokens_builds_nothing(kernels, generator):
    for tokens in ((3,), (7, 2)):
        case = dataclasses.replace(FULL, tokens=tokens, dropout_p=0.1)
        inputs = make_inputs(case, generator)
        for op in OPERATIONS:
            differentiate(mhc, op, case, inputs, make_upstream(op, case, generator))
        if len(tokens) == 1:
            built = len(kernels)
    assert len(kernels) == built


def test_variants_that_differ_above_the_kernels_share_them(kernels, generator):
    t = make_inputs(dataclasses.replace(FULL, dtype=BF16), generator)
    other = dataclasses.replace(VARIANTS["deepseek_v4"], res_orientation="oi")
    for variant in ("deepseek_v4", other):
        mhc.pre(t["x"], t["phi"], t["alpha"], t["beta"], variant=variant)
    assert len(kernels) == 2


# Dropout


@pytest.mark.parametrize("library", [mhc, reference], ids=["kernels", "reference"])
def test_a_seed_is_drawn(library, generator):
    """From torch's generator: another for each call, the same after manual_seed, the same under checkpointing."""
    t = make_inputs(FULL, generator)

    def run(x):
        return library.hyper_connection(x, sublayer, t["phi"], t["alpha"], t["beta"], dropout_p=0.5)

    torch.manual_seed(1)
    first, second = run(t["x"]), run(t["x"])
    torch.manual_seed(1)
    again = run(t["x"])
    assert torch.equal(first, again) and not torch.equal(first, second)
    (wanted,) = torch.autograd.grad(again.square().sum(), t["x"])
    for reentrant in (True, False):
        torch.manual_seed(1)
        out = checkpoint(run, t["x"], use_reentrant=reentrant)
        assert torch.equal(out, first)
        (gradient,) = torch.autograd.grad(out.square().sum(), t["x"]) if not reentrant else (None,)
        if gradient is not None:
            assert torch.equal(gradient, wanted)


def test_seeds(generator):
    t = make_inputs(FULL, generator)

    def run(**options):
        return mhc.expand_combine(t["f"], t["post"], t["x"], t["res"], **options)

    wanted = reference.expand_combine(t["f"], t["post"], t["x"], t["res"], dropout_p=0.5, seed=SEED)
    for seed in (SEED, torch.tensor(SEED), torch.tensor([[SEED]])):
        torch.testing.assert_close(run(dropout_p=0.5, seed=seed), wanted)
    assert torch.equal(run(dropout_p=0, seed=3), run())
    with pytest.raises(ValueError, match="fit in 64 bits"):
        run(dropout_p=0.5, seed=2**63)


# Edges


@pytest.mark.parametrize("tokens", [(0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("op", OPERATIONS)
def test_no_tokens(op, tokens, kernels, generator):
    case = dataclasses.replace(FULL, tokens=tokens, dropout_p=0.1)
    t = make_inputs(case, generator)
    found = differentiate(mhc, op, case, t, make_upstream(op, case, generator))
    wanted = differentiate(reference, op, case, t, make_upstream(op, case, generator))
    assert found.keys() == wanted.keys() and not kernels
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for name in WITH_PARAMETERS.get(op, ()):
        t[name].main_grad = torch.ones(t[name].shape)
    differentiate(mhc, op, case, t, make_upstream(op, case, generator))
    assert all(t[name].main_grad.eq(1).all() for name in WITH_PARAMETERS.get(op, ()))


def test_one_token_and_leading_dimensions(generator):
    for tokens in ((), (1,), (1, 1, 2)):
        for op in OPERATIONS:
            assert_as_the_reference(op, dataclasses.replace(FULL, tokens=tokens), generator)


def test_rows_without_one_stride():
    x = torch.zeros(3, 2, 4, 16).transpose(0, 1)
    with pytest.raises(ValueError, match="aggregate: x must have leading dimensions that collapse to rows"):
        mhc.aggregate(x, torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="aggregate: pre must have leading dimensions that collapse to rows"):
        mhc.aggregate(torch.zeros(2, 3, 4, 16), torch.zeros(3, 2, 4).transpose(0, 1))


def test_more_tokens_than_32_bits_count():
    with pytest.raises(ValueError, match="expand: h must have at most 2147482624 tokens, got 2147483647"):
        rows("expand", "h", torch.zeros(1, 8).expand(2**31 - 1, 8), 8)


def test_backends(kernels, generator):
    t = make_inputs(FULL, generator)
    for op in OPERATIONS:
        found = call(mhc, op, FULL, t, backend="reference")
        assert all(torch.equal(a, b) for a, b in zip(found, call(reference, op, FULL, t), strict=True))
        with pytest.raises(ValueError, match=f"{op}: backend must be None or 'reference', got 'triton'"):
            call(mhc, op, FULL, t, backend="triton")
    assert not kernels


def test_inputs_are_left_alone(generator):
    case = dataclasses.replace(FULL, dropout_p=0.2)
    t = make_inputs(case, generator)
    before = {name: tensor.detach().clone() for name, tensor in t.items()}
    for op in OPERATIONS:
        upstream = make_upstream(op, case, generator)
        copies = {name: tensor.clone() for name, tensor in upstream.items()}
        differentiate(mhc, op, case, t, upstream)
        assert all(torch.equal(upstream[name], copies[name]) for name in upstream)
    assert all(torch.equal(t[name], before[name]) for name in t)
