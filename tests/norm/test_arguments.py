"""Bad input to layer_norm and rms_norm: the error's type, and a message with op, argument, expected and got.

Twice: as CPU tensors meet it, and as CUDA tensors do, with plain torch in place of the kernels.
"""

import importlib
import re

import pytest
import torch

import cute_kernels
from cute_kernels import layer_norm, nn, rms_norm
from cute_kernels.norm.launch import norm_forward
from cute_kernels.runtime import targets
from tests.fakes import fake_kernels
from tests.fakes.entry import Wrapped
from tests.norm.cases import BF16, EPS, FP16, FP32, KINDS, OPS, public_norm

ROWS, N = 4, 48


@pytest.fixture(params=["reference", "kernels"])
def norm(request):
    if request.param == "reference":
        yield public_norm
    else:
        with fake_kernels():
            yield public_norm


def good() -> dict:
    return {"x": torch.ones(ROWS, N, dtype=BF16), "weight": torch.ones(N), "bias": torch.ones(N), "eps": EPS}


def zeros(*shape, dtype=BF16, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "residual"])
def test_a_tensor_subclass_goes_to_the_dispatcher(name, monkeypatch):
    """Beside plain tensors, too: its memory may not be given to a kernel."""
    arguments = good() | {"residual": zeros(ROWS, N)}
    with fake_kernels(), torch.no_grad():
        public_norm("layer", **arguments)
        monkeypatch.setattr(norm_forward, "function", lambda *_: pytest.fail("memory was given to a kernel"))
        with pytest.raises(AssertionError, match="dispatched"):
            public_norm("layer", **arguments | {name: Wrapped(arguments[name])})


