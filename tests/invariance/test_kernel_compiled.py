"""The backend "cute_kernels" over kernels: compiled code has the bits of eager code inside of batch_invariant."""

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F

import cute_kernels.invariance.compiled  # noqa: F401  the backend's name
from cute_kernels import batch_invariant
from cute_kernels.invariance import fused
from tests.invariance.compiled_models import FAMILIES, make_ids, make_model, step
from tests.invariance.test_kernel_statistics import CLASSES, LOSSES, inputs_of
from tests.runtime.bits import assert_same_bits


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_equal(found, wanted):
    for f, w in zip(found, wanted, strict=True):
        assert_same_bits(f, w)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_step(family, dynamic, generator):
    model = make_model(family, generator)
    run = torch.compile(model.loss, backend="cute_kernels", fullgraph=True, dynamic=dynamic)
    for batch, tokens in ((3, 12), (2, 12), (4, 17)):
        ids = make_ids(batch, tokens, generator)
        with batch_invariant("strict"):
            wanted = step(model, model.loss, ids)
        assert_equal(step(model, run, ids), wanted)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_any_graph(family, mode, generator):
    """A sequence's logits by graphs of training and of inference, alone and among others, twice."""
    model = make_model(family, generator)
    ids = make_ids(4, 12, generator)
    forward = torch.compile(model, backend="cute_kernels", fullgraph=True, dynamic=False, mode=mode)
    trained = forward(ids).detach().clone()
    with torch.no_grad():
        for _ in range(3):  # CUDA graphs: warmed up, captured, replayed
            assert_same_bits(forward(ids), trained)
            assert_same_bits(forward(ids[2:3]), trained[2:3])


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses(dtype, reduction, generator):
    x, y = inputs_of(dtype, generator)
    functions = list((LOSSES | CLASSES).values())
    leaves = [x.detach().clone().requires_grad_() for _ in functions]

    def call(*leaves):
        return [function(leaf, y, reduction=reduction) for function, leaf in zip(functions, leaves, strict=True)]

    with batch_invariant("strict"):
        wanted = call(*leaves)
        gradients = torch.autograd.grad(wanted, leaves, [torch.ones_like(t) for t in wanted])
    found = torch.compile(call, backend="cute_kernels", fullgraph=True)(*leaves)
    assert_equal(found, wanted)
    assert_equal(torch.autograd.grad(found, leaves, [torch.ones_like(t) for t in found]), gradients)


def calls_without_roundings(graph, marks=fused.calls_for_the_rest):
    marks(graph)
    for node in graph.nodes:
        node.meta.pop("low_precision_pointwise_barrier", None)


@pytest.mark.parametrize("how", ["inductor", "without roundings"])
def test_positive_control(how, generator, monkeypatch):
    model = make_model("llama", generator)
    ids = make_ids(3, 12, generator)
    if how == "without roundings":
        monkeypatch.setattr(fused, "calls_for_the_rest", calls_without_roundings)
        monkeypatch.setattr(inductor_config, "force_disable_caches", True)  # of code that rounds
    run = torch.compile(model.loss, backend="inductor" if how == "inductor" else "cute_kernels")
    with batch_invariant("strict"):
        wanted = step(model, model.loss, ids)
    assert not all(map(torch.equal, step(model, run, ids), wanted))


