"""nn.RMSNorm and nn.LayerNorm in place of torch.nn's."""

import copy
import inspect
import re

import pytest
import torch

from cute_kernels import layer_norm, nn, rms_norm
from tests.norm.cases import BF16, FP32

PAIRS = {"RMSNorm": (nn.RMSNorm, torch.nn.RMSNorm), "LayerNorm": (nn.LayerNorm, torch.nn.LayerNorm)}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize("shape", [96, (96,), [96], torch.Size([96])], ids=["int", "tuple", "list", "Size"])
def test_same_as_torch(name, options, shape, generator):
    ours, theirs = PAIRS[name]
    if name == "RMSNorm" and "bias" in options:
        pytest.skip("torch.nn.RMSNorm has no bias")
    theirs = theirs(shape, eps=1e-3, **options)
    ours = ours(shape, eps=1e-3, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(96, generator=generator))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 7, 96, generator=generator)
    dy = torch.randn(4, 7, 96, generator=generator)
    results = []
    for module in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        results.append([y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], dy)])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=2e-5)
    assert ours.normalized_shape == theirs.normalized_shape and ours.eps == theirs.eps
    assert ours.elementwise_affine == theirs.elementwise_affine


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("affine", [True, False])
def test_an_x_of_other_columns_is_what_is_wrong(name, affine):
    module = PAIRS[name][0](8, elementwise_affine=affine)
    with pytest.raises(ValueError, match="residual must have shape"):
        module(torch.zeros(2, 8), torch.zeros(3, 8))
    for x in (torch.zeros(2, 16), torch.zeros(2, 1), *(() if affine else [torch.zeros(())])):
        shape = re.escape(str(tuple(x.shape)))
        expected = f"x must have 8 columns, as normalized_shape says, got shape {shape}"
        with pytest.raises(ValueError, match=f"^{name}: {expected}$"):
            module(x)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"save": "outputs"}, ValueError, "save must be 'input' or 'output', got 'outputs'"),
        ({"out_dtype": "bf16"}, TypeError, "out_dtype must be a torch.dtype such as torch.bfloat16, got 'bf16'"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype must have dtype bfloat16, float16, float32, got torch.int8"),
        ({"eps": -1}, ValueError, "eps must be a float, positive and finite in fp32, got -1.0 of type float"),
        ({"eps": "1e-5"}, ValueError, "eps must be a float, positive and finite in fp32, got '1e-5' of type str"),
        ({"weight_offset": None}, ValueError, "weight_offset must be a float, finite in fp32, got None of type"),
        ({"backend": "torch"}, ValueError, "backend must be None or 'reference', got 'torch'"),
    ],
)
def test_a_wrong_choice_fails_when_the_module_is_made(name, options, error, message):
    with pytest.raises(error, match=f"^{name}: {message}"):
        PAIRS[name][0](8, **options)
    assert PAIRS[name][0](8, eps=1).eps == 1.0  # an integer is a number


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("shape", [8.0, (8, 8), (8.0,), 0, None], ids=str)
def test_a_shape_that_is_not_one_size(name, shape):
    with pytest.raises(ValueError, match=f"^{name}: normalized_shape must be one positive size, got "):
        PAIRS[name][0](shape)


