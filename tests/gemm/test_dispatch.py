"""The kernels' path of mm and linear on the CPU: launches, layouts, allocation, autograd and the torch bridge.

``serial_k16`` in plain torch takes the place of the compiled kernels; all above them is what runs on a GPU. The tests
are the GPU's own, where their sizes allow it.
"""

import sys
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from cute_kernels import linear, mm
from cute_kernels.gemm.config import GemmSpec, candidates
from cute_kernels.gemm.launch import GemmCall, gemm
from cute_kernels.runtime.launches import observed
from tests.fakes import fake_kernels, recorded_launches
from tests.gemm.cases import (
    BF16,
    FP16,
    FP32,
    Case,
    assert_same_bits,
    kernels,
    make_inputs,
    only_kernel,
    randn,
    run,
)
from tests.gemm.test_kernel_autograd import *  # noqa: F403
from tests.gemm.test_kernel_invariance import (  # noqa: F401
    test_controls,
    test_layouts_change_no_bit_of_the_sums,
    test_tokens_beyond_the_valid_ones,
    test_valid_tokens_change_neither_y_nor_dx,
)
from tests.gemm.test_kernel_numerics import (  # noqa: F401
    test_dimensions_of_x,
    test_empty,
    test_inputs_are_left_alone,
    test_linear,
    test_mm,
    test_out,
    test_special_values,
    test_strided_views,
)
from tests.gemm.test_kernel_torch import (  # noqa: F401
    test_autocast_changes_nothing,
    test_compile,
    test_compile_into_an_operand,
    test_compile_into_out,
    test_compile_without_gradients,
    test_fake_tensors,
    test_opcheck,
    test_the_schemas_name_what_is_written,
)


@pytest.fixture(autouse=True)
def jobs():
    with fake_kernels() as jobs:
        yield jobs


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_candidate_is_chosen(arch):
    """No kernel that no call gets, none that a call gets and the invariance tests do not know."""
    assert {config for config, _ in kernels(arch)} == set(candidates(arch))


def test_another_number_of_tokens_compiles_nothing(generator):
    """Once each kernel has been chosen, no number of tokens asks for another. Results are not computed."""

    def step(m):
        case = Case(m, 264, 200, bias=FP32, activation="gelu")
        run(linear, case, make_inputs(case, generator))

    with fake_kernels(computes=False) as jobs:
        for power in range(14):
            for m in (2**power, 3 * 2**power):  # in whole blocks of K (of dweight, dbias) or not
                step(m)
                step(m + 8)
        known = set(jobs)
        assert len(known) > 10
        for m in (6, 11, 31, 50, 90, 127, 200, 255, 300, 1001, 4000, 8191, 12000):
            step(m)
        assert set(jobs) == known


def test_one_graph_for_every_number_of_tokens(generator):
    """After the first, which torch traces with its own sizes."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear, fullgraph=True, backend=counter)
    for m in (3, 5, 9, 17):
        case = Case(m, 96, 64, bias=FP32, activation="gelu")
        inputs = make_inputs(case, generator)
        found, wanted = run(compiled, case, inputs), run(linear, case, inputs)
        for name, result in wanted.items():
            assert_same_bits(found[name], result, name)
    assert counter.frame_count <= 2


def test_a_compiled_backward_adds_to_every_main_grad(generator):
    """Which gradients it is asked for is not known in a graph: eager mode leaves those of others alone."""
    torch._dynamo.reset()
    inputs = make_inputs(Case(65, 96, 64), generator)
    inputs.weight.main_grad = torch.zeros(96, 64)
    for function, is_added_to in (
        (linear, False),
        (torch.compile(linear, fullgraph=True, backend="aot_eager"), True),
    ):
        torch.autograd.grad(function(inputs.x, inputs.weight), inputs.x, inputs.dy)
        assert inputs.weight.main_grad.any() == is_added_to and inputs.weight.grad is None


def test_the_operator_refuses_memory_of_an_operand():
    """A compiler may have given it to out, which ``mm`` has checked before: inductor does."""
    square, other = torch.zeros(2, 64, 64, dtype=torch.bfloat16).unbind()
    for a, b, name in ((square, other, "a"), (other, square, "b")):
        with pytest.raises(ValueError, match=rf"^mm: out must not share memory with {name}, got address 0x"):
            gemm.registered(a, b.t(), square)


def test_a_tangent_is_refused_and_not_lost():
    x = torch.zeros(8, 16, dtype=torch.bfloat16)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for call in (lambda: mm(dual, x.t()), lambda: linear(x, dual)):
            with pytest.raises(NotImplementedError, match="jvp"):
                call()


@pytest.mark.parametrize("operand", ["x", "weight"])
def test_a_sign_that_is_not_in_memory(operand, generator):
    """A conjugate's imaginary part; also where the launch is that of the same call without it."""
    pairs = randn(24, 40, 2, generator=generator).to(FP16)
    given = {"x": randn(65, 40, generator=generator).to(FP16), "weight": randn(24, 40, generator=generator).to(FP16)}
    for parts, is_negated in ((pairs, False), (pairs.view(torch.complex32).conj(), True)):
        part = parts[..., 1] if not is_negated else parts[..., 0].imag
        assert part.is_neg() == is_negated and part.stride() == (80, 2)
        leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
        leaves[operand] = part.detach().requires_grad_()
        plain = {name: t.detach().resolve_neg().contiguous().requires_grad_() for name, t in leaves.items()}
        results = []
        for x, weight in (leaves.values(), plain.values()):
            y, product = linear(x, weight), mm(x, weight.t())
            results.append([y, product, *torch.autograd.grad([y, product], [x, weight], [y.detach()] * 2)])
        for found, wanted in zip(*results, strict=True):
            assert_same_bits(found, wanted)


