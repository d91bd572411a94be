"""The operators that Inductor may fuse: those whose code has the bits of torch's kernels. The others run as kernels.

Inductor's code and torch's kernels round otherwise in places. A kernel's compiler makes one operation of a product and
a sum; functions of libdevice that lean on that (erf, atan, pow) have other bits where it is off; backwards of bf16
round each step; maxima and negations make zeros of another sign; sigmoid and reciprocals divide approximately. So an
operator is fused only if it is on a list here, or made of such, which a GPU test proves. All else is a call of torch's
kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import c_float
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor
from torch._inductor import lowering
from torch._ops import OpOverload
from torch.fx import Graph
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from cute_kernels.invariance.operators import MOVED, base_of, is_copied_view, is_view
from cute_kernels.runtime.checks import FLOATS

COMPARISONS = frozenset(["eq", "ge", "gt", "le", "lt", "ne"])
# Each rounds once, or not at all
FUSED = COMPARISONS | frozenset([
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "clone", "div", "floor",
    "isinf", "isnan", "logical_and", "logical_not", "logical_or", "logical_xor", "masked_fill", "mul", "round", "sign",
    "sqrt", "sub", "trunc", "where",
])  # fmt: skip
# The same functions of libdevice, with the same bits where products and sums stay apart
OF_LIBDEVICE = frozenset(["cos", "exp", "exp2", "expm1", "log", "log1p", "log2", "rsqrt", "sin", "tan", "tanh"])
PRIMS = frozenset(["broadcast_in_dim", "convert_element_type", "device_put", "iota", "view_of"])
CODED = ("aten", "prims")  # Inductor writes code for operators of these; others are calls


def may_fuse(op: OpOverload) -> bool:
    """Whether Inductor's code for an operator has the bits of torch's kernel, of some arguments."""
    if op.namespace not in CODED:
        return True
    name = op._schema.name.rpartition("::")[2]
    if op.namespace == "prims":
        return name in PRIMS
    base = base_of(name)
    if op._overloadname == "decimals":
        return False
    return base in MOVED or base in FUSED or base in OF_LIBDEVICE or is_view(op) or is_copied_view(base)


def fuses(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> bool:
    """Whether Inductor's code has the bits of torch's kernel for these fake arguments and results."""
    found = [t for t in tree_leaves((args, kwargs, results)) if isinstance(t, Tensor)]
    floats = [t for t in found if t.is_floating_point() or t.is_complex()]
    if op.namespace not in CODED or not floats:
        return True
    if op is torch.ops.aten.addcmul.default:  # of fp32 one operation, as an entry below asks for
        return kwargs.get("value", 1) == 1 and all(t.dtype is torch.float32 and t.is_cuda for t in found)
    if not may_fuse(op):
        return False
    name = base_of(op._schema.name.rpartition("::")[2])
    if name not in FUSED and name not in OF_LIBDEVICE:
        return name != "arange"  # of a step that is a float
    if any(t.dtype not in FLOATS for t in floats) or any(isinstance(a, (SymInt, SymFloat)) for a in args):
        return False
    if len({t.device for t in found}) > 1:  # a number in a tensor on a CPU, which torch does not round
        return name in ("where", "masked_fill")
    if name in OF_LIBDEVICE:
        return found[0].is_cuda
    if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None:
        return False  # one operation of a product and a sum, quotients that are rounded twice
    if name == "div":
        return isinstance(args[1], Tensor)  # torch multiplies by a number's reciprocal
    # torch rounds a number that is compared to the tensor's dtype
    return name not in COMPARISONS or isinstance(args[1], Tensor) or _is_of(args[0].dtype, args[1])


def _is_of(dtype: torch.dtype, number: Any) -> bool:
    """Whether bf16 or fp16 has this number; numbers of fp32 are rounded alike."""
    if dtype not in (torch.bfloat16, torch.float16) or number == 0:
        return True
    if math.isinf(number):
        return True
    bits = 8 if dtype is torch.bfloat16 else 11
    return 2.0**-14 <= abs(number) < 2.0**15 and (math.frexp(number)[0] * 2**bits).is_integer()


def calls_for_the_rest(graph: Graph) -> None:
    """Mark what Inductor is not to fuse, and that it rounds at each operator of bf16 and fp16, casts among them."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        node.meta["low_precision_pointwise_barrier"] = True
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        if not fuses(node.target, args, kwargs, node.meta.get("val")):
            if node.target not in lowering.lowerings:
                lowering.make_fallback(node.target, warn=False, override_decomp=True)
            node.meta["should_fallback"] = True


