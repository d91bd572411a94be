"""nn.MoE: the same bits by itself and in a batch, replays, main_grad; plain torch and fake kernels."""

import copy

import pytest
import torch

from cute_kernels import dequantize, moe, nn, quantize_rowwise
from tests.fakes import fake_kernels
from tests.gemm.cases import BF16, FP32, assert_same_bits, seeded_generator
from tests.nn import test_kernel_moe as of_kernels


def layer(**options):
    torch.manual_seed(0)
    return nn.MoE(16, 24, 8, 2, dtype=BF16, **options)


def tokens(*shape):
    return torch.randn(*shape, 16, generator=seeded_generator("tokens", "cpu")).to(BF16)


@pytest.fixture(params=["plain torch", "fakes"])
def path(request):
    if request.param == "plain torch":
        yield
    else:
        with fake_kernels():
            yield


def test_is_its_parts(path):
    model, x = layer(), tokens(3, 5)
    rows = x.view(15, 16)
    routing = moe.route(rows.float() @ model.router.float().t(), 2)
    wanted = moe.experts(rows, routing, model.gate_up, model.down).view(3, 5, 16)
    torch.testing.assert_close(model(x), wanted, atol=1e-2, rtol=1e-2)
    assert model.counts().sum() == 30 and model.last_routing.indices.shape == (15, 2)


def test_a_token_alone():
    with fake_kernels():
        model, x = layer(), tokens(40)
        whole = model(x)
        for index in (slice(3, 4), slice(7, 30)):
            assert_same_bits(model(x[index]).detach(), whole[index].detach())


def test_replay(path):
    """A layer's own choice gives the same bits; another choice gives the router a gradient all the same."""
    model, x = layer(score="sigmoid", groups=(4, 2), selection_bias=True, eps=1e-20, scale=2.5), tokens(9)
    wanted = model(x)
    assert_same_bits(model(x, model.last_routing.indices.flip(1)).detach(), wanted.detach())
    model(x, torch.tensor([[0, 7]]).repeat(9, 1)).sum().backward()
    assert model.router.grad.abs().sum() > 0


def test_the_bias_of_the_selection(path):
    model, x = layer(score="sigmoid", selection_bias=True), tokens(9)
    model.expert_bias[3] = 9.0
    model(x)
    assert model.counts()[3] == 9 and "expert_bias" in model.state_dict()


def test_the_update_of_the_bias(path):
    """Experts with more than the mean get less, those with fewer more; of counts of several calls, too."""
    model = layer(score="sigmoid", selection_bias=True)
    model(tokens(9))
    counts = model.counts()
    model.update_expert_bias(0.5)
    assert model.expert_bias.tolist() == [0.5 * ((8 * c < 18) - (8 * c > 18)) for c in counts.tolist()]
    model.update_expert_bias(0.5, torch.full((8,), 3))
    assert model.expert_bias.abs().max() == 0.5
    with pytest.raises(ValueError, match="MoE: expert_bias must exist"):
        layer().update_expert_bias(0.1)


def test_main_grad_and_fp32_parameters(path):
    model, x = layer(), tokens(9)
    model(x).sum().backward()
    wide = layer().float()
    for name in ("gate_up", "down"):
        parameter = getattr(wide, name)
        parameter.main_grad = torch.zeros_like(parameter)
    wide(x).sum().backward()
    for name in ("gate_up", "down"):
        parameter = getattr(wide, name)
        assert parameter.grad is None and parameter.main_grad.dtype is FP32
        torch.testing.assert_close(parameter.main_grad, getattr(model, name).grad.float(), atol=2e-2, rtol=2e-2)
    assert wide.router.grad.dtype is FP32


@pytest.mark.parametrize("name", ["balance", "z_loss"])
def test_losses(path, name):
    """In training alone: the same result, and gradients with those of the loss beside them."""
    x, dy = tokens(3, 7), tokens(3, 7)
    results = []
    for coefficient in (0.0, 50.0):
        model, leaf = layer(**{name: coefficient}).train(), x.clone().requires_grad_()
        y = model(leaf)
        y.backward(dy)
        results.append((y.detach(), leaf.grad.float(), model.router.grad.float(), model.gate_up.grad))
    plain, with_loss = results
    leaf, model = x.clone().requires_grad_(), layer()
    logits = moe.router_logits(leaf.view(21, 16), model.router)
    loss = moe.load_balancing_loss(logits, moe.route(logits, 2)) if name == "balance" else moe.z_loss(logits)
    of_loss = [t.float() for t in torch.autograd.grad(50.0 * loss, (leaf, model.router))]
    assert_same_bits(with_loss[0], plain[0])
    assert_same_bits(with_loss[3], plain[3])
    for found, without, more in zip(with_loss[1:3], plain[1:3], of_loss, strict=True):
        assert (found - without - more).norm() < 0.02 * more.norm()
    again = layer(**{name: 50.0}).eval()
    again(x).backward(dy)
    assert_same_bits(again.router.grad.float(), plain[2])


