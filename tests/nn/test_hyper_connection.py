"""HyperConnection and LearnedHead on the references, and on the path of the kernels (fakes)."""

import copy
import dataclasses

import pytest
import torch
from torch.autograd import forward_ad

import cute_kernels
from cute_kernels import mhc
from cute_kernels.nn import (
    HyperConnection,
    HyperConnectionConfig,
    LearnedHead,
    Linear,
    MHCTransformer,
    RecomputeManager,
    RMSNorm,
)
from cute_kernels.runtime import operators
from tests.fakes import fake_kernels
from tests.nn.cases import BF16, FP32, make_config, make_model, make_tokens

FP16 = torch.float16


@pytest.fixture(params=[False, True], ids=["references", "kernels"])
def path(request):
    """The references, or all above the kernels with plain torch in their place."""
    if request.param:
        with fake_kernels():
            yield
    else:
        yield


def connection(config, seed=0, **options):
    torch.manual_seed(seed)
    module = HyperConnection(config, **options)
    with torch.no_grad():
        module.alpha.copy_(torch.randn(3))
        module.beta.copy_(torch.randn(len(module.beta)))
    return module


@pytest.mark.parametrize("name", ["deepseek_v4", "transformer_engine", "megatron"])
@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_forward_and_combine_are_the_operator(name, streams, path):
    """In the kernels' path to the bit, x's gradient included, which is rounded once."""
    config = HyperConnectionConfig(32, streams, variant=name)
    module = connection(config)
    v, kernels = config.resolved_variant(), torch.Tensor.is_cuda.__class__ is property
    shape = (2, 3, streams, 32) if v.layout == "streams" else (2, 3, 32, streams)
    x, bias = torch.randn(shape).to(BF16).requires_grad_(), torch.randn(32, requires_grad=True)
    dout = torch.randn(shape).to(BF16)
    leaves = [x, bias, module.phi, module.alpha, module.beta]

    layer_input, mix = module(x)
    out = module.combine(layer_input.sin(), x, mix, bias=bias)
    ours = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    out = mhc.hyper_connection(x, torch.sin, module.phi, module.alpha, module.beta, bias=bias, variant=v)
    theirs = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one, two) if kernels else torch.allclose(one.float(), two.float(), rtol=2e-2, atol=2e-2)


def test_dropout_and_inference(path):
    """Each stream has a mask of its own; the same with gradients or without."""
    module = connection(HyperConnectionConfig(32))
    x, f = torch.randn(2, 3, 4, 32).to(BF16), torch.randn(2, 3, 32).to(BF16)
    outs = []
    for wanted in (True, False):
        torch.manual_seed(1)
        with torch.set_grad_enabled(wanted):
            _, mix = module(x)
            outs.append(module.combine(f, x, mix, dropout_p=0.5).detach())
    assert torch.equal(*outs)
    kept = module.combine(f, x, module(x)[1]).detach()
    assert not torch.equal(outs[0], kept)


def test_combine_wants_what_forward_got(path):
    module = connection(HyperConnectionConfig(32))
    x, f = torch.randn(2, 3, 4, 32).to(BF16), torch.randn(2, 3, 32).to(BF16)
    _, mix = module(x)
    for other in (x.clone(), x[:1]):
        with pytest.raises(ValueError, match="HyperConnection: x must be the residual that forward got, got another"):
            module.combine(f, other, mix)
    for bad in (None, [1]):
        with pytest.raises(TypeError, match=f"^HyperConnection: x must be a torch.Tensor, got {type(bad).__name__}$"):
            module.combine(f, bad, mix)
    with pytest.raises(TypeError, match="^HyperConnection: mix must be the one that forward returned, got NoneType$"):
        module.combine(f, x, None)
    for call in (lambda: module(x, []), lambda: module.combine(f, x, mix, recompute=[])):
        with pytest.raises(
            TypeError, match="^HyperConnection: recompute must be a RecomputeManager or None, got list$"
        ):
            call()
    for bad in (None, "a", 1.0):
        with pytest.raises(ValueError, match="HyperConnection: dropout_p must be a float in"):
            module.combine(f, x, mix, dropout_p=bad)


def test_the_residual_comes_from_the_mix(path):
    """The other arguments of combine are compared alone, and may be without a graph."""
    module = connection(HyperConnectionConfig(32))
    x = torch.randn(2, 3, 4, 32).to(BF16).requires_grad_()
    found = []
    for given in (x, x.detach()):
        layer_input, mix = module(x)
        found.append(torch.autograd.grad(module.combine(layer_input.detach(), given, mix).sum(), x)[0])
    assert torch.equal(*found)