VALUE_ERRORS = [
    ({"x": zeros(())}, "x must have at least one dimension, got shape ()"),
    ({"x": zeros(ROWS, 0)}, "x must have between 1 and 262144 columns, got 0"),
    ({"x": zeros(1, 262145), "weight": None, "bias": None}, "x must have between 1 and 262144 columns, got 262145"),
    (
        {"x": zeros(1, 1).expand(2**31, 1), "weight": None, "bias": None},
        "x must have at most 2130706432 rows, got 2147483648",
    ),
    ({"x": zeros(N, ROWS).t()}, "x must have a contiguous last dimension, got stride 4"),
    ({"x": zeros(ROWS, 2 * N)[:, ::2]}, "x must have a contiguous last dimension, got stride 2"),
    ({"weight": zeros(N + 1, dtype=FP32)}, "weight must have shape (48,), as x has 48 columns, got (49,)"),
    ({"weight": zeros(1, N, dtype=FP32)}, "weight must have shape (48,), as x has 48 columns, got (1, 48)"),
    ({"weight": zeros(N, device="meta", dtype=FP32)}, "weight must be on cpu, got meta"),
    ({"weight": zeros(2 * N, dtype=FP32)[::2]}, "weight must be contiguous, got stride (2,)"),
    ({"bias": zeros(1, dtype=FP32)}, "bias must have shape (48,), as x has 48 columns, got (1,)"),
    ({"bias": zeros(N, device="meta", dtype=FP32)}, "bias must be on cpu, got meta"),
    ({"bias": zeros(1, dtype=FP32).expand(N)}, "bias must be contiguous, got stride (0,)"),
    ({"residual": zeros(ROWS + 1, N)}, "residual must have shape (4, 48), got (5, 48)"),
    ({"residual": zeros(N)}, "residual must have shape (4, 48), got (48,)"),
    ({"residual": zeros(ROWS, N, device="meta")}, "residual must be on cpu, got meta"),
    ({"residual": zeros(N, ROWS).t()}, "residual must have a contiguous last dimension, got stride 4"),
    ({"eps": 0.0}, "eps must be a float, positive and finite in fp32, got 0.0 of type float"),
    ({"eps": -1e-6}, "eps must be a float, positive and finite in fp32, got -1e-06 of type float"),
    ({"eps": float("nan")}, "eps must be a float, positive and finite in fp32, got nan of type float"),
    ({"eps": 0}, "eps must be a float, positive and finite in fp32, got 0.0 of type float"),
    ({"eps": 10**400}, f"eps must be a float, positive and finite in fp32, got {10**400} of type int"),
    ({"eps": torch.tensor(1.0)}, "eps must be a float, positive and finite in fp32, got tensor(1.) of type Tensor"),
    ({"eps": None}, "eps must be a float, positive and finite in fp32, got None of type NoneType"),
    ({"eps": True}, "eps must be a float, positive and finite in fp32, got True of type bool"),
    ({"eps": float("inf")}, "eps must be a float, positive and finite in fp32, got inf of type float"),
    ({"eps": 7e-46}, "eps must be a float, positive and finite in fp32, got 7e-46 of type float"),
    ({"eps": 3.5e38}, "eps must be a float, positive and finite in fp32, got 3.5e+38 of type float"),
    ({"weight_offset": -3.5e38}, "weight_offset must be a float, finite in fp32, got -3.5e+38 of type float"),
    ({"eps": [1e-5]}, "eps must be a float, positive and finite in fp32, got [1e-05] of type list"),
    ({"weight_offset": "0"}, "weight_offset must be a float, finite in fp32, got '0' of type str"),
    ({"weight_offset": [0.0]}, "weight_offset must be a float, finite in fp32, got [0.0] of type list"),
    ({"save": ["input"]}, "save must be 'input' or 'output', got ['input']"),
    ({"weight_offset": None}, "weight_offset must be a float, finite in fp32, got None of type NoneType"),
    ({"weight_offset": True}, "weight_offset must be a float, finite in fp32, got True of type bool"),
    ({"weight_offset": float("nan")}, "weight_offset must be a float, finite in fp32, got nan of type float"),
    ({"save": "outputs"}, "save must be 'input' or 'output', got 'outputs'"),
    ({"save": None}, "save must be 'input' or 'output', got None"),
    (
        {"save": "output", "residual": zeros(ROWS, N)},
        "save must be 'input' when there is a residual, got 'output'",
    ),
]
TYPE_ERRORS = [
    ({"x": zeros(ROWS, N, dtype=torch.float64)}, "x must have dtype bfloat16, float16, float32, got torch.float64"),
    ({"x": zeros(ROWS, N, dtype=torch.int64)}, "x must have dtype bfloat16, float16, float32, got torch.int64"),
    ({"x": [1.0], "return_residual": zeros(2)}, "x must be a torch.Tensor, got list"),
    ({"out_dtype": [BF16]}, "out_dtype must be a torch.dtype such as torch.bfloat16, got [torch.bfloat16]"),
    ({"weight": [1.0] * N}, "weight must be a torch.Tensor, got list"),
    ({"weight": zeros(N, dtype=torch.float64)}, "weight must have dtype bfloat16, float16, float32, got torch.float64"),
    ({"bias": 0.0}, "bias must be a torch.Tensor, got float"),
    ({"bias": zeros(N, dtype=torch.int8)}, "bias must have dtype bfloat16, float16, float32, got torch.int8"),
    ({"residual": 1.0}, "residual must be a torch.Tensor, got float"),
    ({"residual": zeros(ROWS, N, dtype=FP16)}, "residual must have dtype bfloat16, float32, got torch.float16"),
    (
        {"x": zeros(ROWS, N, dtype=FP32), "residual": zeros(ROWS, N)},
        "residual must have dtype float32, got torch.bfloat16",
    ),
    ({"out_dtype": torch.int64}, "out_dtype must have dtype bfloat16, float16, float32, got torch.int64"),
    ({"out_dtype": "bfloat16"}, "out_dtype must be a torch.dtype such as torch.bfloat16, got 'bfloat16'"),
]


