"""The hyper-connections over fake kernels as torch sees them: traced, as fake tensors, as operators."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels import mhc
from cute_kernels.runtime import launches, operators
from tests.fakes import fake_kernels
from tests.marks import first_of
from tests.mhc.cases import (
    FP32,
    OPERATIONS,
    Case,
    call,
    differentiate,
    make_inputs,
    make_upstream,
    sublayer,
)

FULL = Case(4, 16, (5,), FP32, norm_weight=True, bias=True)
OPERATORS = {name for name in operators.OPERATORS if name.startswith("mhc_")}


@pytest.fixture(autouse=True)
def kernels():
    with fake_kernels() as jobs:
        yield jobs


@pytest.mark.parametrize("op", OPERATIONS)
def test_compile(op, generator):
    """fullgraph, without and with gradients; another number of tokens, too."""
    torch._dynamo.reset()
    compiled = {}
    for tokens in ((5,), (7,)):
        case = dataclasses.replace(FULL, tokens=tokens, dropout_p=0.2)
        t = make_inputs(case, generator)
        upstream = make_upstream(op, case, generator)

        def run(leaves, op=op, case=case):
            return call(mhc, op, case, leaves)

        compiled.setdefault("run", torch.compile(run, fullgraph=True, backend="aot_eager"))
        names = OPERATIONS[op][0]
        with torch.no_grad():
            for a, b in zip(compiled["run"](t), run(t), strict=True):
                assert torch.equal(a, b)
        outputs = compiled["run"](t)
        incoming = [upstream[name] for name in OPERATIONS[op][1]]
        found = torch.autograd.grad(outputs, [t[name] for name in names], incoming)
        wanted = differentiate(mhc, op, case, t, upstream)
        for name, gradient in zip(names, found, strict=True):
            torch.testing.assert_close(gradient, wanted[f"d{name}"])


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("op", first_of(["hyper_connection", "coefficients", "sinkhorn", "expand", "head"], 2))
def test_compile_of_several_layers(op, dynamic, generator):
    """Sizes, numbers and names that differ between a process's layers, or are told to, become symbols."""
    torch._dynamo.reset()

    def run(leaves, case):
        return call(mhc, op, case, leaves)

    compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=dynamic)
    other = dataclasses.replace(FULL, n=2, channels=72, layout="channels", variant="transformer_engine")
    for case in (FULL, other, dataclasses.replace(FULL, channels=72, tokens=(9,), variant="tilekernels")):
        t = make_inputs(case, generator)
        for a, b in zip(compiled(t, case), run(t, case), strict=True):
            assert torch.equal(a, b)


def test_compile_draws_a_seed(generator):
    torch._dynamo.reset()
    t = make_inputs(FULL, generator)

    def run(x):
        return mhc.hyper_connection(x, sublayer, t["phi"], t["alpha"], t["beta"], dropout_p=0.5)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    out = compiled(t["x"])
    (gradient,) = torch.autograd.grad(out, t["x"], torch.ones_like(out))
    assert gradient.isfinite().all() and not torch.equal(out, compiled(t["x"]))


@pytest.mark.parametrize("op", OPERATIONS)
def test_fake_tensors(op, kernels, generator):
    """Shapes, dtypes and strides as those of real tensors; nothing is launched."""
    case = dataclasses.replace(FULL, dropout_p=0.2)
    t = make_inputs(case, generator)
    upstream = make_upstream(op, case, generator)
    wanted = differentiate(mhc, op, case, t, upstream)
    kernels.clear()
    launches.forget()
    mode = FakeTensorMode()
    fakes = {name: mode.from_tensor(tensor.detach()).requires_grad_() for name, tensor in t.items()}
    incoming = {name: mode.from_tensor(tensor) for name, tensor in upstream.items()}
    with mode:
        found = differentiate(mhc, op, case, fakes, incoming)
    assert not kernels
    for name in wanted:
        assert found[name].shape == wanted[name].shape and found[name].dtype is wanted[name].dtype
        assert found[name].stride() == wanted[name].stride()


def test_opcheck(generator):
    """Every registered operator, with arguments as a training step gives them."""
    calls = {}

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.name().removeprefix("cute_kernels::")
            if name in OPERATORS:
                calls.setdefault(name, args)
            return function(*args, **(kwargs or {}))

    case = dataclasses.replace(FULL, dropout_p=0.2)
    t = make_inputs(case, generator)
    with Record():
        for op in OPERATIONS:
            differentiate(mhc, op, case, t, make_upstream(op, case, generator))
    assert calls.keys() == OPERATORS
    for name, arguments in calls.items():
        operator = getattr(torch.ops.cute_kernels, name).default
        torch.library.opcheck(operator, tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments))


def test_the_schemas_name_what_is_written():
    written = {}
    for name in OPERATORS:
        operator = getattr(torch.ops.cute_kernels, name).default
        assert not operator._schema.returns
        arguments = operator._schema.arguments
        written[name] = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {
        "mhc_projection_forward": {"H", "mean_square"},
        "mhc_pre_forward": {"H", "mean_square", "pre", "post", "res", "layer_input"},
        "mhc_projection_backward": {"dx", "dphi", "dnorm_weight", "dbeta", "dalpha"},
        "mhc_coefficients_forward": {"pre", "post", "logits"},
        "mhc_coefficients_backward": {"dH", "dmean_square", "dbeta", "dalpha", "sums"},
        "mhc_sinkhorn_forward": {"res"},
        "mhc_sinkhorn_backward": {"dlogits"},
        "mhc_aggregate_forward": {"out"},
        "mhc_aggregate_backward": {"dx", "dpre"},
        "mhc_expand_streams": {"x"},
        "mhc_expand_combine_forward": {"out", "layer_input"},
        "mhc_expand_combine_backward": {"dx", "df", "dpost", "dres"},
        "mhc_bias_gradient": {"dbias"},
    }