def test_autocast_changes_nothing():
    """The references: the kernels call no operator of torch that autocast casts for."""
    module = connection(HyperConnectionConfig(32))
    x = torch.randn(2, 3, 4, 32).to(BF16)
    outs = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            layer_input, mix = module(x)
            outs.append(module.combine(layer_input, x, mix).detach())
    assert torch.equal(*outs)


def test_initial_parameters():
    module, head = (
        HyperConnection(HyperConnectionConfig(32, init_gating_factor=0.5)),
        LearnedHead(HyperConnectionConfig(32)),
    )
    assert [(name, tuple(p.shape)) for name, p in module.named_parameters()] == [
        ("phi", (24, 128)),
        ("alpha", (3,)),
        ("beta", (24,)),
    ]
    assert (module.alpha == 0.5).all() and (module.beta == 0).all()
    assert 0 < module.phi.abs().max() <= (6 / (24 + 128)) ** 0.5
    assert [(name, tuple(p.shape)) for name, p in head.named_parameters()] == [
        ("fn", (4, 128)),
        ("base", (4,)),
        ("scale", (1,)),
    ]
    assert torch.equal(head.scale.detach(), torch.tensor([0.01]))
    assert repr(module) == "HyperConnection(hidden_size=32, num_streams=4, variant='deepseek_v4')"


def test_the_head_is_the_operator(path):
    config = HyperConnectionConfig(32)
    head, x = LearnedHead(config), torch.randn(2, 3, 4, 32).to(BF16)
    expected = mhc.head(x, head.fn, head.base, head.scale, variant=config.resolved_variant())
    assert torch.equal(head(x), expected)


def test_parameters_that_a_checkpoint_is_assigned_to_stay_fp32():
    module = connection(HyperConnectionConfig(32))
    half = {name: t.to(BF16) for name, t in module.state_dict().items()}
    module.load_state_dict(half, assign=True)
    assert all(p.dtype is FP32 and torch.equal(p, half[name].float()) for name, p in module.named_parameters())


def test_a_mix_is_combined_as_it_came():
    """In the kernels' path forward multiplies by its own res: another would give x a wrong gradient."""
    module = connection(HyperConnectionConfig(32))
    x = torch.randn(3, 4, 32, requires_grad=True)
    with fake_kernels():
        layer_input, mix = module(x)
        for changes in ({"res": 0.5 * mix.res}, {"residual": mix.residual.detach()}):
            with pytest.raises(ValueError, match="mix must have the res and residual that forward returned"):
                module.combine(layer_input, x, mix._replace(**changes))
        out = module.combine(layer_input, x, mix._replace(post=0.5 * mix.post, res=mix.res.detach()))
        ours = torch.autograd.grad(out.sum(), x)
        with torch.no_grad():
            module.combine(layer_input, x, mix._replace(res=0.5 * mix.res))
    layer_input, mix = module(x)
    out = module.combine(layer_input, x, mix._replace(post=0.5 * mix.post, res=mix.res.detach()))
    torch.testing.assert_close(ours, torch.autograd.grad(out.sum(), x), rtol=1e-4, atol=1e-4)


def test_a_mix_of_the_other_orientation_is_refused():
    """Forward would multiply the gradient by its res as it would not in combine."""
    io = mhc.VARIANTS["deepseek_v4"]
    oi = dataclasses.replace(io, res_orientation="oi")
    own, other = (connection(HyperConnectionConfig(32, variant=v)) for v in (io, oi))
    x = torch.randn(3, 4, 32, requires_grad=True)
    layer_input, mix = own(x)
    with pytest.raises(ValueError, match="^HyperConnection: mix must have res_orientation 'oi', got io$"):
        other.combine(layer_input, x, mix)


def test_a_tangent_is_refused_and_not_lost():
    x = torch.randn(3, 4, 32)
    with fake_kernels(), forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        mhc.expand(forward_ad.make_dual(x[:, 0].contiguous(), torch.ones(3, 32)), 4)


