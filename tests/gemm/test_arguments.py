"""Bad input to mm, bmm and linear: the error's type, and a message with op, argument, expected and got.

Twice: as CPU tensors meet it, and as CUDA tensors do, with plain torch in place of the kernels.
"""

import contextlib
import importlib
import inspect
import re
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad

from cute_kernels import UnsupportedDeviceError, bmm, linear, mm, nn, provenance
from cute_kernels.gemm import reference
from cute_kernels.runtime import launches, operators
from tests.fakes import fake_kernels
from tests.fakes.entry import Wrapped
from tests.gemm.cases import BF16, FP16, FP32, randn, seeded_generator

L, M, N, K = 3, 4, 32, 64


@pytest.fixture(params=["reference", "kernels"], autouse=True)
def path(request):
    if request.param == "reference":
        yield
    else:
        with fake_kernels():
            yield


def op(name):
    """The module of a public function, which hides it in its package."""
    return importlib.import_module(f"cute_kernels.gemm.op.{name}")


def zeros(*shape, dtype=BF16, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def good(op) -> dict:
    if op is mm:
        return {"a": zeros(M, K), "b": zeros(K, N)}
    if op is bmm:
        return {"a": zeros(L, M, K), "b": zeros(L, K, N)}
    return {"x": zeros(M, K), "weight": zeros(N, K), "bias": zeros(N)}


SQUARE = zeros(K, K)
A_LINE = zeros(2**31 - 1, 1, device="meta")
MM_ERRORS = [
    (TypeError, {"a": None}, "a must be a torch.Tensor, got NoneType"),
    (TypeError, {"b": [[1.0]]}, "b must be a torch.Tensor, got list"),
    (TypeError, {"a": zeros(M, K).to_sparse()}, "a must have layout torch.strided, got torch.sparse_coo"),
    (TypeError, {"b": zeros(K, N).to_sparse()}, "b must have layout torch.strided, got torch.sparse_coo"),
    (TypeError, {"out": zeros(M, N).to_sparse()}, "out must have layout torch.strided, got torch.sparse_coo"),
    (TypeError, {"a": zeros(M, K, dtype=FP32)}, "a must have dtype bfloat16, float16, got torch.float32"),
    (TypeError, {"b": zeros(K, N, dtype=FP32)}, "b must have dtype bfloat16, float16, got torch.float32"),
    (TypeError, {"a": zeros(M, K, dtype=torch.int8)}, "a must have dtype bfloat16, float16, got torch.int8"),
    (TypeError, {"b": zeros(K, N, dtype=FP16)}, "b must have dtype torch.bfloat16, got torch.float16"),
    (ValueError, {"b": zeros(K + 1, N)}, "b must have 64 rows, as a has columns, got shape (65, 32)"),
    (ValueError, {"b": zeros(N, K)}, "b must have 64 rows, as a has columns, got shape (32, 64)"),
    (ValueError, {"a": zeros(K)}, "a must be a matrix, got shape (64,)"),
    (ValueError, {"a": zeros(2, M, K)}, "a must be a matrix, got shape (2, 4, 64)"),
    (ValueError, {"b": zeros(())}, "b must be a matrix, got shape ()"),
    (ValueError, {"b": zeros(2, K, N)}, "b must be a matrix, got shape (2, 64, 32)"),
    (ValueError, {"b": zeros(K, N, device="meta")}, "b must be on cpu, got meta"),
    (
        TypeError,
        {"out_dtype": torch.float64},
        "out_dtype must have dtype bfloat16, float16, float32, got torch.float64",
    ),
    (TypeError, {"out_dtype": "bfloat16"}, "out_dtype must be a torch.dtype such as torch.bfloat16, got 'bfloat16'"),
    (TypeError, {"out": 0.0}, "out must be a torch.Tensor, got float"),
    (
        TypeError,
        {"out": zeros(M, N, dtype=torch.int64)},
        "out must have dtype bfloat16, float16, float32, got torch.int64",
    ),
    (TypeError, {"out": zeros(M, N), "out_dtype": FP32}, "out must have dtype torch.float32, got torch.bfloat16"),
    (ValueError, {"out": zeros(M, N + 1)}, "out must have shape (4, 32), got (4, 33)"),
    (ValueError, {"out": zeros(N)}, "out must have shape (4, 32), got (32,)"),
    (ValueError, {"out": zeros(M, N, device="meta")}, "out must be on cpu, got meta"),
    (ValueError, {"out": zeros(N, M).t()}, "out must have a contiguous last dimension, got strides (1, 4)"),
    (ValueError, {"out": zeros(M, 2 * N)[:, ::2]}, "out must have a contiguous last dimension, got strides (64, 2)"),
    (ValueError, {"out": zeros(1, N).expand(M, N)}, "out must have rows that do not overlap, got strides (0, 1)"),
    (
        ValueError,
        {"a": zeros(M, K).requires_grad_(), "out": zeros(M, N)},
        "out must be None where a gradient is wanted, got a tensor",
    ),
    (
        ValueError,
        {"out": zeros(M, N).requires_grad_()},
        "out must be None where a gradient is wanted, got a tensor",
    ),
    (ValueError, {"a": A_LINE}, "a must have dimensions of at most 2147483136, got (2147483647, 1)"),
]
BMM_ERRORS = [
    (TypeError, {"a": None}, "a must be a torch.Tensor, got NoneType"),
    (TypeError, {"b": [[1.0]]}, "b must be a torch.Tensor, got list"),
    (TypeError, {"a": zeros(L, M, K).to_sparse()}, "a must have layout torch.strided, got torch.sparse_coo"),
    (TypeError, {"a": zeros(L, M, K, dtype=FP32)}, "a must have dtype bfloat16, float16, got torch.float32"),
    (TypeError, {"b": zeros(L, K, N, dtype=FP16)}, "b must have dtype torch.bfloat16, got torch.float16"),
    (ValueError, {"a": zeros(M, K)}, "a must be a batch of matrices, got shape (4, 64)"),
    (ValueError, {"b": zeros(K, N)}, "b must be a batch of matrices, got shape (64, 32)"),
    (ValueError, {"b": zeros(1, K, N)}, "b must have 3 matrices, as a has, got shape (1, 64, 32)"),
    (ValueError, {"b": zeros(L, N, K)}, "b must have 64 rows, as a has columns, got shape (3, 32, 64)"),
    (ValueError, {"b": zeros(L, K, N, device="meta")}, "b must be on cpu, got meta"),
    (
        TypeError,
        {"out_dtype": torch.float64},
        "out_dtype must have dtype bfloat16, float16, float32, got torch.float64",
    ),
    (
        ValueError,
        {"a": zeros(1, 1, 0).expand(2**16, 2**15, 0), "b": zeros(1, 0, 1).expand(2**16, 0, 1)},
        "a must have at most 2147483136 rows, got 2147483648 in shape (65536, 32768, 0)",
    ),
    (
        ValueError,
        {"a": zeros(1, 1, 0).expand(2**16, 1, 0), "b": zeros(1, 0, 1).expand(2**16, 0, 2**15)},
        "b must have at most 2147483136 columns, got 2147483648 in shape (65536, 0, 32768)",
    ),
    (ValueError, {"backend": "torch"}, "backend must be None or 'reference', got 'torch'"),
]
LINEAR_ERRORS = [
    (TypeError, {"x": 1.0}, "x must be a torch.Tensor, got float"),
    (TypeError, {"weight": None}, "weight must be a torch.Tensor, got NoneType"),
    (TypeError, {"bias": [0.0] * N}, "bias must be a torch.Tensor, got list"),
    (TypeError, {"x": zeros(M, K).to_sparse()}, "x must have layout torch.strided, got torch.sparse_coo"),
    (TypeError, {"x": zeros(2, M, K).to_sparse()}, "x must have layout torch.strided, got torch.sparse_coo"),
    (TypeError, {"weight": zeros(N, K).to_sparse()}, "weight must have layout torch.strided, got torch.sparse_coo"),
    (TypeError, {"bias": zeros(N).to_sparse()}, "bias must have layout torch.strided, got torch.sparse_coo"),
    (TypeError, {"x": zeros(M, K, dtype=FP32)}, "x must have dtype bfloat16, float16, got torch.float32"),
    (TypeError, {"weight": zeros(N, K, dtype=FP32)}, "weight must have dtype bfloat16, float16, got torch.float32"),
    (TypeError, {"weight": zeros(N, K, dtype=FP16)}, "weight must have dtype torch.bfloat16, got torch.float16"),
    (
        TypeError,
        {"bias": zeros(N, dtype=torch.float64)},
        "bias must have dtype bfloat16, float16, float32, got torch.float64",
    ),
    (ValueError, {"x": zeros(())}, "x must have at least one dimension, got shape ()"),
    (ValueError, {"weight": zeros(N, K + 1)}, "weight must have 64 columns, as x has, got shape (32, 65)"),
    (ValueError, {"weight": zeros(K, N)}, "weight must have 64 columns, as x has, got shape (64, 32)"),
    (ValueError, {"weight": zeros(K)}, "weight must be a matrix (N, K), got shape (64,)"),
    (ValueError, {"weight": zeros(2, N, K)}, "weight must be a matrix (N, K), got shape (2, 32, 64)"),
    (ValueError, {"weight": zeros(N, K, device="meta")}, "weight must be on cpu, got meta"),
    (ValueError, {"bias": zeros(N + 1)}, "bias must have shape (32,), got (33,)"),
    (ValueError, {"bias": zeros(1)}, "bias must have shape (32,), got (1,)"),
    (ValueError, {"bias": zeros(1, N)}, "bias must have shape (32,), got (1, 32)"),
    (ValueError, {"bias": zeros(N, device="meta")}, "bias must be on cpu, got meta"),
    (ValueError, {"bias": zeros(2 * N)[::2]}, "bias must be contiguous, got stride (2,)"),
    (ValueError, {"bias": zeros(1).expand(N)}, "bias must be contiguous, got stride (0,)"),
    (TypeError, {"out_dtype": torch.int32}, "out_dtype must have dtype bfloat16, float16, float32, got torch.int32"),
    (TypeError, {"out_dtype": 16}, "out_dtype must be a torch.dtype such as torch.bfloat16, got 16"),
    (ValueError, {"activation": "swish"}, "activation must be one of (None, 'relu', 'silu', 'gelu'), got 'swish'"),
    (ValueError, {"activation": True}, "activation must be one of (None, 'relu', 'silu', 'gelu'), got True"),
    (ValueError, {"backend": "triton"}, "backend must be None or 'reference', got 'triton'"),
]
COUNT_ERRORS = [
    (TypeError, {"num_valid_tokens": 3}, "num_valid_tokens must be a torch.Tensor, got int"),
    (
        TypeError,
        {"num_valid_tokens": torch.tensor([3])},
        "num_valid_tokens must have dtype int32, got torch.int64",
    ),
    (
        ValueError,
        {"num_valid_tokens": zeros(2, dtype=torch.int32)},
        "num_valid_tokens must have one element, got 2",
    ),
    (
        ValueError,
        {"num_valid_tokens": zeros(1, dtype=torch.int32, device="meta")},
        "num_valid_tokens must be on cpu, got meta",
    ),
]
ERRORS = [(mm, *row) for row in MM_ERRORS] + [(bmm, *row) for row in BMM_ERRORS]
ERRORS += [(linear, *row) for row in LINEAR_ERRORS + COUNT_ERRORS]


def shortened(text: str) -> str:
    return re.sub(r"[^\w]+", "-", text.split(", got")[0] + " not " + text.split(", got")[1])


@pytest.mark.parametrize("mode", ["", "no_grad", "training"])
@pytest.mark.parametrize(
    "op, error, change, message", ERRORS, ids=[f"{row[0].__name__}-{shortened(row[3])}" for row in ERRORS]
)
def test_bad_argument(op, error, change, message, mode):
    """In each mode, each time, and after a good call, whose plan must not let the bad one through."""
    arguments = good(op) | change
    if mode == "training":
        if "out" in change:
            pytest.skip("that there is one is the first error")
        first = next(iter(arguments.values()))
        if isinstance(first, torch.Tensor) and first.is_floating_point() and not first.is_meta:
            arguments[next(iter(arguments))] = first.detach().clone().requires_grad_()
    if mode == "no_grad" and "where a gradient is wanted" in message:
        pytest.skip("none is")
    with torch.set_grad_enabled(mode != "no_grad"):
        for _ in range(2):
            with pytest.raises(error) as caught:
                op(**arguments)
            assert str(caught.value) == f"{op.__name__}: {message}"
            op(**good(op))


@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_bad_main_grad(parameter):
    """It is looked at where it is needed: in the backward."""
    leaves = {"weight": zeros(N, K).requires_grad_(), "bias": zeros(N, dtype=FP32).requires_grad_()}
    shape = tuple(leaves[parameter].shape)
    expected = f"linear: {parameter}.main_grad must be contiguous float32 of shape {shape}, got "
    for wrong in (zeros(*shape), zeros(7, dtype=FP32), torch.zeros(*shape, 2)[..., 0]):
        leaves[parameter].main_grad = wrong
        y = linear(zeros(M, K), **leaves)
        with pytest.raises(ValueError) as caught:
            y.sum().backward()
        assert str(caught.value).startswith(expected)
    leaves[parameter].main_grad = 5
    y = linear(zeros(M, K), **leaves)
    with pytest.raises(TypeError, match=f"^linear: {parameter}.main_grad must be a torch.Tensor, got int$"):
        y.sum().backward()


def test_a_main_grad_that_is_negated_lazily():
    """A sum that is added to its memory would be taken away from it."""
    weight, memory = zeros(N, K).requires_grad_(), zeros(N, K, dtype=FP32)
    weight.main_grad = torch._neg_view(memory)
    y = linear(zeros(M, K), weight)
    with pytest.raises(ValueError, match="^linear: weight.main_grad must hold its values in memory, got a view "):
        y.sum().backward()


def test_fp64():
    """The kernels take none; the reference computes in it what the tests compare with."""
    a, b = zeros(M, K, dtype=torch.float64), zeros(K, N, dtype=torch.float64)
    if operators.on_gpu(a):
        with pytest.raises(TypeError, match=r"^mm: a must have dtype bfloat16, float16, got torch\.float64$"):
            mm(a, b)
        with pytest.raises(TypeError, match=r"^linear: x must have dtype bfloat16, float16, got torch\.float64$"):
            linear(a, b.t())
        return
    assert mm(a, b).dtype is torch.float64
    wanted = "mm: out_dtype must have dtype bfloat16, float16, float32, float64, got torch.int32"
    for error, call, message in (
        (TypeError, lambda: mm(a, b.long()), "mm: b must have dtype float64, got torch.int64"),
        (TypeError, lambda: mm(a, b, out_dtype=torch.int32), wanted),
        (ValueError, lambda: mm(a, b, out=zeros(7, M, N)), "mm: out must have shape (4, 32), got (7, 4, 32)"),
        (TypeError, lambda: linear(a, b.t().bfloat16()), "linear: weight must have dtype float64, got torch.bfloat16"),
        (
            ValueError,
            lambda: linear(a, b.t(), activation="tanh"),
            "linear: activation must be one of (None, 'relu', 'silu', 'gelu'), got 'tanh'",
        ),
    ):
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value) == message