def shortened(text: str) -> str:
    return re.sub(r"[^\w]+", "-", text.split(", got")[0] + " not " + text.split(", got")[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "error, change, message",
    [(ValueError, *row) for row in VALUE_ERRORS] + [(TypeError, *row) for row in TYPE_ERRORS],
    ids=[shortened(message) for _, message in VALUE_ERRORS + TYPE_ERRORS],
)
def test_bad_argument(norm, kind, error, change, message):
    arguments = good() | change
    with pytest.raises(error) as caught:
        norm(kind, **arguments)
    assert str(caught.value) == f"{kind}_norm: {message}"
    # The same after a good call
    norm(kind, **good())
    with pytest.raises(error) as again:
        norm(kind, **arguments)
    assert str(again.value) == str(caught.value)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_bad_argument_beside_no_rows(norm, name):
    """No kernel is asked then, which might refuse it."""
    arguments = good() | {"x": zeros(0, N)}
    for kind in KINDS:
        norm(kind, **arguments)
        with pytest.raises(ValueError, match=rf"_norm: {name} must have shape \(48,\), as x has 48 columns, got"):
            norm(kind, **arguments | {name: zeros(47, dtype=torch.float32)})


@pytest.mark.parametrize("name", ["eps", "weight_offset"])
def test_a_bool_that_equals_the_number_of_a_good_call(norm, name):
    arguments = good() | {name: 1.0}
    norm("rms", **arguments)
    with pytest.raises(ValueError, match=f"^rms_norm: {name} must be a .* got True of type bool$"):
        norm("rms", **arguments | {name: True})


def test_a_nested_tensor():
    """Its shape is none: the error is torch's."""
    arguments = good() | {"residual": zeros(ROWS, N)}
    with fake_kernels():
        public_norm("layer", **arguments)
        for name in ("x", "weight", "bias", "residual"):
            nested = torch._nested_tensor_from_tensor_list([arguments[name]] * 2)
            with pytest.raises(RuntimeError, match="[Nn]ested"):
                public_norm("layer", **arguments | {name: nested})


@pytest.mark.parametrize("x", [None, 1.0, [[1.0]]], ids=["None", "float", "list"])
def test_x_is_not_a_tensor(x):
    for kind, op in OPS.items():
        with pytest.raises(TypeError, match=rf"^{kind}_norm: x must be a torch\.Tensor, got {type(x).__name__}$"):
            op(x)


def test_unknown_backend():
    for kind, op in OPS.items():
        with pytest.raises(ValueError, match=f"^{kind}_norm: backend must be None or 'reference', got 'triton'$"):
            op(torch.ones(2, 8), backend="triton")


def test_options_are_keywords():
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(TypeError):
        rms_norm(x, weight, weight)
    with pytest.raises(TypeError):
        layer_norm(x, weight, weight, x)


def test_leading_dimensions_that_do_not_collapse():
    """No silent copy. (The reference takes any strides.)"""
    x = torch.ones(3, 5, N, dtype=BF16).transpose(0, 1)
    with fake_kernels():
        for kind in KINDS:
            with pytest.raises(ValueError) as caught:
                public_norm(kind, x)
            assert str(caught.value) == (
                f"{kind}_norm: x must have leading dimensions that collapse to rows of one stride, "
                "got shape (5, 3, 48), strides (48, 240, 1)"
            )
            with pytest.raises(ValueError, match="residual must have leading dimensions that collapse"):
                public_norm(kind, x.contiguous(), residual=x)


def test_unsupported_gpu(monkeypatch):
    """Said with the way out; never the reference in silence."""

    targets.arch_of_gpu.cache_clear()
    try:
        for capability, arch in {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}.items():
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, found=capability: found)
            assert targets.arch_of(0) == arch
            targets.arch_of_gpu.cache_clear()
        for capability in ((8, 0), (8, 9), (12, 0)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, found=capability: found)
            with pytest.raises(cute_kernels.UnsupportedDeviceError, match=r"backend='reference'"):
                targets.arch_of(0)
    finally:
        targets.arch_of_gpu.cache_clear()


@pytest.mark.parametrize("module", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("shape", [(2, 3), (), 0, -1], ids=str)
def test_normalized_shape(module, shape):
    with pytest.raises(ValueError, match=f"^{module.__name__}: normalized_shape must be one positive size, got"):
        module(shape)


def test_dtypes_that_are_accepted(norm):
    for x in (BF16, FP16, FP32):
        for weight in (BF16, FP16, FP32):
            for residual in {x, FP32}:
                y, h = norm(
                    "layer",
                    zeros(ROWS, N, dtype=x),
                    zeros(N, dtype=weight),
                    zeros(N, dtype=FP16),
                    residual=zeros(ROWS, N, dtype=residual),
                    return_residual=True,
                )
                assert y.dtype is x and h.dtype is residual


@pytest.mark.parametrize("family", ["norm", "gemm", "mhc", "mxfp8"])
def test_prewarm_of_an_architecture_without_kernels(family):
    specializations = importlib.import_module(f"cute_kernels.{family}.prewarm").specializations
    for arch in ("sm_90a", "sm_100a", "sm_103a"):
        assert next(specializations(arch))[1][0] == arch
    for arch in ("sm_80", "sm_90", "sm_120a"):
        with pytest.raises(ValueError, match=f"^prewarm: arch must be 'sm_90a' or of sm_10x, .* got '{arch}'$"):
            next(specializations(arch))
