"""The public path of layer_norm and rms_norm on the CPU: checks, launches, allocation, autograd and the torch bridge.

Plain torch takes the place of the compiled kernels; all above them is what runs on a GPU. The tests are the GPU's own.
"""

from unittest import mock

import pytest
import torch

from cute_kernels.norm import op
from cute_kernels.norm.launch import NormForwardCall
from tests.fakes import fake_kernels, recorded_launches
from tests.norm.cases import BF16, FP32, KINDS, Case, call_and_differentiate, make_inputs
from tests.norm.cases import call as call_of
from tests.norm.test_kernel_autograd import *  # noqa: F403
from tests.norm.test_kernel_numerics import *  # noqa: F403
from tests.norm.test_kernel_torch import (  # noqa: F401
    test_a_compiled_backward_adds_to_every_main_grad,
    test_a_residual_that_is_x,
    test_autocast_changes_nothing,
    test_compile,
    test_compile_in_a_model,
    test_opcheck,
)


@pytest.fixture(autouse=True)
def kernels():
    with fake_kernels() as jobs:
        yield jobs


@pytest.fixture
def elements():
    return 2**13


@pytest.mark.parametrize("case", [Case("rms", 1024), Case("layer", 1024, weight=FP32, bias=FP32)], ids=str)
def test_another_number_of_rows_asks_for_no_kernel(case, norm, generator, kernels):
    call_and_differentiate(norm, case, make_inputs(case, generator, 64 * 1024))
    known = set(kernels)
    assert len(known) == 2
    for rows in (1, 2, 33, 100, 1001):
        call_and_differentiate(norm, case, make_inputs(case, generator, rows * 1024))
    assert set(kernels) == known


def num_entries() -> int:
    return sum(map(len, op.CALLS.guarded.values()))


def uncached():
    """Within it no call gets an entry."""
    return mock.patch.object(NormForwardCall, "of", lambda *arguments: None)


def inputs_of(case, generator, shape, requires_grad):
    """Those of ``make_inputs``, with leading dimensions."""
    inputs = make_inputs(case, generator)
    for name, t in vars(inputs).items():
        if t is not None:
            t = t.detach()
            t = t if t.dim() == 1 else t.unflatten(0, shape[:-1]) if len(shape) > 1 else t[0]
            setattr(inputs, name, t.requires_grad_(requires_grad and name not in ("dy", "dh")))
    return inputs


CACHED = [
    Case("rms", 64, rows=6),
    Case("rms", 64, rows=6, weight=None),
    Case("rms", 64, rows=6, residual=FP32, bias=FP32, weight_offset=1.0),
    Case("rms", 64, rows=6, out=FP32, save="output"),
    Case("rms", 64, rows=6, residual=BF16, gap=8),
    Case("layer", 64, rows=6, bias=BF16),
    Case("layer", 64, rows=6, bias=BF16, gap=16),
    Case("layer", 64, dtype=FP32, rows=6, bias=BF16, save="output"),
    Case("layer", 1, rows=6, residual=FP32),
]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("autograd", [False, True], ids=["no_grad", "autograd"])
@pytest.mark.parametrize("shape", [(6, -1), (2, 3, -1), (-1,)], ids=["matrix", "batch", "row"])
@pytest.mark.parametrize("case", CACHED, ids=str)
def test_a_cached_call_launches_what_another_launches(case, shape, autograd, arch, norm, generator):
    """At the first call and at another one."""
    inputs = inputs_of(case, generator, shape, autograd)
    with recorded_launches(arch, num_sms=7) as seen:
        with uncached():
            wanted = call_of(norm, case, inputs)
        assert not num_entries()
        for _ in range(2):
            for name, t in call_of(norm, case, inputs).items():
                assert (t.shape, t.stride(), t.dtype) == (wanted[name].shape, wanted[name].stride(), wanted[name].dtype)
                assert t.requires_grad == wanted[name].requires_grad == autograd
        assert num_entries() == 1
    assert len(seen) == 3 and seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("kind", KINDS)
