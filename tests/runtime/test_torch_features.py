"""Torch's features around an operator, on the kernels' path with plain torch in place of the kernels."""

import enum
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cute_kernels import (
    dequantize,
    layer_norm,
    linear,
    linear_log_prob,
    mhc,
    mm,
    quantize_dual,
    quantize_rowwise,
    rms_norm,
)
from cute_kernels.nn import Linear
from cute_kernels.runtime.operators import is_eager
from tests.fakes import fake_kernels

BF16 = torch.bfloat16


@pytest.fixture
def kernels():
    with fake_kernels() as jobs:
        yield jobs


@pytest.fixture(params=["reference", "kernels"])
def path(request):
    return request.getfixturevalue("kernels") if request.param == "kernels" else None


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_()


def connected(x, phi, alpha, beta):
    return mhc.hyper_connection(x, torch.sin, phi, alpha, beta)


def streams() -> tuple[torch.Tensor, ...]:
    return randn(6, 4, 32), randn(24, 128, dtype=torch.float32), *(randn(i, dtype=torch.float32) for i in (3, 24))


@pytest.mark.parametrize(
    "function, inputs",
    [
        (lambda x, w: linear(linear(x, w, activation="silu"), w.t()), lambda: (randn(6, 64), randn(48, 64))),
        (lambda x, w: rms_norm(rms_norm(x, w), w), lambda: (randn(6, 64), randn(64))),
        (connected, streams),
    ],
    ids=["linear", "rms_norm", "hyper_connection"],
)
def test_selective_checkpointing(function, inputs, kernels):
    """A policy that wants results of ours kept cannot have what is returned by nobody: they are made again."""
    tensors, library = inputs(), torch.ops.cute_kernels
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("cute_kernels::")]
    policy = [getattr(library, name.partition("::")[2].partition(".")[0]).default for name in names]
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    found = checkpoint(function, *tensors, use_reentrant=False, context_fn=contexts)
    found = torch.autograd.grad(found.float().sum(), tensors)
    wanted = torch.autograd.grad(function(*tensors).float().sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_functorch_has_no_memory(kernels):
    """Its wrappers are of type Tensor and lie at address 0."""
    seen = []
    torch.func.functionalize(lambda x: (seen.append((is_eager(x), x.data_ptr())), x * 2)[1])(torch.ones(3))
    assert seen == [(False, 0)]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("op", ["rms_norm", "linear", "hyper_connection"])
def test_a_number_of_rows_that_depends_on_data(op, grad, kernels):
    torch._dynamo.reset()
    tensors = streams() if op == "hyper_connection" else (randn(6, 64), randn(64) if op == "rms_norm" else randn(8, 64))
    function = {"rms_norm": rms_norm, "linear": linear, "hyper_connection": connected}[op]
    tensors = [t.requires_grad_(grad) for t in tensors]

    def chosen(mask, x, *rest):
        return function(x.index_select(0, mask.nonzero().squeeze(-1)), *rest)

    mask = torch.tensor([True, False, True, True, False, True])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(chosen, fullgraph=True, backend="aot_eager")(mask, *tensors)
    wanted = chosen(mask, *tensors)
    assert torch.equal(found, wanted)
    if grad:
        gradients = [torch.autograd.grad(y.float().sum(), tensors) for y in (found, wanted)]
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_bounded_number_of_tokens_and_a_bias(kernels):
    torch._dynamo.reset()
    x, weight, bias = randn(24, 64), randn(8, 64), randn(8)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=4096)
    y = torch.compile(linear, fullgraph=True, backend="aot_eager")(x, weight, bias)
    (found,) = torch.autograd.grad(y.float().sum(), bias)
    assert torch.equal(found, torch.full_like(found, 24.0))