def test_arguments_are_keywords():
    with pytest.raises(TypeError):
        mm(zeros(M, K), zeros(K, N), FP32)
    with pytest.raises(TypeError):
        linear(zeros(M, K), zeros(N, K), None, FP32)
    options = {"out_dtype", "activation", "num_valid_tokens"}
    for function in (linear, reference.linear):
        parameters = inspect.signature(function).parameters
        assert {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY} - {"backend"} == options
        assert all(parameters[name].default is None for name in ("bias", *options))


def test_dtypes_that_are_accepted():
    for dtype in (BF16, FP16):
        for out in (None, BF16, FP16, FP32):
            y = mm(zeros(M, K, dtype=dtype), zeros(K, N, dtype=dtype), out_dtype=out)
            assert y.dtype is (out or dtype) and y.shape == (M, N)
            for bias in (BF16, FP16, FP32):
                y = linear(zeros(2, 3, K, dtype=dtype), zeros(N, K, dtype=dtype), zeros(N, dtype=bias), out_dtype=out)
                assert y.dtype is (out or dtype) and y.shape == (2, 3, N)
    memory = zeros(M, N, dtype=FP16)
    assert mm(zeros(M, K), zeros(K, N), out=memory) is memory  # out's dtype is the result's where none is named


def test_no_silent_copy():
    """Leading dimensions of several strides would cost a copy of x. (The reference takes any.)"""
    x = zeros(3, 5, K).transpose(0, 1)
    if not operators.on_gpu(x):
        assert linear(x, zeros(N, K)).shape == (5, 3, N)
        return
    for leaf in (x, x.detach().requires_grad_()):
        with pytest.raises(ValueError) as caught:
            linear(leaf, zeros(N, K))
        assert str(caught.value) == (
            "linear: x must have leading dimensions that collapse to rows of one stride, "
            "got shape (5, 3, 64), strides (64, 320, 1)"
        )