# Torch's kernels by operators that may be fused


def taken_apart(own: Callable[..., Any], entry: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """An entry of the table: by ``entry`` on a GPU, by ``own`` what that does not take."""
    result = entry(x, *args, **kwargs) if x.is_cuda and x.dtype in FLOATS else NotImplemented
    return own(x, *args, **kwargs) if result is NotImplemented else result


def entries() -> dict[OpOverload, Callable[..., Any]]:
    """The table that takes operators apart, by overload."""
    found = {}
    for name, entry in ENTRIES.items():
        packet, _, overload = name.partition(".")
        found[getattr(getattr(torch.ops.aten, packet), overload or "default")] = entry
    return found


def _inverse(x: Tensor) -> Tensor:
    return torch.ones_like(x) / x


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a b + c of fp32, rounded once."""
    return torch.addcmul(c, a, b)


def _divide(x: Tensor, y: Any) -> Any:
    if isinstance(y, Tensor) or not isinstance(y, (int, float)) or y == 0:
        return NotImplemented
    return x * c_float(1 / c_float(y).value).value


def _power(x: Tensor, exponent: Any) -> Any:
    powers = {2: lambda: x * x, 3: lambda: x * x * x, 0.5: x.sqrt, -0.5: x.rsqrt, -1: lambda: _inverse(x)}
    return powers[exponent]() if exponent in powers else NotImplemented


def _relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.where(x != x, x, torch.zeros_like(x)))  # a negative zero becomes a positive one


def _threshold_backward(dy: Tensor, x: Tensor, threshold: Any) -> Any:
    return torch.where(x <= 0, torch.zeros_like(dy), dy) if threshold == 0 else NotImplemented


def _less(y: Tensor, x: Any, alpha: Any = 1) -> Any:
    """x - y"""
    return y * -1 + x if alpha == 1 and isinstance(x, (int, float)) else NotImplemented


def _denominator(x: Tensor) -> Tensor:
    """1 + exp(-x) in fp32."""
    return torch.exp(x.float() * -1) + 1


def _sigmoid(x: Tensor) -> Tensor:
    return _inverse(_denominator(x)).to(x.dtype)


def _silu(x: Tensor) -> Tensor:
    return (x.float() / _denominator(x)).to(x.dtype)


def _silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    s, wide = _inverse(_denominator(x)), x.float()
    return (dy.float() * s * _fma(wide, _less(s, 1), torch.ones_like(wide))).to(x.dtype)


def _sigmoid_backward(dy: Tensor, y: Tensor) -> Tensor:
    return dy * _less(y, 1) * y


def _tanh_backward(dy: Tensor, y: Tensor) -> Tensor:
    if y.dtype is torch.float32:
        return dy * _fma(y * -1, y, torch.ones_like(y))
    return dy * _less(y * y, 1)


BETA, KAPPA = (c_float(number).value for number in (math.sqrt(2 / math.pi), 0.044715))


def _gelu(x: Tensor, *, approximate: str = "none") -> Any:
    if approximate != "tanh":
        return NotImplemented
    wide = x.float()
    inner = _fma(wide * wide * wide, torch.full_like(wide, KAPPA), wide) * BETA
    return (wide * 0.5 * (torch.tanh(inner) + 1)).to(x.dtype)


ENTRIES: dict[str, Callable[..., Any]] = {
    "neg": lambda x: x * -1,  # Triton subtracts from 0, which has another sign for a zero
    "reciprocal": _inverse,
    "div.Tensor": _divide,
    "square": lambda x: x * x,
    "pow.Tensor_Scalar": _power,
    "relu": _relu,
    "rsub.Scalar": _less,
    "sigmoid": _sigmoid,
    "sigmoid_backward": _sigmoid_backward,
    "silu": _silu,
    "silu_backward": _silu_backward,
    "tanh_backward": _tanh_backward,
    "threshold_backward": _threshold_backward,
    "gelu": _gelu,
}