@pytest.mark.parametrize("quantize", [quantize_rowwise, functools.partial(quantize_dual, scale_layout="blocked")])
def test_quantizers_compiled_for_a_cpu(quantize):
    """By torch's default backend, which has no numbers of e8m0 there."""
    torch._dynamo.reset()
    x = randn(64, 96).detach()

    def there_and_back(x):
        found = quantize(x)
        return *found, dequantize(found[0], found[1])

    found, wanted = torch.compile(there_and_back, fullgraph=True)(x), there_and_back(x)
    for a, b in zip(found, wanted, strict=True):
        assert a.stride() == b.stride() and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def call(op: str):
    """(function of x, its parameter)."""
    if op == "cast":  # of which the weight is cast
        module = Linear(64, 48, bias=False, dtype=torch.float32)
        module.weight.main_grad = torch.zeros(48, 64)
        return module, module.weight
    weight = randn(48, 64) if op == "linear" else randn(64)
    weight.main_grad = torch.zeros(weight.shape)
    return (lambda x: linear(x, weight) if op == "linear" else rms_norm(x, weight)), weight


def checkpointed(function, x):
    return checkpoint(function, x, use_reentrant=False)


def on_cpu(function, x):
    with torch.autograd.graph.save_on_cpu():
        return function(x)


@pytest.mark.parametrize("run", [lambda function, x: function(x), checkpointed, on_cpu])
@pytest.mark.parametrize("op", ["linear", "rms_norm", "cast"])
def test_a_main_grad_that_is_another_one_in_the_backward(op, run, path):
    """As where gradients are set to zero between the two."""
    function, weight = call(op)
    first, y = weight.main_grad, run(function, randn(6, 64))
    weight.main_grad = torch.zeros(weight.shape)
    y.float().sum().backward()
    assert first.eq(0).all() and weight.main_grad.ne(0).any() and weight.grad is None
    if run is checkpointed:  # torch: another number of tensors was saved
        return
    y = run(function, randn(6, 64))
    weight.main_grad = None
    y.float().sum().backward()
    assert weight.grad is not None and weight.main_grad is None


@pytest.mark.parametrize("run", [lambda function, x: function(x), checkpointed, on_cpu])
@pytest.mark.parametrize("op", ["linear", "rms_norm", "cast"])
def test_a_main_grad_beside_a_tensor_hook_is_refused(op, run, path):
    """It would be called with None. A hook that is removed, or on a parameter without main_grad, is none."""
    function, weight = call(op)
    y, handle = run(function, randn(6, 64)), weight.register_hook(lambda gradient: gradient * 2)
    name = "rms_norm" if op == "rms_norm" else "linear"
    expected = f"{name}: weight.main_grad must be of a parameter without tensor hooks, since its gradient does not go "
    with pytest.raises(ValueError, match=f"^{expected}through autograd, got 1 of register_hook$"):
        y.float().sum().backward()
    assert weight.main_grad.eq(0).all() and weight.grad is None
    handle.remove()
    run(function, randn(6, 64)).float().sum().backward()
    assert weight.main_grad.ne(0).any() and weight.grad is None
    weight.main_grad = None
    seen = []
    weight.register_hook(seen.append)
    run(function, randn(6, 64)).float().sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], weight.grad)


def test_a_main_grad_of_a_bias_beside_a_tensor_hook_is_refused(path):
    for function, x, weight in ((linear, randn(6, 64), randn(48, 64)), (layer_norm, randn(6, 64), randn(64))):
        bias = randn(len(weight))
        bias.main_grad = torch.zeros(bias.shape)
        bias.register_hook(lambda gradient: gradient * 2)
        with pytest.raises(ValueError, match=f"^{function.__name__}: bias.main_grad must be of a parameter without "):
            function(x, weight, bias).float().sum().backward()


def test_a_main_grad_of_a_vocabulary_beside_a_tensor_hook_is_refused():
    weight = randn(48, 64)
    weight.main_grad = torch.zeros(weight.shape)
    weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ValueError, match="^linear_log_prob: weight.main_grad must be of a parameter without "):
        linear_log_prob(randn(6, 64), weight, torch.arange(6))[0].sum().backward()


