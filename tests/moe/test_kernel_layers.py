"""Layers of experts at other sizes: batches of a real model, micro-batches, one expert, beyond 2^31 elements.

Those of small sizes run on the CPU, too, over fake kernels: test_dispatch.py.
"""

import pytest
import torch

from cute_kernels import check_invariance, moe
from cute_kernels.gemm.config_grouped import many_rows, rows_kernels
from cute_kernels.runtime.launches import observed
from tests.gemm.cases import here
from tests.moe.cases import BF16, FP16, FP32, assert_same_bits, make_layer, randn, run_layer


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_micro_batches(count, dtype, generator):
    """One after the other into main_grad: the bits of one call whose segments they are."""
    layer = make_layer(70, 136, 72, 8, generator, dtype)
    parts = torch.arange(70, device=layer.x.device).tensor_split(count)
    segments = torch.tensor([int(part[-1]) + 1 for part in parts], device=layer.x.device)

    def gradients(calls):
        weights = [t.clone().requires_grad_() for t in (layer.gate_up, layer.down)]
        for t in weights:
            t.main_grad = torch.linspace(-1, 1, t.numel(), device=t.device).view_as(t).contiguous()
        for part, given in calls:
            y = moe.experts(layer.x[part], moe.route(layer.logits[part], 2), *weights, segments=given)
            y.backward(layer.dy[part])
        return [t.main_grad for t in weights]

    one = gradients([(slice(None), segments)])
    for found, wanted in zip(gradients([(part, None) for part in parts]), one, strict=True):
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_of_transformers(name, generator):
    """Forward and backward, given the routing: no farther from fp64 than the package's own in this dtype."""
    pytest.importorskip("transformers", minversion="5.0")
    from tests.moe.transformers_cases import make_model

    x, dy = (randn(40, 64, generator=generator, dtype=BF16) for _ in range(2))
    indices = randn(40, 8, generator=generator).argsort(1)[:, :2]
    weights = randn(40, 2, generator=generator).softmax(1).to(BF16)

    def run(implementation, dtype):
        model = make_model(name, implementation, x.device, BF16).to(dtype)
        (module, *_) = (m for m in model.modules() if hasattr(m, "_apply_gate"))
        leaves = [x.to(dtype).requires_grad_(), *module.parameters()]
        with observed() as launches:
            y = module(leaves[0], indices, weights.to(dtype))
            gradients = torch.autograd.grad(y, leaves, dy.to(dtype))
        assert bool(launches) == (implementation == "cute_kernels")
        return [y.detach(), *gradients]

    results = zip(run("eager", torch.float64), run("cute_kernels", BF16), run("eager", BF16), strict=True)
    for exact, *found in results:
        error, of_theirs = ((one.double() - exact).norm() / exact.norm() for one in found)
        assert error <= 1.2 * of_theirs, f"{tuple(exact.shape)}: {error:.3e}, transformers {of_theirs:.3e}"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("experts, k", [(1, 1), (5, 5), (32, 32)], ids=str)
def test_all_experts(experts, k, dtype, generator):
    """One alone, and all of a token: near fp64, and a token by itself has its bits."""
    layer = make_layer(40, 72, 40, experts, generator, dtype)
    found, plain = run_layer(layer, k), run_layer(layer, k, backend="reference")
    exact = run_layer(layer.changed(torch.Tensor.double), k, backend="reference")
    for name, result in found.items():
        error, of_torch = ((t.double() - exact[name]).norm().item() for t in (result, plain[name]))
        assert error <= 1.3 * of_torch + 1e-5, f"{name}: {error:.3e}, plain torch {of_torch:.3e}"
    alone = run_layer(layer, k, slice(7, 8))
    for name in ("y", "dx", "dlogits"):
        assert_same_bits(alone[name], found[name][7:8], name)


# Below: on a GPU only


def test_batches_of_a_real_layer(generator):
    """Qwen3-30B's: products choose each of their kernels of few rows in turn, and of many; a token's bits are those
    among 1100.
    """
    layer = make_layer(1100, 2048, 768, 128, generator)
    whole, used = run_layer(layer, 8), set()
    for count in (1, 2, 7, 8, 31, 64, 96, 200, 256, 512, 700, 1100):
        index = torch.randperm(1100, generator=generator, device="cuda")[:count]
        with torch.no_grad(), observed() as launches:
            y = moe.experts(layer.x[index], moe.route(layer.logits[index], 8), layer.gate_up, layer.down)
        used |= {launch.config for launch, _, _ in launches}
        assert_same_bits(y, whole["y"][index], f"{count} tokens")
    many = set(many_rows(here()))
    assert {config for config, _ in rows_kernels(here())} - many < used and used & many
    for count in (1, 20, 100, 300):
        found = run_layer(layer, 8, slice(1100 - count, 1100))
        for name in ("y", "dx", "dlogits"):
            assert_same_bits(found[name], whole[name][1100 - count :], f"{name} of {count}")