def test_shared(path):
    x = tokens(2, 3)
    shared = torch.nn.Linear(16, 16, dtype=BF16)
    with_shared, without = layer(shared=shared), layer()
    assert_same_bits(with_shared(x).detach(), (without(x) + shared(x)).detach())


@pytest.mark.parametrize("activation", ["swiglu_oai", "geglu", "silu"])
def test_activations_and_biases(path, activation):
    """Those of ``experts``; fp32 parameters' biases are cast."""
    model, x = layer(activation=activation, bias=True), tokens(9)
    with torch.no_grad():
        for name in ("router_bias", "gate_up_bias", "down_bias"):
            getattr(model, name).normal_()
    routing = moe.route(moe.router_logits(x, model.router, model.router_bias), 2)
    biases = {"gate_up_bias": model.gate_up_bias, "down_bias": model.down_bias}
    wanted = moe.experts(x, routing, model.gate_up, model.down, **biases, activation=activation)
    found = model(x)
    assert_same_bits(found.detach(), wanted.detach())
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.float()(x).dtype is BF16


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_quantized_experts(path, activation):
    """Bytes of ``quantize_rowwise``, bits of the dequantized weights, half the memory; it loads, and learns nothing."""
    torch.manual_seed(0)
    plain = nn.MoE(32, 64, 8, 2, activation=activation, bias=True, dtype=BF16)
    model, x = copy.deepcopy(plain), torch.randn(9, 32).to(BF16)
    assert model.quantize_experts() is model and "experts=mxfp8" in repr(model)
    for name in ("gate_up", "down"):
        weight = getattr(plain, name)
        q, scale = (t.unflatten(0, weight.shape[:2]) for t in quantize_rowwise(weight.detach().flatten(0, 1)))
        for found, wanted in ((getattr(model, name), q), (getattr(model, f"{name}_scale"), scale)):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        weight.data = dequantize(q, scale)
    assert_same_bits(model(x), plain(x).detach())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    other = nn.MoE(32, 64, 8, 2, activation=activation, bias=True, dtype=BF16).quantize_experts()
    other.load_state_dict(model.state_dict())
    assert_same_bits(other(x), model(x))
    with pytest.raises(ValueError, match="experts: gate_up_scale must be None where a gradient is wanted"):
        model(x.clone().requires_grad_())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nn.MoE(16, 8, 4, 5), ValueError, "MoE: k must be at most num_experts = 4, got 5"),
        (lambda: nn.MoE(16, 8, 4, 2, balance=-1), ValueError, "MoE: balance must be finite and not negative, got -1.0"),
        (lambda: nn.MoE(16, 8, 4, 2, z_loss=-1), ValueError, "MoE: z_loss must be finite and not negative, got -1.0"),
        (lambda: nn.MoE(16, 8.0, 4, 2), TypeError, "MoE: width must be an int"),
        (lambda: nn.MoE(0, 8, 4, 2), ValueError, "MoE: hidden must be positive, got 0"),
        (lambda: nn.MoE(16, 8, 4, 2, backend="gpu"), ValueError, "MoE: backend must be None or"),
        (lambda: layer()(tokens(3)[:, :8]), ValueError, "MoE: x must have 16 columns, as hidden says"),
        (lambda: layer()([1.0]), TypeError, "MoE: x must be a torch.Tensor"),
        (lambda: layer().counts(), ValueError, "MoE: counts must be asked for after a call"),
        (lambda: nn.MoE(48, 32, 4, 2).quantize_experts(), ValueError, "MoE: hidden must be a multiple of 32 for mxfp8"),
        (lambda: nn.MoE(32, 48, 4, 2).quantize_experts(), ValueError, "MoE: width must be a multiple of 32 for mxfp8"),
        (
            lambda: nn.MoE(32, 32, 4, 2).quantize_experts().quantize_experts(),
            ValueError,
            "MoE: gate_up must be of numbers that are not quantized, got torch.float8_e4m3fn",
        ),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("test", [f for name, f in vars(of_kernels).items() if name.startswith("test_")])
def test_of_kernels(test, device):
    with fake_kernels():
        test(device)