@pytest.mark.parametrize("op", ["linear", "rms_norm", "cast"])
def test_hooks_that_training_systems_have_beside_a_main_grad(op, path):
    """Those of the AccumulateGrad node, and those after it, run as without a main_grad."""
    function, weight = call(op)
    seen, node = [], torch.autograd.graph.get_gradient_edge(weight).node
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("after"))
    node.register_prehook(lambda gradients: seen.append(gradients))
    node.register_hook(lambda *gradients: seen.append("node"))
    function(randn(6, 64)).float().sum().backward()
    assert seen == [(None,), "after", "node"] and weight.main_grad.ne(0).any() and weight.grad is None


@pytest.mark.parametrize("run", [lambda function, x: function(x), on_cpu])
@pytest.mark.parametrize("op", ["linear", "rms_norm", "cast"])
def test_a_parameter_that_is_frozen_after_the_forward(op, run, path):
    function, weight = call(op)
    y = run(function, randn(6, 64))
    weight.requires_grad_(False)
    y.float().sum().backward()
    assert weight.main_grad.eq(0).all() and weight.grad is None


@pytest.mark.parametrize("op", ["linear", "mm"])
def test_what_a_frozen_weight_does_not_need_is_not_kept(op, path):
    x, weight, shapes = randn(6, 64), randn(48, 64).detach(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (shapes.append(t.shape), t)[1], lambda t: t):
        h = x * 1
        y = linear(h, weight) if op == "linear" else mm(h, weight.t())
    assert (6, 64) not in shapes
    h.mul_(3)  # of nobody's concern
    (dx,) = torch.autograd.grad(y.float().sum(), x)
    torch.testing.assert_close(dx.float(), weight.float().sum(0).expand(6, 64), rtol=2e-2, atol=2e-2)


def test_options_that_are_members_of_an_enum():
    """They have one key with the plain strings, under which kernels are prewarmed."""

    class Option(str, enum.Enum):
        SILU = "silu"
        OUTPUT = "output"
        CHANNELS = "channels"

    with fake_kernels() as jobs:
        linear(randn(6, 64), randn(48, 64), activation=Option.SILU)
        rms_norm(randn(6, 64), randn(64), save=Option.OUTPUT).float().sum().backward()
        mhc.expand(randn(6, 64), 2, layout=Option.CHANNELS)
    arguments = [argument for _, found in jobs for argument in found]
    arguments += [field for spec in arguments if isinstance(spec, tuple) for field in spec]
    assert {"silu", "output", "channels"} <= {argument for argument in arguments if type(argument) is str}
    assert not any(isinstance(argument, Option) for argument in arguments)


@pytest.mark.parametrize("op", ["linear", "rms_norm"])
def test_an_output_of_more_dimensions_is_no_view(op, path):
    """The kernels' path has it from a matrix of rows: what changes it in place finds its own memory, and autograd."""
    function = {"linear": linear, "rms_norm": rms_norm}[op]
    weight = randn(48, 64) if op == "linear" else randn(64)
    for shape in ((3, 5, 64), (2, 1, 3, 64), (64,)):
        x = randn(*shape)
        (function(x, weight).double() * 2 + 1).square().sum().backward()
        expected, x.grad = x.grad, None
        y = function(x, weight)
        assert y._base is None and y.stride() == torch.empty(y.shape).stride()
        y.detach().add_(0)
        assert torch.equal(function(x, weight), y) and torch.equal(function(x.detach(), weight.detach()), y)
        out = function(x, weight).double()
        out.mul_(2).add_(1).square().sum().backward()
        assert torch.equal(x.grad, expected)
        if x.dim() > 1:
            z = function(x, weight)
            z[..., 0] = 1
            assert z.grad_fn is not None and z.view(-1, z.shape[-1])[:, 0].eq(1).all()