def test_no_fallback(monkeypatch):
    """CUDA tensors meet the kernels or an error: neither the reference nor torch's products run."""
    if not operators.on_gpu(zeros(1)):
        pytest.skip("CPU tensors run the reference")

    def refuse(*args, **kwargs):
        raise AssertionError("a fallback ran")

    def unsupported(index):
        raise UnsupportedDeviceError("cute_kernels: cuda:0 has compute capability 8.0")

    for name in ("mm", "bmm", "linear"):
        monkeypatch.setattr(reference, name, refuse)
    odd = zeros(M, 3 * K)[:, ::3], zeros(3 * K, N)[::3]
    for a, b in ((zeros(M, K), zeros(K, N)), odd):
        mm(a.requires_grad_(), b).sum().backward()
        linear(a, b.t(), activation="silu").sum().backward()
        bmm(a[None], b[None]).sum().backward()
    launches.forget()
    monkeypatch.setattr(launches, "target_of", unsupported)
    for call in (lambda: mm(zeros(M + 1, K), zeros(K, N)), lambda: linear(zeros(M + 1, K), zeros(N, K))):
        with pytest.raises(UnsupportedDeviceError, match=r"compute capability 8\.0"):
            call()


def test_out_may_not_lie_on_an_operand():
    """On a GPU some of it would be written while the rest is still read. Other columns of one matrix are no overlap."""
    square, both = zeros(K, K), zeros(K, 2 * K + 16)
    for out, a, b, name in (
        (square, square, zeros(K, K), "a"),
        (square, zeros(K, K), square, "b"),
        (square, zeros(K, K), square.t(), "b"),
        (square.as_strided((1, K), (0, 1)), zeros(1, K), square, "b"),
        (both[1:, :K], both[:-1, :K], zeros(K, K), "a"),
        (both[:, :K], both[:, 8 : K + 8], zeros(K, K), "a"),
    ):
        with torch.no_grad(), refusal(operators.on_gpu(square)) as caught:
            mm(a, b, out=out)
        if operators.on_gpu(square):
            assert str(caught.value).startswith(f"mm: out must not share memory with {name}, got address 0x")
    mm(both[:, :K], zeros(K, K), out=both[:, K : 2 * K])