def test_a_sign_that_is_not_in_memory_of_one_column_or_element(generator):
    """Their strides alone look like those of numbers one after the other."""
    parts = (randn(n, 2, generator=generator).to(FP16).view(torch.complex32).conj().imag for n in (65, 40, 1))
    a, b, one = (part[:, 0].unsqueeze(1) for part in parts)
    x = randn(65, 40, generator=generator).to(FP16)
    for left, right in ((x, b), (a, b.t()), (x[:1, :1], one)):
        assert right.is_neg() and 1 in right.stride()
        assert_same_bits(mm(left, right), mm(left.resolve_neg(), right.resolve_neg()))
    row = one.reshape(1, 1, 1)
    assert row.is_neg() and row.is_contiguous()
    assert_same_bits(linear(row, one), linear(row.resolve_neg(), one.resolve_neg()))
    bias, weight = one.reshape(1), randn(1, 40, generator=generator).to(FP16)
    assert bias.is_neg() and bias.is_contiguous()
    assert_same_bits(linear(x, weight, bias), linear(x, weight, bias.resolve_neg()))


@pytest.mark.parametrize("grad", [False, True])
def test_what_a_call_has_in_common_with_none_before(grad, generator, jobs):
    """The same call compiles nothing, and has the same bits; one that differs has its own kernel."""
    x, weight = (randn(*shape, generator=generator).to(FP16).requires_grad_(grad) for shape in ((6, 64), (48, 64)))
    bias = randn(48, generator=generator)
    for function, arguments, options, is_another in (
        (mm, (x, weight.t()), {}, True),
        (mm, (x, weight.t()), {"out_dtype": FP32}, True),
        (mm, (x, weight.t().contiguous()), {}, True),
        (linear, (x, weight), {}, False),
        (linear, (x, weight, bias), {}, True),
        (linear, (x, weight, bias), {"activation": "gelu"}, True),
        (linear, (x, weight, bias), {"activation": "relu"}, True),
        (linear, (x, weight, bias.to(FP16)), {}, True),
        (linear, (x.view(2, 3, 64), weight), {}, False),
        (linear, (x[0], weight), {}, False),
    ):
        before = set(jobs)
        wanted = function(*arguments, **options)
        assert (set(jobs) > before) == is_another
        count = len(jobs)
        found = function(*arguments, **options)
        assert len(jobs) == count and found.requires_grad == wanted.requires_grad == grad
        assert found.data_ptr() != wanted.data_ptr() and found.stride() == wanted.stride()
        assert_same_bits(found.detach(), wanted.detach())


def test_any_candidate_computes(generator):
    """Aligned operands and others, which go to the kernel for any stride."""
    a, b = randn(24, 64, generator=generator).to(FP16), randn(40, 64, generator=generator).to(FP16).t()
    wanted = mm(a, b)
    for config, transposed in kernels():
        with only_kernel(config, transposed), observed() as products:
            assert_same_bits(mm(a, b), wanted)
            mm(a[:, 1:], b[1:])
        assert [launch[2:4] for launch, _, _ in products] == [(transposed, config), (False, None)]


OPS = [sys.modules[function.__module__] for function in (mm, linear)]


def num_entries() -> int:
    return sum(len(guarded) for op in OPS for guarded in op.CALLS.guarded.values())


def uncached():
    """Within it no call gets an entry."""
    return mock.patch.object(GemmCall, "of", lambda *arguments: None)


