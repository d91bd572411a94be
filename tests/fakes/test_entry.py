"""A compiled kernel's entry refuses, before it launches anything, a tensor that is not what the kernel was built for.

The norms leave their vectors to it at each call (norm/launch.py), products the second operand (gemm/launch.py), and
tests/fakes/entry.py stands in for it. No GPU is needed for a tensor that says it is on one, as DLPack describes it.
"""

import ctypes
import inspect

import pytest
import tvm_ffi

from tests.gemm import cases as gemm_cases
from tests.norm import cases as norm_cases
from tests.norm.cases import BF16

N, ROWS = 64, 8
CPU, CUDA = 1, 2
FLOAT32, BFLOAT16 = (2, 32), (4, 16)
ADDRESS = 0x7F0000000000


class Managed(ctypes.Structure):
    """DLManagedTensor of DLPack 0.8, on its own memory of sizes; nobody frees what it points to."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_kept: list[Managed] = []


def tensor(shape, strides, dtype=BFLOAT16, device=(CUDA, 0), address=ADDRESS) -> tvm_ffi.Tensor:
    sizes = [(ctypes.c_int64 * len(shape))(*values) for values in (shape, strides)]
    managed = Managed(address, *device, len(shape), *dtype, 1, *sizes, 0, None, None)
    _kept.append(managed)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

    class Exporter:
        def __dlpack_device__(self):
            return device

        def __dlpack__(self, **_):
            return new(ctypes.addressof(managed), b"dltensor", None)

    return tvm_ffi.from_dlpack(Exporter())


VECTORS = {
    "short": (tensor((N - 1,), (1,)), r"shape\[0\]"),
    "a matrix": (tensor((1, N), (N, 1)), "ndim=1"),
    "strided": (tensor((N,), (2,)), r"strides\[0\]"),
    "expanded": (tensor((N,), (0,)), r"strides\[0\]"),
    "on the CPU": (tensor((N,), (1,), device=(CPU, 0)), "device_type=cuda"),
    "on another GPU": (tensor((N,), (1,), device=(CUDA, 1)), "device index"),
    "of another dtype": (tensor((N,), (1,), FLOAT32), "dtype=bfloat16"),
    "off 16 bytes": (tensor((N,), (1,), address=ADDRESS + 2), "alignment=16"),
    "missing": (None, "expected Tensor"),
}


@pytest.fixture(scope="module")
def norm():
    ((builder, arguments), *_) = norm_cases.kernels_of([norm_cases.Case("layer", N, bias=BF16)], "sm_90a")
    assert builder.__name__ == "norm_forward"
    return builder(*arguments)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("how", VECTORS)
def test_a_norm_refuses(norm, name, how):
    vector, reason = VECTORS[how]
    good = tensor((N,), (1,))
    vectors = {"weight": good, "bias": good} | {name: vector}
    matrix, statistics = tensor((ROWS, N), (N, 1)), tensor((2, ROWS), (ROWS, 1), FLOAT32)
    with pytest.raises((TypeError, ValueError), match=reason):
        norm(matrix, None, vectors["weight"], vectors["bias"], matrix, None, statistics, 1e-5, 1)


WEIGHTS, K = 512, 8
OPERANDS = {
    "of another K": (tensor((WEIGHTS, 2 * K), (2 * K, 1)), "shape"),
    "a vector": (tensor((K,), (1,)), "ndim=2"),
    "by columns": (tensor((WEIGHTS, K), (1, WEIGHTS)), r"strides\["),
    "off 16 bytes in rows": (tensor((WEIGHTS, K), (K + 1, 1)), "divisible"),
    "on the CPU": (tensor((WEIGHTS, K), (K, 1), device=(CPU, 0)), "device_type=cuda"),
    "on another GPU": (tensor((WEIGHTS, K), (K, 1), device=(CUDA, 1)), "device index"),
    "of another dtype": (tensor((WEIGHTS, K), (K, 1), FLOAT32), "dtype=bfloat16"),
    "off 16 bytes": (tensor((WEIGHTS, K), (K, 1), address=ADDRESS + 2), "alignment=16"),
    "missing": (None, "expected Tensor"),
}


@pytest.fixture(scope="module", params=[1, 2048], ids=["transposed", "as_it_is"])
def product(request):
    """Tokens, and the entry of (x, weight, y)."""
    m = request.param
    ((builder, arguments), *_) = gemm_cases.kernels_of([gemm_cases.Case(m, WEIGHTS, K)], "sm_90a")
    transposed = arguments[list(inspect.signature(builder.build).parameters).index("transposed")]
    entry = builder(*arguments)
    assert transposed == (m == 1)
    return m, lambda x, weight, y: entry(*((weight, x) if transposed else (x, weight)), y, None, None, None, 1)


@pytest.mark.parametrize("how", OPERANDS)
def test_a_product_refuses(product, how):
    (m, entry), (weight, reason) = product, OPERANDS[how]
    with pytest.raises((TypeError, ValueError), match=reason):
        entry(tensor((m, K), (K, 1)), weight, tensor((m, WEIGHTS), (WEIGHTS, 1)))