@pytest.mark.parametrize("convert", [lambda m: m.to(BF16), lambda m: m.half(), lambda m: m.to("cpu", FP16)], ids="abc")
def test_parameters_stay_fp32(convert):
    """The coefficients' parameters and the rotary table; the matrices and norms follow."""
    config = make_config()
    model = make_model(config, dtype=FP32)
    before = copy.deepcopy(model.state_dict())
    convert(model)
    for name, t in model.state_dict().items():
        kept = "connection" in name or ".head." in name
        assert t.dtype == (FP32 if kept else model.embedding.weight.dtype), name
        assert not kept or torch.equal(t, before[name])
    assert model.block.rotary.cos.dtype is FP32
    tokens, _ = make_tokens(config)
    assert model(tokens).dtype is FP32


def test_meta_device_and_reset():
    model = MHCTransformer(make_config(), device="meta", dtype=BF16)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model = model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    torch.manual_seed(0)
    fresh = MHCTransformer(make_config(), dtype=BF16)
    for name, t in (*fresh.named_parameters(), *fresh.named_buffers()):
        own = model.get_parameter(name) if isinstance(t, torch.nn.Parameter) else model.get_buffer(name)
        assert torch.equal(own, t), name
    assert 0.018 < fresh.embedding.weight.float().std() < 0.022
    assert model.loss(*make_tokens(make_config())).isfinite()


def test_fp16_does_not_overflow(path):
    """The sum of squares of a token's n C numbers is in fp32."""
    module = connection(HyperConnectionConfig(4096))
    x = torch.full((2, 4, 4096), 200.0, dtype=FP16)  # squares sum to 6.5e8
    layer_input, mix = module(x)
    assert layer_input.isfinite().all() and mix.post.isfinite().all() and mix.res.isfinite().all()
    assert torch.allclose(mix.res.sum(-1), torch.ones(2, 4), atol=1e-3)


def test_a_recomputed_norm_on_the_kernels_wants_its_weight():
    with fake_kernels():
        norm, manager = RMSNorm(32), RecomputeManager()
        x = torch.randn(4, 32).to(BF16).requires_grad_()
        end = norm.recomputed(x, manager).sin()
        manager.end_block(end)
        norm.weight.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="RMSNorm: weight has no memory when the block is replayed"):
            end.sum().backward()


@pytest.mark.parametrize("save", ["input", "output"])
def test_a_recomputed_norm_wants_its_x_as_it_was(save, path):
    """Also where autograd does not keep it: the norm has no gradient to find, or keeps y."""
    kernels = operators.on_gpu(torch.zeros(1))
    for frozen in (False, True):
        norm, manager = RMSNorm(32, save=save).requires_grad_(not frozen), RecomputeManager()
        x, weight = torch.randn(4, 32).requires_grad_(not frozen), torch.ones(32, requires_grad=True)
        h = x * 1
        end = norm.recomputed(h, manager) * weight
        manager.end_block(end)
        h.add_(3)
        if frozen and not kernels:  # nothing was discarded
            end.sum().backward()
            continue
        with pytest.raises(RuntimeError, match="modified (in place after the forward|by an inplace operation)"):
            end.sum().backward()


def test_a_recombination_wants_its_bias():
    """Not so of a fully_shard whose parameters are gone by then."""
    with fake_kernels():
        module, manager = connection(HyperConnectionConfig(32), 0), RecomputeManager()
        x, bias = torch.randn(3, 4, 32).to(BF16).requires_grad_(), torch.ones(32, requires_grad=True)
        layer_input, mix = module(x)
        end = module.combine(layer_input, x, mix, bias, recompute=manager).sin()
        manager.end_block(end)
        bias.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="HyperConnection.combine: bias has no memory when the block is replaye"):
            end.sum().backward()


