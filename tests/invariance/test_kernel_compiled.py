"""The backend "cute_kernels" over kernels: compiled code has the bits of eager code inside of batch_invariant."""

import pytest
import torch
import torch.nn.functional as F

from cute_kernels import batch_invariant
from cute_kernels.invariance import compiled
from tests.invariance.compiled_models import FAMILIES, make_ids, make_model, step
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


@pytest.mark.parametrize("how", ["inductor", "without a setting"])
def test_positive_control(how, generator, monkeypatch):
    model = make_model("llama", generator)
    ids = make_ids(3, 12, generator)
    if how == "without a setting":
        monkeypatch.delitem(compiled.SETTINGS, "emulate_precision_casts")
    run = torch.compile(model.loss, backend="inductor" if how == "inductor" else "cute_kernels")
    with batch_invariant("strict"):
        wanted = step(model, model.loss, ids)
    assert not all(map(torch.equal, step(model, run, ids), wanted))


FUNCTIONS = {
    "exp": torch.exp,
    "log": torch.log,
    "cos": torch.cos,
    "sin": torch.sin,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "divide": lambda x: x / 3,
    "reciprocal": lambda x: 1 / x,
    "power": lambda x: x.abs() ** 1.5,
    "multiply and add": lambda x: x * 1.3 + 0.7,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementwise_functions(name, dtype, generator):
    """Every bf16 number, 2^22 fp32 ones of all exponents, and the gradient; two of the function in one kernel, too."""
    function = FUNCTIONS[name]
    if dtype == torch.bfloat16:
        x = torch.arange(2**16, device="cuda").to(torch.uint16).view(torch.bfloat16)
    else:
        x = torch.randint(-(2**31), 2**31, (2**22,), generator=generator, device="cuda").to(torch.int32).view(dtype)
    x = x[x.isfinite()].requires_grad_()
    for call in (function, lambda x: function(function(x) * 0.7 + x)):
        found = []
        for run in (torch.compile(call, backend="cute_kernels", fullgraph=True, dynamic=False), call):
            y = run(x)
            results = (y, *torch.autograd.grad(y, x, torch.ones_like(y)))
            found.append([t.detach().nan_to_num(nan=7.0) for t in results])
        torch._dynamo.reset()
        assert_equal(*found)
