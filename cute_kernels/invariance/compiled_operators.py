"""Operators of compiled graphs in the place of torch's that add up: opaque to Inductor, functional, for every device.

``cute_kernels::aten_<name>_<overload>`` has the schema of ``aten::<name>.<overload>``. On a GPU it runs the function
that replaces that operator in ``batch_invariant``; on a CPU, where nothing is replaced, torch's own kernel. So compiled
code computes what eager code does. It allocates what it returns, which is never an argument's memory: no pass has to
prove where a buffer may be written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from cute_kernels.invariance import aten, fused_attention, scopes
from cute_kernels.invariance.errors import UncoveredOperatorError, signatures
from cute_kernels.runtime.operators import functional_operator

# On a CPU scaled_dot_product_attention runs these, which have no counterpart on a GPU
FOR_CPU = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")


def opaque_operators() -> dict[OpOverload, OpOverload]:
    """Ours by torch's, for each that this torch has and whose module is imported; made at the first call."""
    for op, function in _replaced():
        if op not in _opaque:
            _opaque[op] = _register(op, function)
    return _opaque


_opaque: dict[OpOverload, OpOverload] = {}


def _replaced() -> Iterator[tuple[OpOverload, Callable[..., Any] | None]]:
    """The operators that return new tensors, and the functions that replace them."""
    for whole, function in (aten.REPLACEMENTS | fused_attention.OTHERS | dict.fromkeys(FOR_CPU)).items():
        namespace, _, rest = whole.rpartition("::")
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace or "aten"), name, None)
        op = None if packet is None else getattr(packet, overload or "default", None)
        if op is not None and not op._schema.is_mutable:
            yield op, function


def _register(op: OpOverload, function: Callable[..., Any] | None) -> OpOverload:
    arguments, _, returns = str(op._schema).partition("(")[2].rpartition(") -> ")
    heads_first = op._schema.name.startswith("aten::_scaled_dot_product")

    def run(*args: Any, **kwargs: Any) -> Any:
        with scopes.inside():
            result = NotImplemented if function is None else function(*args, **kwargs)
        if result is NotImplemented:
            raise UncoveredOperatorError(
                f"batch_invariant: {op} of {', '.join(signatures((*args, *kwargs.values())))} is not covered in "
                "compiled code"
            )
        return _apart(_laid_out(result, heads_first))

    def torchs(*args: Any, **kwargs: Any) -> Any:
        return _laid_out(op(*args, **kwargs), heads_first)

    namespace, name = op._schema.name.split("::")
    overload = f"_{op._overloadname}" if op._overloadname not in ("", "default") else ""
    register = functional_operator(f"{namespace}_{name}{overload}", arguments, returns, fake=torchs, cpu=torchs)
    return register(run).registered


def _apart(result: Any) -> Any:
    """Each result begins a memory of its own, unlike mean and rstd of a norm: Inductor counts on 16 bytes."""
    if not isinstance(result, (tuple, list)):
        return result
    seen, found = set(), []
    for t in result:
        memory = t.untyped_storage().data_ptr() if isinstance(t, Tensor) and t.numel() else 0
        if memory and (memory in seen or t.storage_offset()):
            t = t.clone()
        elif memory:
            seen.add(memory)
        found.append(t)
    return type(result)(found)


def _laid_out(result: Any, heads_first: bool) -> Any:
    """Tensors in the strides that the graph was told: contiguous, or (batch, heads, tokens, channels) by token.

    The fake and what computes ask this alone, so that they agree.
    """
    if isinstance(result, (tuple, list)):
        return type(result)(_laid_out(t, heads_first) for t in result)
    if not isinstance(result, Tensor):
        return result
    if heads_first and result.dim() == 4:
        return result.transpose(1, 2).contiguous().transpose(1, 2)
    return result.contiguous()