@contextlib.contextmanager
def refusal(raises: bool):
    """The kernels alone: the reference reads all before it writes."""
    if raises:
        with pytest.raises(ValueError) as caught:
            yield caught
    else:
        yield None


def test_out_that_does_not_hold_its_values():
    """Also where there is a plan for the same strides."""
    memory = zeros(M, 1, dtype=torch.complex64)
    mm(zeros(M, K), zeros(K, 1), out=memory.imag)
    with pytest.raises(ValueError) as caught:
        mm(zeros(M, K), zeros(K, 1), out=memory.conj().imag)
    assert str(caught.value) == "mm: out must hold its values in memory, got a view that is negated lazily"


@pytest.mark.parametrize("name", ["a", "b", "out"])
def test_a_tangent_is_not_lost_in_out(name):
    arguments = good(mm) | {"out": zeros(M, N)}
    with forward_ad.dual_level():
        mm(**arguments)
        arguments[name] = forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        with pytest.raises(ValueError) as caught:
            mm(**arguments)
    assert str(caught.value) == "mm: out must be None where a tangent is wanted, got a tensor"


def test_autograd_knows_that_out_was_written():
    t = zeros(M, N, dtype=FP32).requires_grad_()
    kept = t * 1
    y = kept.square()
    # A fake kernel would tell autograd by itself
    with mock.patch.object(op("mm").gemm, "function", lambda *arguments: None):
        mm(zeros(M, K), zeros(K, N), out=kept.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_rows_are_counted_together():
    """32 bits count them, whatever the leading dimensions."""
    x = zeros(1, 1, 8).expand(2**16, 2**15, 8)
    with pytest.raises(ValueError) as caught:
        linear(x, zeros(N, 8))
    assert str(caught.value) == (
        "linear: x must have at most 2147483136 rows, got 2147483648 in shape (65536, 32768, 8)"
    )


def test_an_infinite_gradient_of_relu():
    """Where it is flat the gradient is 0, whatever comes in."""
    x, weight = torch.full((M, K), -1.0, dtype=BF16, requires_grad=True), torch.ones(N, K, dtype=BF16)
    linear(x, weight, activation="relu").backward(torch.full((M, N), float("inf"), dtype=BF16))
    assert not x.grad.any()


def test_main_grad_is_left_where_it_is_not_asked_for():
    generator = seeded_generator("asked for", "cpu")
    x = randn(M, K, generator=generator).to(BF16).requires_grad_()
    weight = randn(N, K, generator=generator).to(BF16).requires_grad_()
    bias = zeros(N, dtype=FP32).requires_grad_()
    weight.main_grad, bias.main_grad = zeros(N, K, dtype=FP32), zeros(N, dtype=FP32)
    y = linear(x, weight, bias)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert not weight.main_grad.any() and not bias.main_grad.any()
    y.sum().backward(inputs=[weight])
    assert weight.main_grad.any() and not bias.main_grad.any()


def test_no_copy_of_a_gradient_by_columns():
    if not operators.on_gpu(zeros(1)):
        pytest.skip("the reference makes copies in fp32")
    x, weight = zeros(64, K).requires_grad_(), zeros(64, K).requires_grad_()
    dy = zeros(64, 64).t()
    seen = []
    y = linear(x, weight)
    with mock.patch.object(op("linear").gemm, "function", lambda a, *rest: seen.append(a.data_ptr())):
        y.backward(dy)
    assert seen == [dy.data_ptr()] * 2


def test_a_tensor_subclass_goes_to_the_dispatcher():
    """Beside plain tensors, too: its memory may not be given to a kernel."""
    if not operators.on_gpu(zeros(1)):
        pytest.skip("the reference is torch's own operators")
    good_x, good_weight = zeros(M, K), zeros(N, K)
    linear(good_x, good_weight), mm(good_x, good_weight.t())
    for call in (
        lambda: linear(good_x, Wrapped(good_weight)),
        lambda: linear(good_x, good_weight, Wrapped(zeros(N))),
        lambda: mm(good_x, Wrapped(zeros(K, N))),
        lambda: mm(good_x, zeros(K, N), out=Wrapped(zeros(M, N))),
    ):
        with torch.no_grad(), pytest.raises(AssertionError, match="dispatched"):
            call()


@pytest.mark.parametrize("op", [mm, bmm, linear], ids=["mm", "bmm", "linear"])
def test_bad_argument_beside_no_rows(op):
    """No kernel is asked then, which might refuse it."""
    shape = (L, 0, K) if op is bmm else (0, K)
    arguments = good(op) | {"x" if op is linear else "a": zeros(*shape)}
    for _ in range(2):
        assert op(**arguments).shape == (*shape[:-1], N)
        name = "weight" if op is linear else "b"
        with pytest.raises(
            TypeError, match=f"^{op.__name__}: {name} must have dtype torch.bfloat16, got torch.float16"
        ):
            op(**arguments | {name: arguments[name].to(FP16)})


def test_a_nested_tensor():
    if not operators.on_gpu(zeros(1)):
        pytest.skip("the reference is torch's own operators")
    arguments = good(linear)
    linear(**arguments)
    for name, t in arguments.items():
        with pytest.raises(RuntimeError, match="[Nn]ested"):
            linear(**arguments | {name: torch._nested_tensor_from_tensor_list([t, t])})


def test_provenance_names_what_computed():
    """Each product once, to every call that is open."""
    a, b = zeros(M, K), zeros(K, N)
    if not operators.on_gpu(a):
        assert provenance(mm, a, b) == ()
        return
    with pytest.raises(TypeError, match="^provenance: function must be callable, got Tensor$"):
        provenance(a)
    inner = []
    entries = provenance(lambda: inner.extend(provenance(mm, a, b)))
    assert list(entries) == inner and len(entries) == 1
    (entry,) = entries
    assert entry.contract == "serial_k16" and entry.shape == (M, N, K) and entry.arch == "sm_90a"
    assert entry.kernel.startswith("gemm (tile") and entry.versions["torch"] == torch.__version__
    (entry,) = provenance(mm, zeros(M, 3 * K)[:, ::3], b)
    assert entry.kernel == "gemm (any stride)" and entry.contract == "serial_k16"
    assert provenance(mm, a, b) == tuple(inner)  # of a call that is known, too
    with fake_kernels("sm_100a"):
        entries = provenance(mm, a, b) + provenance(mm, zeros(M, 3 * K)[:, ::3], b)
    assert [entry.contract for entry in entries] == ["serial_k16, unproven"] * 2


def test_reference_backend():
    generator = seeded_generator("reference backend", "cpu")
    x, weight = randn(M, K, generator=generator).to(BF16), randn(N, K, generator=generator).to(BF16)
    found = linear(x, weight, activation="gelu", backend="reference")
    assert torch.equal(found, reference.linear(x, weight, activation="gelu"))
    assert torch.equal(mm(x, weight.t(), backend="reference"), reference.mm(x, weight.t()))
    with pytest.raises(ValueError, match="^mm: backend must be None or 'reference', got 'torch'$"):
        mm(x, weight.t(), backend="torch")


# nn.Linear


def test_module_is_torch_s():
    """Positional arguments, parameters, names in a state_dict, initial range, repr."""
    ours, theirs = (list(inspect.signature(m.__init__).parameters.values()) for m in (nn.Linear, torch.nn.Linear))
    assert [(p.name, p.default) for p in ours][: len(theirs)] == [(p.name, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])
    for bias in (True, False):
        module, other = nn.Linear(K, N, bias=bias, dtype=BF16), torch.nn.Linear(K, N, bias=bias, dtype=BF16)
        shapes = [{name: value.shape for name, value in m.state_dict().items()} for m in (module, other)]
        assert shapes[0] == shapes[1]
        module.load_state_dict(other.state_dict())
        other.load_state_dict(module.state_dict())
        assert all(parameter.dtype is BF16 for parameter in module.parameters())
        assert torch.equal(module.weight, other.weight)
        assert all(0.1 < p.abs().max() <= K**-0.5 for p in nn.Linear(K, N, bias=bias).parameters())
        assert repr(module).startswith(repr(other)[:-1])
    assert nn.Linear(K, N, device="meta").weight.is_meta and nn.Linear(0, N).weight.shape == (N, 0)


def test_module_calls_linear():
    generator = seeded_generator("module", "cpu")
    module = nn.Linear(K, N, dtype=BF16)
    x = randn(2, 3, K, generator=generator).to(BF16)
    assert torch.equal(module(x), linear(x, module.weight, module.bias))
    module.weight.main_grad = torch.zeros(N, K)
    module.bias.main_grad = torch.zeros(N)
    module(x).sum().backward()
    assert module.weight.grad is module.bias.grad is None
    assert module.weight.main_grad.any() and (module.bias.main_grad == 6).all()


@pytest.mark.parametrize(
    "sizes, error, message",
    [
        ((8.0, 4), TypeError, "in_features must be an int, got 8.0 of type float"),
        ((8, True), TypeError, "out_features must be an int, got True of type bool"),
        ((8, -1), ValueError, "out_features must be at least 0, got -1"),
    ],
)
def test_sizes_of_the_module(sizes, error, message):
    with pytest.raises(error, match=f"^Linear: {message}$"):
        nn.Linear(*sizes)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"activation": "tanh"}, ValueError, r"activation must be one of \(None, 'relu', 'silu', 'gelu'\), got 'tanh'"),
        ({"out_dtype": "bf16"}, TypeError, "out_dtype must be a torch.dtype such as torch.bfloat16, got 'bf16'"),
        (
            {"out_dtype": torch.float64},
            TypeError,
            "out_dtype must have dtype bfloat16, float16, float32, got torch.float64",
        ),
        ({"backend": "cublas"}, ValueError, "backend must be None or 'reference', got 'cublas'"),
    ],
)
def test_a_wrong_choice_fails_when_the_module_is_made(options, error, message):
    with pytest.raises(error, match=f"^Linear: {message}$"):
        nn.Linear(8, 4, **options)
    nn.Linear(8, 4, dtype=torch.float64, out_dtype=torch.float64)


def test_the_module_blames_x(path):
    module = nn.Linear(K, N, dtype=BF16)
    for shape in ((M, K + 8), (2, M, 1)):
        expected = f"^Linear: x must have {K} columns, as in_features says, got shape {re.escape(str(shape))}$"
        with pytest.raises(ValueError, match=expected):
            module(zeros(*shape))
    with pytest.raises(ValueError, match="^linear: num_valid_tokens must be on cpu"):
        module(zeros(M, K), torch.zeros(1, dtype=torch.int32, device="meta"))
    with pytest.raises(TypeError, match="^linear: x must be a torch.Tensor, got list"):
        module([1.0])
