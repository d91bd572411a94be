"""Plans and launches of the quantizers: from a call's signature to a compiled kernel, then one dict lookup.

The registered operators ``cute_kernels::mxfp8_*`` return their outputs instead of mutating them: DTensor takes no
sharding rule (sharding.py) for an operator that writes into its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels.mxfp8 import reference
from cute_kernels.mxfp8.checks import (
    SCALE,
    blocked_size,
    check_aligned,
    check_dequantize,
    check_quantize,
    is_transposed,
)
from cute_kernels.mxfp8.config import BLOCK, DEQUANTIZE_TILE, TILE, DualConfig, quantize_config, scale_kinds
from cute_kernels.runtime.operators import Plans, functional_op
from cute_kernels.runtime.targets import arch_of, sm_count


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled kernel, how many CTAs of it to launch, what outputs to allocate, strides to read x with.

    Outputs: (shape, strides, dtype) each. ``draws``: whether the kernel counts tiles, in memory that it is given.
    """

    function: Callable[..., None]
    num_ctas: int
    outputs: tuple = ()
    x_strides: tuple[int, ...] | None = None
    draws: bool = False


_plans = Plans()


def quantize(
    op: str,
    name: str,
    x: Tensor,
    rank: int,
    along_k: bool,
    along_n: bool,
    square: bool,
    mode: str,
    scale_layout: str,
    dtype: torch.dtype,
    block=(32, 1),
) -> list[Tensor]:
    """[q, scale] of blocks along k, of those along n, or of both (then, of squares with plain scales, only once).

    ``op``, ``name``, ``rank`` and ``block`` are for the check of a call whose signature has not been checked.
    """
    key = (
        op,
        x.shape,
        x.stride(),
        x.dtype,
        x.data_ptr() & 15,
        x.get_device(),
        along_k,
        along_n,
        square,
        mode,
        scale_layout,
        dtype,
        block,
    )
    plan = _plans.get(key)
    if plan is None:
        check_quantize(op, name, x, rank, mode, scale_layout, dtype, block)
        outputs = output_specs(x, along_k, along_n, square, scale_layout)
        if x.numel() == 0:
            return [_empty(x, spec, dtype, i % 2 == 1) for i, spec in enumerate(outputs)]
        check_aligned(op, name, x)
        plan = _plans[key] = _plan(x, along_k, along_n, square, mode, scale_layout, dtype, outputs)
    device = x.device
    found = [torch.empty_strided(*spec, dtype=element, device=device) for *spec, element in plan.outputs]
    if x.requires_grad:
        x = x.detach()
    if plan.x_strides is not None:
        x = x.as_strided(x.shape, plan.x_strides)
    if along_k and along_n:
        outputs = (found[0], found[1], found[2], found[3] if len(found) == 4 else found[1])
        if plan.draws:
            counter = torch.empty(1, dtype=torch.int32, device=device)
            plan.function(x, *outputs, counter, plan.num_ctas)
        else:
            plan.function(x, *outputs, plan.num_ctas)
    elif along_k:
        plan.function(x, found[0], found[1], None, None, plan.num_ctas)
    else:
        plan.function(x, None, None, found[0], found[1], plan.num_ctas)
    return found


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, in q's layout."""
    key = (q.shape, q.stride(), q.dtype, q.get_device(), scale.shape, scale.stride(), scale.dtype, scale.device, dtype)
    plan = _plans.get(key)
    if plan is None or q.data_ptr() & 15:
        kind = check_dequantize(q, scale, dtype)
        if q.numel() == 0:
            return torch.empty_strided(q.shape, q.stride(), dtype=dtype, device=q.device)
        check_aligned("dequantize", "q", q)
        plan = _plans[key] = _plan_dequantize(q, kind, dtype)
    y = torch.empty_strided(q.shape, q.stride(), dtype=dtype, device=q.device)
    plan.function(q, scale, y, plan.num_ctas)
    return y