def test_first_call_inside_a_graph_capture(generator):
    """No other test has these experts, so each module is loaded inside."""
    layer = make_layer(50, 88, 56, 6, generator, FP16, biased=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_layer(layer, 3, activation="geglu")
    for _ in range(2):
        layer.logits.copy_(torch.randn_like(layer.logits))
        graph.replay()
        torch.cuda.synchronize()
        replayed = {name: result.clone() for name, result in results.items()}
        for name, result in run_layer(layer, 3, activation="geglu").items():
            assert_same_bits(replayed[name], result, name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device(generator):
    """Tensors of a device that is not the current one: the same bits; of two devices: an error."""
    layer = make_layer(50, 136, 72, 8, generator, biased=True)
    wanted, moved = run_layer(layer, 2), layer.changed(lambda t: t.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    for name, result in run_layer(moved, 2).items():
        assert result.device == torch.device("cuda:1")
        assert_same_bits(result.to("cuda:0"), wanted[name], name)
    with pytest.raises(ValueError, match="gate_up must be on cuda:1, got cuda:0"):
        moe.experts(moved.x, moe.route(moved.logits, 2), layer.gate_up, layer.down)


def test_a_control_of_transformers(generator):
    """The package's own experts are caught: their products change with the batch; index_add_ adds them."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(0)
    block = MixtralSparseMoeBlock(
        transformers.MixtralConfig(hidden_size=2048, intermediate_size=1024, num_local_experts=8, num_experts_per_tok=2)
    ).to("cuda", BF16)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(0.03 * torch.randn(parameter.shape))
    assert not check_invariance(block, randn(256, 1, 2048, generator=generator, dtype=BF16))


def needs_gigabytes(number):
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < number * 1e9:
        pytest.skip(f"needs {number} GB of free GPU memory")


@pytest.mark.slow
@pytest.mark.parametrize("tokens, k", [(2**17 + 9, 2), (2**18 + 9, 1)], ids=str)
def test_more_than_2_31_elements_of_rows(tokens, k, generator):
    """permute and combine: of rows of experts, and of those of tokens."""
    needs_gigabytes(30)
    x = torch.randn(tokens, 8192, generator=generator, device="cuda", dtype=BF16)
    plan = moe.plan(torch.arange(tokens * k, device="cuda").view(tokens, k) % 7, 7)
    rows = moe.permute(x, plan)
    assert rows.numel() > 2**31
    for part in (slice(0, 100), slice(2**17 - 50, 2**17 + 9), slice(-200, None)):
        assert_same_bits(rows[part], x[plan.slots[part].long() // k])
    y = moe.combine(rows, plan)
    for part in (slice(0, 100), slice(2**16, 2**16 + 100), slice(-200, None)):
        assert_same_bits(y[part], x[part] * k)


@pytest.mark.slow
def test_more_than_2_31_elements_of_the_gate(generator):
    needs_gigabytes(30)
    z = torch.randn(2**18 + 9, 8192, generator=generator, device="cuda", dtype=BF16).requires_grad_()
    h = moe.swiglu(z)
    (dz,) = torch.autograd.grad(h, z, h.detach())
    for part in (slice(0, 100), slice(2**18 - 50, 2**18 + 9)):
        few = z.detach()[part].clone().requires_grad_()
        wanted = moe.swiglu(few)
        assert_same_bits(h[part].detach(), wanted.detach())
        assert_same_bits(dz[part], torch.autograd.grad(wanted, few, wanted.detach())[0])


@pytest.mark.slow
def test_more_than_2_31_elements_of_logits(generator):
    needs_gigabytes(40)
    logits = torch.randn(2**21 + 9, 1024, generator=generator, device="cuda").requires_grad_()
    routing = moe.route(logits, 4)
    (dlogits,) = torch.autograd.grad(routing.weights, logits, routing.weights.detach())
    for part in (slice(0, 100), slice(2**21 - 50, 2**21 + 9)):
        few = logits.detach()[part].clone().requires_grad_()
        wanted = moe.route(few, 4)
        for found, other in zip(routing, wanted, strict=True):
            assert_same_bits(found[part].detach(), other.detach())
        assert_same_bits(dlogits[part], torch.autograd.grad(wanted.weights, few, wanted.weights.detach())[0])


@pytest.mark.slow
def test_more_than_2_31_elements_of_weights(generator):
    """And of their gradients, into main_grad, too."""
    needs_gigabytes(50)
    layer = make_layer(40, 2048, 1024, 520, generator)
    weights = [t.requires_grad_() for t in (layer.gate_up, layer.down)]
    assert weights[0].numel() > 2**31
    experts = torch.tensor([0, 259, 260, 511, 512, 519], device="cuda")
    layer.logits[:, experts] += 20.0
    routing = moe.route(layer.logits, 2)
    gradients = torch.autograd.grad(moe.experts(layer.x, routing, *weights), weights, layer.dy)
    few = [t.detach()[experts].requires_grad_() for t in weights]
    of_few = moe.Routing(torch.searchsorted(experts.int(), routing.indices).int(), routing.weights)
    y = moe.experts(layer.x, of_few, *few)
    for found, wanted in zip(gradients, torch.autograd.grad(y, few, layer.dy), strict=True):
        assert_same_bits(found[experts], wanted)
        assert not found[1:259].any()
    del gradients, found
    weights[0].main_grad = torch.zeros(weights[0].shape, device="cuda")
    few[0].main_grad = torch.zeros(few[0].shape, device="cuda", dtype=FP32)
    for parts, given in ((weights, routing), (few, of_few)):
        moe.experts(layer.x, given, parts[0], parts[1].detach()).backward(layer.dy)
    assert_same_bits(weights[0].main_grad[experts], few[0].main_grad)
