"""The operators that Inductor may fuse: those whose code has the bits of torch's kernels. The others run as kernels.

Inductor's code and torch's kernels round otherwise in places: a kernel's compiler makes one operation of a product and
a sum, functions of libdevice have other bits where it does not, backwards in bf16 round each step. So an operator is
fused if it is on a list here, which a GPU test proves; what is not known to be equal is a call of torch's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor import lowering
from torch._ops import OpOverload
from torch.fx import Graph
from torch.utils._pytree import tree_leaves

from cute_kernels.invariance.operators import MOVED, base_of, is_copied_view, is_view, overloads_of
from cute_kernels.runtime.checks import FLOATS

# Each rounds once, or not at all
FUSED = frozenset([
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "clone", "div", "eq", "ge", "gt", "isinf",
    "isnan", "le", "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "mul", "ne", "sqrt",
    "sub", "where",
])  # fmt: skip
PRIMS = frozenset(["broadcast_in_dim", "convert_element_type", "device_put", "iota", "view_of"])
CODED = ("aten", "prims")  # Inductor writes code for operators of these; others are calls


def may_fuse(op: OpOverload) -> bool:
    """Whether Inductor's code for an operator has the bits of torch's kernel, of arguments that ``fuses`` takes."""
    if op.namespace not in CODED:
        return True
    name = op._schema.name.rpartition("::")[2]
    if op.namespace == "prims":
        return name in PRIMS
    base = base_of(name)
    return base in MOVED or base in FUSED or is_view(op) or is_copied_view(base)


def fuses(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> bool:
    """Whether Inductor's code has the bits of torch's kernel for these fake arguments and results."""
    found = [t for t in tree_leaves((args, kwargs, results)) if isinstance(t, Tensor)]
    if op.namespace not in CODED or not any(t.is_floating_point() or t.is_complex() for t in found):
        return True
    if not may_fuse(op):
        return False
    name = base_of(op._schema.name.rpartition("::")[2])
    if name == "arange" and any(t.is_floating_point() for t in found):
        return False
    if name not in FUSED:
        return True
    if any((t.is_floating_point() or t.is_complex()) and t.dtype not in FLOATS for t in found):
        return False
    if len({t.device for t in found}) > 1:  # a number in a tensor on a CPU
        return False
    if kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None:
        return False
    return name != "div" or isinstance(args[1], Tensor)  # torch multiplies by a number's reciprocal


def calls_for_the_rest(graph: Graph) -> None:
    """Mark what Inductor is not to fuse, and where it rounds: at each operator of bf16 and fp16, casts among them."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        node.meta["low_precision_pointwise_barrier"] = True
        if not fuses(node.target, args, kwargs, node.meta.get("val")):
            if node.target not in lowering.lowerings:
                lowering.make_fallback(node.target, warn=False, override_decomp=True)
            node.meta["should_fallback"] = True


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Entries for the table that takes operators apart, by parts that may be fused. The others stay whole."""
    return {op: entry for name, entry in ENTRIES.items() for op in overloads_of(name) if not op._schema.is_mutable}


def _neg(x: Tensor) -> Any:
    """Triton subtracts from 0, which has another sign for a zero."""
    return x * -1 if x.is_floating_point() else NotImplemented


def _square(x: Tensor, exponent: Any = 2) -> Any:
    return x * x if not isinstance(exponent, Tensor) and exponent == 2 else NotImplemented


ENTRIES: dict[str, Callable[..., Any]] = {"neg": _neg, "square": _square, "pow": _square}