@pytest.mark.parametrize("name", PAIRS)
def test_arguments_of_torch_come_first(name):
    ours, theirs = (list(inspect.signature(module.__init__).parameters.values()) for module in PAIRS[name])
    assert [p.name for p in ours][: len(theirs)] == [p.name for p in theirs]
    assert [p.default for p in ours][: len(theirs)] == [p.default for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


@pytest.mark.parametrize("name", PAIRS)
def test_device_and_dtype(name):
    module = PAIRS[name][0](8, device="meta", dtype=BF16)
    assert all(parameter.is_meta and parameter.dtype is BF16 for parameter in module.parameters())
    module = module.to_empty(device="cpu").float()
    module.reset_parameters()
    assert torch.equal(module.weight, torch.ones(8)) and module.weight.dtype is FP32
    assert name == "RMSNorm" or torch.equal(module.bias, torch.zeros(8))


def test_eps_none_is_1e_6():
    """torch takes the machine epsilon of x's dtype; one number for all dtypes does not change when a model is cast."""
    assert nn.RMSNorm(8).eps == 1e-6 and nn.LayerNorm(8).eps == 1e-5


@pytest.mark.parametrize("name", PAIRS)
def test_zero_centred_weights(name, generator):
    """With weight_offset=1 weights begin at 0; the result is that of weights at 1."""
    centred, plain = PAIRS[name][0](96, weight_offset=1.0), PAIRS[name][0](96)
    assert torch.equal(centred.weight, torch.zeros(96)) and torch.equal(plain.weight, torch.ones(96))
    x = torch.randn(4, 96, generator=generator)
    assert torch.equal(centred(x), plain(x))


def test_residual_and_options(generator):
    x, residual = torch.randn(2, 4, 96, generator=generator).to(BF16).unbind()
    rms = nn.RMSNorm(96, eps=1e-3, out_dtype=FP32, weight_offset=1.0)
    layer = nn.LayerNorm(96, save="output")
    with torch.no_grad():
        for parameter in (rms.weight, layer.weight, layer.bias):
            parameter.copy_(torch.randn(96, generator=generator))
    y, h = rms(x, residual)
    wanted_y, wanted_h = rms_norm(
        x, rms.weight, residual=residual, eps=1e-3, weight_offset=1.0, out_dtype=FP32, return_residual=True
    )
    assert torch.equal(y, wanted_y) and torch.equal(h, wanted_h) and y.dtype is FP32
    assert torch.equal(layer(x), layer_norm(x, layer.weight, layer.bias))
    with pytest.raises(ValueError, match="save must be 'input' when there is a residual"):
        layer(x, residual)


@pytest.mark.parametrize("name", PAIRS)
def test_main_grad(name, generator):
    """Added to, in fp32, and ``grad`` stays None; where only x is asked for it stays as it is."""
    x, dy = torch.randn(2, 5, 96, generator=generator).to(BF16).unbind()
    plain = PAIRS[name][0](96, dtype=BF16)
    module = copy.deepcopy(plain)
    plain(x).backward(dy)
    for parameter in module.parameters():
        parameter.main_grad = torch.ones(96)
    y = module(x.requires_grad_())
    torch.autograd.grad(y, x, dy, retain_graph=True)
    assert all(torch.equal(parameter.main_grad, torch.ones(96)) for parameter in module.parameters())
    y.backward(dy)
    for one, two in zip(module.parameters(), plain.parameters(), strict=True):
        assert one.grad is None
        torch.testing.assert_close(one.main_grad - 1.0, two.grad.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", PAIRS)
def test_compiled_with_another_eps(name, generator):
    """From the second one on it is a symbol to torch.compile."""
    torch._dynamo.reset()
    x = torch.randn(4, 96, generator=generator)
    for eps in (1e-6, 1e-5, 1e-3):
        module = PAIRS[name][0](96, eps=eps)
        assert torch.equal(torch.compile(module, fullgraph=True, backend="eager")(x), module(x))


def test_repr():
    assert repr(nn.RMSNorm(8, eps=1e-5)) == "RMSNorm((8,), eps=1e-05, elementwise_affine=True)"
    assert repr(nn.LayerNorm(8, elementwise_affine=False)).startswith(
        "LayerNorm((8,), eps=1e-05, elementwise_affine=False"
    )
    text = repr(nn.LayerNorm(8, weight_offset=1.0, save="output", bias=False, out_dtype=FP32))
    for word in ("weight_offset=1.0", "save='output'", "bias=False", "out_dtype=torch.float32"):
        assert word in text


@pytest.mark.parametrize("name", PAIRS)
def test_copies_and_pickles(name, generator, tmp_path):
    module = PAIRS[name][0](96, eps=1e-3, weight_offset=1.0)
    x = torch.randn(4, 96, generator=generator)
    torch.save(module, tmp_path / "module.pt")
    for other in (copy.deepcopy(module), torch.load(tmp_path / "module.pt", weights_only=False)):
        assert torch.equal(other(x), module(x)) and other.eps == 1e-3