HOOKS = {
    "forward_pre": lambda module, args: (args[0].sin(),),
    "forward": lambda module, args, y: 2 * y,
    "full_backward_pre": lambda module, of_outputs: (2 * of_outputs[0],),
    "full_backward": lambda module, of_inputs, of_outputs: (2 * of_inputs[0],),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_recomputed_norm_calls_its_hooks(kind, path):
    """And what they make of y is there in the backward."""
    norm, x = RMSNorm(32), torch.randn(4, 32).to(BF16).requires_grad_()
    getattr(norm, f"register_{kind}_hook")(HOOKS[kind])
    found = []
    for recomputes in (False, True):
        manager = RecomputeManager()
        y = norm.recomputed(x * 1, manager) if recomputes else norm(x * 1)
        end = y.sin()
        manager.end_block(end)
        found.append((end.detach(), *torch.autograd.grad(end.sum(), [x, norm.weight])))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_recomputed_norm_keeps_its_options():
    norm = RMSNorm(32, eps=1e-2, weight_offset=1.0, out_dtype=FP32)
    x = torch.randn(4, 32).to(BF16).requires_grad_()
    manager = RecomputeManager()
    y = norm.recomputed(x, manager)
    expected = norm(x).detach()
    assert torch.equal(y, expected) and y.dtype is FP32
    end = y.sin()
    manager.end_block(end)
    end.sum().backward()
    assert torch.equal(y, expected)


def test_a_linear_of_an_fp32_weight():
    """Cast at each use; its gradient is fp32, in main_grad where there is one."""
    torch.manual_seed(0)
    linear, x = Linear(32, 16), torch.randn(4, 32).to(BF16)
    y = linear(x)
    assert y.dtype is BF16
    assert torch.equal(y, cute_kernels.linear(x, linear.weight.to(BF16), linear.bias))
    y.sum().backward()
    assert linear.weight.grad.dtype is FP32
    gradient, linear.weight.grad = linear.weight.grad, None
    linear.weight.main_grad = torch.ones(16, 32)
    linear(x).sum().backward()
    assert linear.weight.grad is None
    assert torch.allclose(linear.weight.main_grad - 1, gradient, rtol=1e-2, atol=1e-2)
    y, old = linear(x), linear.weight.main_grad.clone()
    left, linear.weight.main_grad = linear.weight.main_grad, torch.ones(16, 32)
    y.sum().backward()
    assert torch.equal(left, old) and torch.equal(linear.weight.main_grad, old)
    with pytest.raises(TypeError, match="^linear: x must be a torch.Tensor, got list$"):
        linear([1.0])


@pytest.mark.parametrize("module", [HyperConnection, LearnedHead])
def test_no_config(module):
    with pytest.raises(TypeError, match=f"{module.__name__}: config must be a HyperConnectionConfig, got NoneType"):
        module(None)


@pytest.mark.parametrize("second", ["deepseek_v4", "transformer_engine"], ids=["one_order", "two_orders"])
def test_a_residual_of_two_connections(second, path):
    """Its replay makes the input of the first that has its order, the other's is made of it: no bit changes."""
    first = HyperConnectionConfig(8, 8)
    modules = [connection(first, seed) for seed in (0, 1)]
    modules.append(connection(HyperConnectionConfig(8, 8, variant=second), 2))
    x, upstream = torch.randn(3, 8, 8).to(BF16).requires_grad_(), torch.randn(3, 8).to(BF16)
    leaves = [x, *(parameter for module in modules for parameter in module.parameters())]

    def gradients(manager):
        layer_input, mix = modules[0](x, manager)
        out = modules[0].combine(layer_input.sin(), x, mix, recompute=manager)
        # In the order of ``second`` first: that one is not of the residual's order
        one, two = modules[2](out, manager)[0], modules[1](out, manager)[0]
        end = one.sin() + two.exp()
        if manager is not None:
            manager.end_block(end)
        return torch.autograd.grad(end, leaves, upstream, allow_unused=True)

    for found, wanted in zip(gradients(RecomputeManager()), gradients(None), strict=True):
        assert found is wanted is None or torch.equal(found, wanted)


@pytest.mark.parametrize("module", [HyperConnection, LearnedHead])
def test_a_wrong_backend_fails_when_the_module_is_made(module):
    name = module.__name__
    with pytest.raises(ValueError, match=f"^{name}: backend must be None or 'reference', got 'torch'$"):
        module(HyperConnectionConfig(16), backend="torch")


@pytest.mark.parametrize("variant", ["deepseek_v4", "transformer_engine"])
@pytest.mark.parametrize("module", [HyperConnection, LearnedHead])
def test_a_residual_of_other_streams_or_channels_is_what_is_wrong(module, variant, path):
    made, by_streams = module(HyperConnectionConfig(16, variant=variant)), variant == "deepseek_v4"
    wanted = r"\(..., 4, 16\)" if by_streams else r"\(..., 16, 4\)"
    for n, channels in ((4, 32), (2, 16), (3, 16)):
        x = torch.zeros(5, n, channels) if by_streams else torch.zeros(5, channels, n)
        with pytest.raises(
            ValueError, match=rf"^{module.__name__}: x must have shape {wanted}, as the config says, got"
        ):
            made(x)
    with pytest.raises(ValueError, match="x must have contiguous last two dimensions"):
        made(torch.zeros(5, 16, 4).mT if by_streams else torch.zeros(5, 4, 16).mT)
