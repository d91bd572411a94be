"""Bad input to the quantizers: the error's type, and a message with op, argument, expected and got.

Twice: as CPU tensors meet it, and as CUDA tensors do, with fake kernels.
"""

import re

import numpy as np
import pytest
import torch

import cute_kernels
from cute_kernels import dequantize, from_blocked, quantize_3d_colwise, quantize_3d_dual, quantize_rowwise, to_blocked
from cute_kernels.mxfp8 import launch
from tests.fakes import fake_kernels
from tests.mxfp8.cases import BF16, FP32, SCALE, VARIANTS, Case

MODES = "('rceil', 'floor', 'ceil', 'even')"


@pytest.fixture(params=["reference", "kernels"], autouse=True)
def path(request):
    if request.param == "reference":
        yield request.param
    else:
        with fake_kernels():
            yield request.param


def zeros(*shape, dtype=BF16, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def message_of(error, function, *arguments, **options) -> str:
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_quantizers(variant):
    case = Case(variant, (3, 64, 96) if variant.startswith("3d") else (64, 96))
    function, x, options = getattr(cute_kernels, case.name), zeros(*case.shape), case.options
    name = "w" if variant.startswith("3d") else "x"

    def message(error, x=x, **changes):
        found = message_of(error, function, x, **(options | changes))
        function(zeros(*case.shape), **options)  # a good call must not let the bad one through
        assert message_of(error, function, x, **(options | changes)) == found
        assert found.startswith(f"{case.name}: ")
        return found.removeprefix(f"{case.name}: ")

    assert message(ValueError, mode="RCEIL") == f"mode must be one of {MODES}, got 'RCEIL'"
    assert message(ValueError, mode=None) == f"mode must be one of {MODES}, got None"
    assert message(ValueError, mode=[]) == f"mode must be one of {MODES}, got []"
    wanted = "scale_layout must be one of ('plain', 'blocked'), got 'swizzled'"
    assert message(ValueError, scale_layout="swizzled") == wanted
    wanted = "dtype must have dtype float8_e4m3fn, float8_e5m2, got torch.float16"
    assert message(TypeError, dtype=torch.float16) == wanted
    assert message(TypeError, x=None) == f"{name} must be a torch.Tensor, got NoneType"
    wanted = f"{name} must have dtype bfloat16, float16, float32, got torch.float64"
    assert message(TypeError, x=x.double()) == wanted
    assert message(TypeError, x=x.to_sparse()) == f"{name} must have layout torch.strided, got torch.sparse_coo"
    assert message(TypeError, x=x.int()).startswith(f"{name} must have dtype")
    assert message(ValueError, backend="triton") == "backend must be None or 'reference', got 'triton'"
    dimensions = "3 dimensions (E, N, K)" if name == "w" else "2 dimensions (M, K)"
    assert message(ValueError, x=zeros(64)) == f"{name} must have {dimensions}, got shape (64,)"
    wrong = (*case.shape[:-1], 48)
    wanted = f"{name} must have last dimensions that are multiples of 32, got shape {wrong}"
    assert message(ValueError, x=zeros(*wrong)) == wanted
    wrong = (*case.shape[:-2], 33, 96)
    assert message(ValueError, x=zeros(*wrong)).endswith(f"got shape {wrong}")
    strided = zeros(*case.shape[:-1], 192)[..., ::2]
    wanted = f"{name} must have a contiguous last dimension or last but one, got strides {strided.stride()}"
    assert message(ValueError, x=strided) == wanted
    assert message(ValueError, x=zeros(*case.shape[:-2], 1, 96).expand(case.shape)).startswith(
        f"{name} must have a con"
    )


def test_options_of_the_experts():
    w = zeros(2, 64, 64)
    arrays = np.array([32, 32]), np.array([32, 1, 1]), torch.tensor([32, 32])
    for block in ((1, 32), (16, 1), 32, None, [32, 1], *arrays):
        quantize_3d_colwise(w)
        found = message_of(ValueError, quantize_3d_colwise, w, block=block)
        assert found == f"quantize_3d_colwise: block must be (32, 1) or (32, 32), got {block!r}"
    quantize_3d_dual(w, square=True)
    found = message_of(TypeError, quantize_3d_dual, w, square=1)
    assert found == "quantize_3d_dual: square must be a bool, got 1"


def test_alignment(path):
    """No silent copy. (The reference takes any address and any stride of rows.)"""
    if path == "reference":
        return
    memory = zeros(64 * 104 + 8)
    quantize_rowwise(memory.as_strided((64, 96), (104, 1), 8))
    off = memory.as_strided((64, 96), (104, 1), 1)
    found = message_of(ValueError, quantize_rowwise, off)
    assert found.startswith(
        "quantize_rowwise: x must start on 16 bytes and have strides of positive multiples of 8 elements, got"
    )
    odd = memory.as_strided((64, 96), (100, 1), 0)
    assert "multiples of 8 elements, got strides (100, 1)" in message_of(ValueError, quantize_rowwise, odd)
    q, scale = quantize_rowwise(memory[: 64 * 96].view(64, 96))
    odd = torch.empty(64 * 96 + 1, dtype=q.dtype)[1:].view(64, 96)
    found = message_of(ValueError, dequantize, odd, scale)
    assert found.startswith(
        "dequantize: q must start on 16 bytes and have strides of positive multiples of 16 elements"
    )
    experts = zeros(64 * 64).as_strided((2, 32, 32), (1, 64, 1))
    assert "multiples of 8 elements, got strides (1, 64, 1)" in message_of(ValueError, quantize_3d_colwise, experts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_alignment_in_a_graph(variant, path):
    """The error of a compiled call of CUDA tensors names function and argument as an eager call's does."""
    if path == "reference":
        return
    case = Case(variant, (2, 32, 64) if variant.startswith("3d") else (64, 64))
    off = zeros(4096 + 1)[1:].view(case.shape)
    wanted = message_of(ValueError, getattr(cute_kernels, case.name), off, **case.options)
    assert wanted.startswith(f"{case.name}: {'w' if len(case.shape) == 3 else 'x'} must start on 16 bytes and ")
    flags = "col" not in variant, variant != "rowwise", "square" in variant
    assert (
        message_of(ValueError, launch.quantize.function, off, torch.float8_e4m3fn, *flags, "rceil", "plain") == wanted
    )


def test_a_dimension_too_large():
    found = message_of(ValueError, quantize_rowwise, zeros(1, 1).expand(2**31, 32))
    assert found.startswith("quantize_rowwise: x must have last dimensions of at most 2147483520, got shape")


def test_dequantize():
    q, s = quantize_rowwise(zeros(64, 96))
    pairs = [(q, s), cute_kernels.quantize_colwise(zeros(64, 96)), quantize_3d_colwise(zeros(2, 64, 96))]

    def message(error, q=q, scale=s, **options):
        found = message_of(error, dequantize, q, scale, **options)
        for good in pairs:
            dequantize(*good)
        assert message_of(error, dequantize, q, scale, **options) == found
        assert found.startswith("dequantize: ")
        return found.removeprefix("dequantize: ")

    assert message(TypeError, q=None) == "q must be a torch.Tensor, got NoneType"
    for argument, t in (("q", q), ("scale", s)):
        values = torch.empty(0, dtype=t.dtype)
        sparse = torch.sparse_coo_tensor(torch.empty(2, 0), values, t.shape, check_invariants=True)
        wanted = f"{argument} must have layout torch.strided, got torch.sparse_coo"
        assert message(TypeError, **{argument: sparse}) == wanted
    assert message(TypeError, scale=1.0) == "scale must be a torch.Tensor, got float"
    assert message(TypeError, q=zeros(64, 96)).startswith("q must have dtype float8_e4m3fn, float8_e5m2, got")
    wanted = "scale must have dtype float8_e8m0fnu, got torch.uint8"
    assert message(TypeError, scale=s.view(torch.uint8)) == wanted
    wanted = "dtype must have dtype bfloat16, float16, float32, got torch.float64"
    assert message(TypeError, dtype=torch.float64) == wanted
    assert message(TypeError, dtype=[BF16]).startswith("dtype must be a torch.dtype such as torch.bfloat16, got [")
    wanted = "scale must have one of the shapes (512,), (64, 3), got (64, 2)"
    assert message(ValueError, scale=s[:, :2].contiguous()) == wanted
    assert message(ValueError, scale=s[::2]).startswith("scale must be contiguous, got strides")
    assert message(ValueError, scale=s.to("meta")) == "scale must be on cpu, got meta"
    assert message(ValueError, q=q[:, :64]).startswith("q must be row-major or column-major without gaps, got strides")
    assert message(ValueError, q=q[0]) == "q must be (M, K) or (E, N, K), got shape (96,)"
    column_major, scales = cute_kernels.quantize_colwise(zeros(64, 96))
    assert message(ValueError, q=column_major).endswith("(512,), (96, 2), got (64, 3)")
    dequantize(column_major, scales)
    w, w_scales = quantize_3d_colwise(zeros(2, 64, 96))
    assert message(ValueError, q=w).endswith("(2, 512), (2, 2, 3), (2, 2, 96), got (64, 3)")
    dequantize(w, w_scales)


def test_blocked():
    assert message_of(TypeError, to_blocked, 1) == "to_blocked: scale must be a torch.Tensor, got int"
    found = message_of(TypeError, to_blocked, zeros(4, 4))
    assert found == "to_blocked: scale must have dtype float8_e8m0fnu, uint8, got torch.bfloat16"
    found = message_of(ValueError, to_blocked, zeros(4, dtype=torch.uint8))
    assert found == "to_blocked: scale must be (R, C) or (E, R, C), got shape (4,)"
    blocked = to_blocked(zeros(130, 3, dtype=torch.uint8).view(SCALE))
    assert message_of(ValueError, from_blocked, blocked, 130, 5) == (
        "from_blocked: blocked must have shape (2048,) or (E, 2048), got (1024,)"
    )
    assert "rows must be a size, got -1" in message_of(ValueError, from_blocked, blocked, -1, 4)
    assert "rows must be a size, got True" in message_of(ValueError, from_blocked, blocked, True, 4)
    assert "columns must be a size, got 4.0" in message_of(ValueError, from_blocked, blocked, 130, 4.0)


def test_options_are_keywords():
    for function in (quantize_rowwise, cute_kernels.quantize_dual):
        with pytest.raises(TypeError):
            function(zeros(32, 32), "rceil")
    with pytest.raises(TypeError):
        dequantize(*quantize_rowwise(zeros(32, 32)), FP32)


def test_every_function_is_exported_and_says_what_it_does():
    for name in cute_kernels.mxfp8.__all__:
        function = getattr(cute_kernels, name)
        assert name in cute_kernels.__all__ and function is getattr(cute_kernels.mxfp8, name)
        for word in ("Returns:", "rror", "ource") if re.match("quantize", name) else ():
            assert word in function.__doc__, (name, word)