def calls_of(generator, requires_grad, m=6, n=48, k=64):
    """(function, arguments, options), each with another entry."""
    x, weight = (randn(*shape, generator=generator).to(BF16) for shape in ((m, k), (n, k)))
    bias = randn(n, generator=generator)
    by_columns = x.t().contiguous().t()
    calls = [
        (mm, (x, weight.t()), {}),
        (mm, (x, weight.t()), {"out_dtype": FP32}),
        (mm, (x, weight.t().contiguous()), {}),
        (mm, (x.to(FP16), weight.t().to(FP16)), {}),
        (linear, (x, weight), {}),
        (linear, (x, weight, bias), {}),
        (linear, (x, weight, bias.to(BF16)), {}),
        (linear, (x, weight), {"out_dtype": FP32}),
        (linear, (x, weight), {"activation": "relu"}),
        (linear, (x, weight, bias), {"activation": "gelu"}),
        (linear, (x, weight.t().contiguous().t()), {}),
        (linear, (x.view(2, -1, k), weight, bias), {"activation": "silu"}),
        (linear, (x[0], weight), {}),
        (linear, (x.repeat(1, 2)[:, :k], weight), {}),
    ]
    if m % 8 == 0:  # else TMA does not read the columns
        calls += [(mm, (by_columns, weight.t()), {}), (linear, (by_columns, weight), {})]
    return [
        (function, tuple(t.detach().requires_grad_(requires_grad) for t in tensors), options)
        for function, tensors, options in calls
    ]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("autograd", [False, True], ids=["no_grad", "autograd"])
@pytest.mark.parametrize("sizes", [(6, 48, 64), (8, 48, 64), (304, 1024, 128), (2000, 20, 72), (2, 1, 8)], ids=str)
def test_a_cached_call_launches_what_another_launches(sizes, autograd, arch, generator):
    """At the first call and at another one; it is observed, too."""
    for function, tensors, options in calls_of(generator, autograd, *sizes):
        outputs = []
        with recorded_launches(arch, num_sms=7) as seen, observed() as told:
            with uncached():
                outputs.append(function(*tensors, **options))
            assert not num_entries()
            outputs += [function(*tensors, **options) for _ in range(2)]
            assert num_entries() == (told[0][0].config is not None)
        assert len({(t.shape, t.stride(), t.dtype, t.requires_grad) for t in outputs}) == 1
        assert outputs[0].requires_grad == autograd
        names = [(launch.name, *rest) for launch, *rest in told]
        assert len(seen) == 3 and seen[0] == seen[1] == seen[2]
        assert len(names) == 3 and names[0] == names[1] == names[2]


@pytest.mark.parametrize("autograd", [False, True], ids=["no_grad", "autograd"])
def test_cached_calls(autograd, generator):
    """Each that differs has an entry of its own; results and gradients, and nothing is checked again."""
    calls, wanted = calls_of(generator, autograd), []

    def results(function, tensors, options):
        y = function(*tensors, **options)
        return [y.detach(), *(torch.autograd.grad(y, tensors, torch.ones_like(y)) if autograd else ())]

    for call in calls:
        with uncached():
            wanted.append(results(*call))
    for count, call in enumerate(calls):
        assert num_entries() == count
        results(*call)
    function, tensors, _ = calls[0]
    with torch.no_grad():
        function(*tensors)
    assert num_entries() == len(calls) + 1
    refuse = mock.Mock(side_effect=AssertionError)
    with mock.patch.object(OPS[0], "check_mm", refuse), mock.patch.object(OPS[1], "check_linear", refuse):
        for call, each in zip(calls, wanted, strict=True):
            for found, other in zip(results(*call), each, strict=True):
                assert_same_bits(found, other)
        with mock.patch("cute_kernels.gemm.launch.GemmSpec", refuse), torch.no_grad():
            assert not function(*tensors).requires_grad


def test_calls_without_an_entry(generator):
    """Strides that TMA does not read, one tensor given twice, no rows, an output or tokens given, the reference."""
    x, weight = (randn(*shape, generator=generator).to(BF16) for shape in ((64, 64), (64, 64)))
    for _ in range(2):
        mm(x[:, :60].contiguous(), weight[:60])
        mm(x, x)
        mm(x[:0], weight)
        mm(x, weight, out=torch.empty_like(x))
        mm(x, weight, backend="reference")
        linear(x, weight, num_valid_tokens=torch.ones(1, dtype=torch.int32))
    assert not num_entries()
    with mock.patch("cute_kernels.gemm.launch.GemmSpec", wraps=GemmSpec) as made:
        mm(x[:, :60].contiguous(), weight[:60])
    assert made.call_count == 1  # it is seen to have no entry before a Spec is made for one


@pytest.mark.parametrize(
    "options", [{"out_dtype": ["float32"]}, {"activation": ["relu"]}, {"backend": "cuda"}], ids=str
)
def test_a_bad_option_after_a_good_call(options, generator):
    x, weight = (randn(*shape, generator=generator).to(BF16) for shape in ((6, 64), (48, 64)))
    linear(x, weight)
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        linear(x, weight, **options)


def test_a_main_grad_after_a_cached_call(generator):
    """It is looked for at every call."""
    x, weight = (randn(*shape, generator=generator).to(BF16).requires_grad_() for shape in ((6, 64), (48, 64)))
    linear(x, weight).sum().backward()
    gradient, weight.grad = weight.grad, None
    weight.main_grad = torch.zeros(48, 64)
    linear(x, weight).sum().backward()
    assert num_entries() == 1 and weight.grad is None
    assert gradient.any() and torch.equal(weight.main_grad.to(BF16), gradient)