def test_cached_calls(kind, norm, generator):
    """Each that differs has an entry of its own; results and gradients, and nothing is checked again."""
    inputs = make_inputs(Case(kind, 64, rows=6, bias=FP32, residual=BF16), generator)
    x, weight, bias, residual = (t.detach() for t in (inputs.x, inputs.weight, inputs.bias, inputs.residual))
    calls = [
        ((x, weight), {}),
        ((x, None), {}),
        ((x, weight), {"eps": 0.5}),
        ((x, weight), {"weight_offset": 1.0}),
        ((x, weight), {"out_dtype": FP32}),
        ((x, weight), {"save": "output"}),
        ((x, weight, bias), {}),
        ((x, None, bias), {}),
        ((x, weight), {"residual": residual}),
        ((x, weight), {"residual": residual, "return_residual": True}),
        ((x, bias), {}),
        ((x.float(), None), {}),
        ((x[:3], weight), {}),
        ((x.unflatten(0, (2, 3)), weight), {}),
        ((x.repeat(1, 2)[:, :64], None), {}),
        ((x, inputs.weight), {}),
        ((inputs.x, weight), {}),
        ((inputs.x, inputs.weight, inputs.bias), {"residual": inputs.residual}),
    ]

    def results(arguments, options):
        found = norm(kind, *arguments, **options)
        found = list(found) if isinstance(found, tuple) else [found]
        leaves = [t for t in (*arguments, *options.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
        gradients = torch.autograd.grad(found[0], leaves, torch.ones_like(found[0])) if leaves else ()
        return [t.detach() for t in (*found, *gradients)]

    wanted = []
    for arguments, options in calls:
        with uncached():
            wanted.append(results(arguments, options))
    for count, (arguments, options) in enumerate(calls):
        assert num_entries() == count
        results(arguments, options)
    with torch.no_grad():
        norm(kind, inputs.x, inputs.weight, eps=0.5)
        assert num_entries() == len(calls) + 1
        norm("layer" if kind == "rms" else "rms", inputs.x, inputs.weight, eps=0.5)
        assert num_entries() == len(calls) + 2
    refuse = mock.Mock(side_effect=AssertionError)
    with mock.patch.object(op, "check_norm", refuse), mock.patch("cute_kernels.norm.launch.NormForwardSpec", refuse):
        for (arguments, options), each in zip(calls, wanted, strict=True):
            for t, other in zip(results(arguments, options), each, strict=True):
                assert t.dtype is other.dtype and torch.equal(t, other)
        with torch.no_grad():
            assert not norm(kind, inputs.x, inputs.weight, eps=0.5).requires_grad


def test_calls_without_an_entry(norm, generator):
    """Rows that do not start on 16 bytes, one tensor given twice, no rows, the reference."""
    x = make_inputs(Case("rms", 64, rows=6), generator).x.detach()
    for _ in range(2):
        norm("rms", torch.zeros(6 * 64 + 1, dtype=BF16)[1:].view(6, 64))
        norm("rms", x, residual=x)
        norm("rms", x[:0])
        norm("rms", x, backend="reference")
    assert not num_entries()


@pytest.mark.parametrize(
    "options",
    [{"eps": True}, {"weight_offset": False}, {"save": ["input"]}, {"out_dtype": ["float32"]}, {"backend": "cuda"}],
    ids=str,
)
def test_a_bad_option_after_a_good_one(options, norm, generator):
    """1.0 and True are equal, but only one of them is good."""
    x = make_inputs(Case("rms", 64, rows=6), generator).x
    good = {"eps": 1.0, "weight_offset": 0.0}
    norm("rms", x, **good)
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        norm("rms", x, **good | options)


def test_a_main_grad_after_a_cached_call(norm, generator):
    """It is looked for at every call."""
    inputs = make_inputs(Case("rms", 64, rows=6), generator)
    norm("rms", inputs.x, inputs.weight).sum().backward()
    gradient, inputs.weight.grad = inputs.weight.grad, None
    inputs.weight.main_grad = torch.zeros(64)
    norm("rms", inputs.x, inputs.weight).sum().backward()
    assert num_entries() == 1 and inputs.weight.grad is None
    assert gradient.any() and torch.equal(inputs.weight.main_grad.to(gradient.dtype), gradient)
