"""The kernels' path of the experts' functions on the CPU, plain torch in place of the kernels."""

import itertools

import pytest
import torch

from cute_kernels import moe
from cute_kernels.gemm.config_grouped import DECODE
from cute_kernels.moe import prewarm
from cute_kernels.moe.config import ONE_BLOCK
from cute_kernels.runtime.launches import observed
from tests.fakes import fake_kernels
from tests.moe import test_kernel_sanitizer
from tests.moe.cases import BF16, FP32, assert_same_bits, make_layer, randn, run_layer
from tests.moe.test_kernel_layers import (  # noqa: F401
    test_all_experts,
    test_experts_of_transformers,
    test_micro_batches,
)
from tests.moe.test_kernel_moe import (  # noqa: F401
    ACTIVATIONS,
    make_other,
    test_a_token_does_not_know_its_batch,
    test_a_token_of_other_layers_does_not_know_its_batch,
    test_combine_does_not_see_other_tokens,
    test_compile,
    test_compile_of_other_layers,
    test_empty_slots,
    test_experts,
    test_experts_of_indices_beyond_int32,
    test_gradients_of_rows,
    test_indices_beyond_int32,
    test_layouts_of_weights,
    test_main_grads,
    test_main_grads_of_biases,
    test_nan_and_signs_of_zero,
    test_no_tokens,
    test_opcheck,
    test_other_layers,
    test_plan,
    test_plan_of_segments,
    test_replay,
    test_route,
    test_router_of_a_model_agrees_with_topk,
    test_rows,
    test_segments,
)
from tests.moe.test_kernel_router import (  # noqa: F401
    test_a_token_of_logits_does_not_know_its_batch,
    test_compile_of_a_router,
    test_logits,
    test_losses,
    test_main_grads_of_a_router,
)


@pytest.fixture(autouse=True)
def jobs():
    with fake_kernels() as jobs:
        yield jobs


def run_router(spec, generator):
    logits = randn(5, spec.num_experts, generator=generator).requires_grad_()
    groups = (spec.groups, spec.kept_groups) if spec.groups > 1 else None
    bias = torch.zeros(spec.num_experts) if spec.has_bias else None
    score = "softmax" if spec.score == "chosen" else spec.score
    moe.route(logits, spec.k, score=score, bias=bias, groups=groups).weights.sum().backward()


def test_a_layer_finds_its_kernels_precompiled(jobs, generator):
    for spec in prewarm.ROUTERS:
        run_router(spec, generator)
        run_layer(make_layer(5, 16, 8, spec.num_experts, generator), spec.k)
        for slots, align in itertools.product((1, ONE_BLOCK + 1), prewarm.ALIGNS):
            moe.plan(torch.zeros(slots, 1, dtype=torch.int32), spec.num_experts, align=align)
    run_layer(make_other(ACTIVATIONS[1], generator, experts=128), prewarm.BIASED_K, **ACTIVATIONS[1])
    table = set(prewarm.specializations("sm_90a"))
    found = {job for job in jobs if "moe" in job[0].kernel}
    assert table <= found
    softmax = {("route", 256, 8), ("route_backward", 256, 8)}  # run_layer's router of DeepSeek's sizes
    assert {(builder.__name__, *spec[1][:2]) for builder, spec in found - table} == softmax
    assert len(list(prewarm.specializations("sm_100a"))) == len(table)


def test_other_numbers_of_tokens_compile_nothing(jobs, generator):
    for tokens in (3, 4, 9):
        layer = make_layer(tokens, 16, 8, 4, generator)
        run_layer(layer, 2)
    assert len({job for job in jobs if "moe" in job[0].kernel}) == 8