def output_specs(x: Tensor, along_k: bool, along_n: bool, square: bool, scale_layout: str) -> tuple:
    """(shape, strides) of each output, in order."""
    n, k = x.shape[-2:]
    experts = tuple(x.shape[:-2])
    gap = (n * k,) * len(experts)
    specs = []
    if along_k:
        specs += [((*experts, n, k), (*gap, k, 1)), _contiguous(experts, _scale_shape(n, k, square, scale_layout))]
    if along_n:
        specs.append(((*experts, n, k), (*gap, 1, n)))
        if scale_layout == "blocked":
            specs.append(_contiguous(experts, (blocked_size(k, n // BLOCK),)))
        elif not square:
            specs.append(_contiguous(experts, (n // BLOCK, k) if experts else (k, n // BLOCK)))
        elif not along_k:
            specs.append(_contiguous(experts, (n // BLOCK, k // BLOCK)))
    return tuple(specs)


def _scale_shape(n: int, k: int, square: bool, scale_layout: str) -> tuple[int, ...]:
    if scale_layout == "blocked":
        return (blocked_size(n, k // BLOCK),)
    return (n // BLOCK if square else n, k // BLOCK)


def _contiguous(experts: tuple[int, ...], shape: tuple[int, ...]) -> tuple:
    size = shape[0] if len(shape) == 1 else shape[0] * shape[1]
    return (*experts, *shape), (*((size,) * len(experts)), *((shape[1],) if len(shape) == 2 else ()), 1)


def _empty(x: Tensor, spec: tuple, dtype: torch.dtype, is_scale: bool) -> Tensor:
    return torch.empty_strided(*spec, dtype=SCALE if is_scale else dtype, device=x.device)


def _plan(x, along_k, along_n, square, mode, scale_layout, dtype, outputs) -> Plan:
    from cute_kernels.mxfp8.kernel import mxfp8_quantize
    from cute_kernels.runtime.targets import cutlass_dtype

    index = x.get_device()
    arch = arch_of(index)
    along = zip((along_k, along_n), scale_kinds(x.dim(), square, scale_layout), strict=True)
    kinds = [kind if wanted else None for wanted, kind in along]
    tiles = tiles_of(x)
    config = quantize_config(arch, x.element_size(), *(kinds[::-1] if is_transposed(x) else kinds), tiles)
    function = mxfp8_quantize(
        arch,
        cutlass_dtype(x.dtype),
        fp8_dtype(dtype),
        x.dim(),
        is_transposed(x),
        along_k,
        along_n,
        square,
        str.__str__(mode),  # a StrEnum's member would be another key
        str.__str__(scale_layout),
        config,
    )
    x_strides = None
    if x.dim() == 3 and x.shape[0] == 1 and x.stride(0) * x.element_size() % 16:
        x_strides = (x.shape[1] * x.shape[2], *x.stride()[1:])  # one expert's stride means nothing, but TMA reads it
    specs = tuple((*spec, SCALE if i % 2 == 1 else dtype) for i, spec in enumerate(outputs))
    num_ctas = config.num_ctas(tiles, sm_count(index))
    return Plan(function, num_ctas, specs, x_strides, draws=isinstance(config, DualConfig))


def _plan_dequantize(q: Tensor, kind: str, dtype: torch.dtype) -> Plan:
    from cute_kernels.mxfp8.kernel_dequantize import mxfp8_dequantize
    from cute_kernels.runtime.targets import cutlass_dtype

    arch = arch_of(q.get_device())
    function = mxfp8_dequantize(arch, fp8_dtype(q.dtype), cutlass_dtype(dtype), q.dim(), is_transposed(q), kind)
    return Plan(function, math.prod(tiles_of(q, DEQUANTIZE_TILE)))


def tiles_of(x: Tensor, sizes: tuple[int, int] = (TILE, TILE)) -> tuple[int, int, int]:
    """Tiles of these sizes along the strided dimension, along the contiguous one, and experts."""
    n, k = x.shape[-2:]
    a, b = (-(-count // size) for count, size in zip((k, n) if is_transposed(x) else (n, k), sizes, strict=True))
    return a, b, x.shape[0] if x.dim() == 3 else 1


def fp8_dtype(dtype: torch.dtype):
    """The compiler's name of an 8-bit dtype."""
    import cutlass

    return cutlass.Float8E4M3FN if dtype is torch.float8_e4m3fn else cutlass.Float8E5M2


def _run_quantize(x, dtype, along_k, along_n, square, mode, scale_layout):
    op = "quantize_" + "3d_" * (x.dim() == 3) + ("dual" if along_k and along_n else "rowwise" if along_k else "colwise")
    name = "w" if x.dim() == 3 else "x"  # as the public function that was traced has it
    return tuple(quantize(op, name, x, x.dim(), along_k, along_n, square, mode, scale_layout, dtype))


def _fake_quantize(x, dtype, along_k, along_n, square, mode, scale_layout):
    specs = output_specs(x, along_k, along_n, square, scale_layout)
    return tuple(_empty(x, spec, dtype, i % 2 == 1) for i, spec in enumerate(specs))


def _reference_quantize(x, dtype, along_k, along_n, square, mode, scale_layout):
    found = []
    if along_k:
        found += reference.along_k(x, mode, scale_layout, dtype, square)
    if along_n:
        q, s = reference.along_n(x, mode, scale_layout, dtype, square)
        found += [q] if along_k and square and scale_layout == "plain" else [q, s]
    return tuple(found)


def traced_quantize(x, along_k, along_n, square, mode, scale_layout, dtype) -> tuple[Tensor, ...]:
    """What ``quantize`` returns, from a registered operator."""
    outputs = 2 * (along_k + along_n)
    if outputs == 4 and square and scale_layout == "plain":
        outputs = 3
    return quantize_ops[outputs](x, dtype, along_k, along_n, square, mode, scale_layout)


def _fake_dequantize(q, scale, dtype, transposed):
    q = _in_order(q, transposed)
    check_dequantize(q, scale, dtype)
    return torch.empty_strided(q.shape, q.stride(), dtype=dtype, device=q.device)


def _run_dequantize(q, scale, dtype, transposed):
    return dequantize(_in_order(q, transposed), scale, dtype)


def _reference_dequantize(q, scale, dtype, transposed):
    return reference.dequantize(_in_order(q, transposed), scale, dtype=dtype)


def _in_order(q: Tensor, transposed: bool) -> Tensor:
    """q column-major if ``transposed``: what DTensor redistributes comes row-major, whatever it was as a whole."""
    return q.mT.contiguous().mT if transposed else q


# By the number of tensors returned: DTensor takes no rule for a list of any length. dtype, an integer, stands before
# the flags: DTensor remembers a call's sharding by its tensors and by what follows the first integer
quantize_ops = {
    count: functional_op(
        name,
        "Tensor x, ScalarType dtype, bool along_k, bool along_n, bool square, str mode, str scale_layout",
        "(" + ", ".join(["Tensor"] * count) + ")",
        {"CUDA": _run_quantize, "CPU": _reference_quantize},
        _fake_quantize,
    )
    for count, name in ((2, "mxfp8_quantize"), (3, "mxfp8_quantize_squares"), (4, "mxfp8_quantize_dual"))
}
dequantize_op = functional_op(
    "mxfp8_dequantize",
    "Tensor q, Tensor scale, ScalarType dtype, bool transposed",
    "Tensor",
    {"CUDA": _run_dequantize, "CPU": _reference_dequantize},
    _fake_dequantize,
)