OF_ONE = {
    "abs": torch.abs,
    "atan": torch.atan,
    "cast": lambda x: (x.float() * 1.1).to(torch.bfloat16).float() * 1.3,
    "casts": lambda x: x.to(torch.float16).float() + x.double().to(torch.bfloat16),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_max": lambda x: x.clamp(max=0),
    "clamp_min": lambda x: x.clamp(min=0),
    "compare": lambda x: torch.where(x >= 0.7, x, 0.7) + (x == 0.1),
    "cos": torch.cos,
    "divide": lambda x: x / 3,
    "divide by a fraction": lambda x: x / 0.9 + x / 11.313708498984761,
    "elu": F.elu,
    "erf": torch.erf,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "floor_divide": lambda x: x + x.detach() // 0.3,
    "frac": torch.frac,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "logit": lambda x: torch.logit(x, 1e-3),
    "logsigmoid": F.logsigmoid,
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.7),
    "mish": F.mish,
    "multiply and add": lambda x: x * 1.3 + 0.7,
    "neg": torch.neg,
    "power": lambda x: x.abs() ** 1.5,
    "power 2": lambda x: x**2,
    "power 3": lambda x: x**3,
    "power 4": lambda x: x**4,
    "power -1": lambda x: x**-1,
    "power 0.5": lambda x: x**0.5,
    "power -0.5": lambda x: x**-0.5,
    "reciprocal": lambda x: 1 / x,
    "relu": F.relu,
    "round": torch.round,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "silu": F.silu,
    "sin": torch.sin,
    "softplus": F.softplus,
    "sqrt": torch.sqrt,
    "subtract from": lambda x: (1 - x) * (0.7 - x),
    "tan": torch.tan,
    "tanh": torch.tanh,
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "trunc": torch.trunc,
}
OF_TWO = {
    "add": torch.add,
    "add scaled": lambda x, y: torch.add(x, y, alpha=0.7),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x),
    "addcmul": lambda x, y: torch.addcmul(x, y, y) + torch.addcmul(x, y, x, value=0.3),
    "arctangent": torch.atan2,
    "clamp": lambda x, y: torch.clamp(x, min=y),
    "copysign": torch.copysign,
    "divide": torch.div,
    "divide floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "hypot": torch.hypot,
    "largest": lambda x, y: torch.stack([x, y]).amax(0),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mixed": lambda x, y: x.bfloat16() * y.float() + y.half(),
    "mse": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "multiply": torch.mul,
    "number": lambda x, y: x * y.flatten()[7] + y,
    "power": lambda x, y: x.abs() ** y,
    "remainder": torch.remainder,
    "rotate": lambda x, y: x * y + torch.cat([-y[len(y) // 2 :], y[: len(y) // 2]]) * x,
    "softcap": lambda x, y: torch.tanh(x / 30.0) * 30.0 + y,
    "subtract": torch.sub,
    "swiglu": lambda x, y: F.silu(x) * y,
    "geglu": lambda x, y: F.gelu(x, approximate="tanh") * y,
    "where": lambda x, y: torch.where(x > y, x, y),
}
SPECIAL = [0.0, 1.0, 0.5, 2.0, 3.0, 0.1, 20.0, 19.99, 88.0, 1e-40, 1e-45, 1.1754944e-38, 3e38, float("inf"), 255.5, 6.0]
DTYPES = [torch.bfloat16, torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)]


def numbers(dtype, generator, count):
    """All of bf16 or fp16; of fp32 2^21 of all exponents, and as many around 0, with what is special; shuffled."""
    special = torch.tensor(SPECIAL, device=generator.device)
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31, (2**21,), generator=generator, device="cuda").to(torch.int32).view(dtype)
        near = torch.randn(2**21, generator=generator, device="cuda") * 4
        x = torch.cat([special, -special, bits[~bits.isnan()], near])
    else:
        x = torch.arange(2**16, device="cuda").to(torch.uint16).view(dtype)
        x = x[~x.isnan()].repeat(8)
    places = [torch.randperm(len(x), generator=generator, device="cuda") for _ in range(count)]
    return [x[place] for place in places]


def differing(functions, inputs, dy):
    """The functions whose results or gradients have other bits in compiled code, with the number of elements."""
    leaves = [[t.clone().requires_grad_() for t in inputs] for _ in functions]

    def call(*tensors):
        groups = zip(functions.values(), zip(*[iter(tensors)] * len(inputs), strict=True), strict=True)
        return [function(*group) for function, group in groups]

    found = []
    flat = [t for group in leaves for t in group]
    for run in (torch.compile(call, backend="cute_kernels", fullgraph=True, dynamic=False), call):
        ys = run(*flat)
        seeds = [dy.to(y.dtype) for y in ys]
        found.append((ys, torch.autograd.grad(ys, flat, seeds, allow_unused=True, materialize_grads=True)))
    torch._dynamo.reset()
    wrong = {}
    for i, name in enumerate(functions):
        of_this = [[ys[i], *dxs[i * len(inputs) : (i + 1) * len(inputs)]] for ys, dxs in found]
        for place, (ours, wanted) in enumerate(zip(*of_this, strict=True)):
            same = bits_of(ours) == bits_of(wanted)
            if not same.all():
                at = int((~same).nonzero()[0])
                values = [t[at].item() for t in (*inputs, dy, ours, wanted)]
                wrong[f"{name}, {'gradient' if place else 'result'}"] = int((~same).sum()), values
    return wrong


def bits_of(t):
    """One NaN is as good as another."""
    t = t.detach()
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize]
    return torch.where(t.isnan(), torch.full_like(t, float("nan")), t).contiguous().view(integers)


def in_groups(functions, size):
    names = list(functions)
    return [names[i : i + size] for i in range(0, len(names), size)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", in_groups(OF_ONE, 7), ids=lambda names: names[0])
def test_functions_of_one(names, dtype, generator):
    """Every number; and two of the function in one kernel."""
    functions = {name: OF_ONE[name] for name in names}
    twice = {f"{n} twice": lambda x, f=f: f((f(x) * 0.7 + x.float()).to(x.dtype)) for n, f in functions.items()}
    x, dy = numbers(dtype, generator, 2)
    assert not differing(functions | twice, [x], dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", in_groups(OF_TWO, 7), ids=lambda names: names[0])
def test_functions_of_two(names, dtype, generator):
    *inputs, dy = numbers(dtype, generator, 3)
    assert not differing({name: OF_TWO[name] for name in names}, inputs, dy)