@pytest.mark.parametrize("biased", [False, True])
def test_rows_by_which_products_choose(biased, generator):
    """Without gradients the slots alone, in segments, too; with them those of zeros, as well."""
    options = ACTIVATIONS[1] if biased else {}
    layer = make_other(options, generator, 64, experts=128) if biased else make_layer(64, 136, 72, 128, generator)
    routing = moe.route(layer.logits, 8)
    given = {"gate_up_bias": layer.gate_up_bias, "down_bias": layer.down_bias, **options}
    wanted = run_layer(layer, 8, **options)["y"]
    for segments in (None, torch.tensor([3, 64])):
        with observed() as launches:
            y = moe.experts(layer.x, routing, layer.gate_up, layer.down, **given, segments=segments)
        products = [(shape[1], launch.config) for launch, shape, _ in launches]
        assert products == [(64 * 8, DECODE[4])] * 2
        assert_same_bits(y, wanted)
    x = layer.x.requires_grad_()
    with observed() as launches:
        moe.experts(x, routing, layer.gate_up, layer.down, **given)
    assert [shape[1] for _, shape, _ in launches] == [64 * 8 + 15 * 128] * 2


@pytest.mark.parametrize("tokens", [1, 60])
@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("has_main_grad", [False, True])
def test_gradients_of_biases_by_tma(has_main_grad, align, tokens, generator):
    """Sums of each expert's rows of both biases, on kernels that read by TMA."""
    layer = make_other(ACTIVATIONS[1], generator, tokens)
    parameters = [t.requires_grad_() for t in (layer.gate_up, layer.down, layer.gate_up_bias, layer.down_bias)]
    for t in parameters if has_main_grad else ():
        t.main_grad = torch.zeros_like(t, dtype=FP32)
    biases = {"gate_up_bias": layer.gate_up_bias, "down_bias": layer.down_bias}
    with observed() as launches:
        y = moe.experts(
            layer.x, moe.route(layer.logits, 2), *parameters[:2], **biases, **ACTIVATIONS[1], align=align
        )  # fmt: skip
        y.backward(layer.dy)
    sums = [(shape[1:3], launch.config) for launch, shape, _ in launches if launch.kernel == "grouped_sums"]
    assert sorted(shape for shape, _ in sums if shape[0] == 1) == [(1, 136), (1, 144)]
    assert all(config is not None for _, config in sums)


@pytest.mark.parametrize("options", ACTIVATIONS, ids=str)
def test_on_sm100(options, generator):
    """A layer, its gradients, and of few and of many tokens; all kernels are that GPU's."""
    for tokens in (3, 300):
        layer = make_other(options, generator, tokens)
        wanted = run_layer(layer, 2, **options)
        with fake_kernels("sm_100a") as jobs:
            found = run_layer(layer, 2, **options)
        for name, result in found.items():
            assert_same_bits(result, wanted[name], name)
        assert {arguments[0] for _, arguments in jobs} == {"sm_100a"}
        assert {arguments[1].ragged for builder, arguments in jobs if builder.__name__ == "grouped"} == {"rows", "sums"}


def test_an_align_that_is_not_used_is_checked(generator):
    layer = make_layer(5, 16, 8, 4, generator)
    with pytest.raises(ValueError, match="align must be from 1 to 1024, got 0"):
        moe.experts(layer.x, moe.route(layer.logits, 2), layer.gate_up, layer.down, align=0)


def test_what_is_kept(generator):
    """x, gate_up's product, weights and the plan, beside the parameters."""
    layer = make_layer(5, 16, 8, 4, generator)
    x, gate_up, down = (t.requires_grad_() for t in (layer.x, layer.gate_up, layer.down))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = moe.experts(x, moe.route(layer.logits, 2), gate_up, down)
    floats = [tuple(t.shape) for t in kept if t.dtype is BF16]
    assert sorted(floats) == sorted([(5, 16), (5 * 2 + 15 * 4, 16), tuple(gate_up.shape), tuple(down.shape)])
    y.backward(layer.dy)
    assert_same_bits(x.grad, run_layer(layer, 2)["dx"])


@pytest.mark.parametrize("name", test_kernel_sanitizer.RUNS)
def test_what_the_sanitizer_runs(name):
    assert all(result.isfinite().all() for result in test_kernel_sanitizer.results(name, "cpu"))
