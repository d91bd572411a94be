"""What the launches have in common: operators, the kernels that are known, what these are specialised on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.common.row_layout import SUM_COLUMNS
from cute_kernels.mhc.config import StreamLayout, stream_layout
from cute_kernels.mhc.variants import Variant
from cute_kernels.runtime.operators import Calls, Plans, is_plain, mutating_op
from cute_kernels.runtime.targets import arch_of as arch_of
from cute_kernels.runtime.targets import cutlass_dtype
from cute_kernels.runtime.targets import sm_count as sm_count

# Of a Variant, what the coefficients' kernels know, in the order of its fields
VARIANT = (
    "float rms_eps, str rms_eps_placement, float pre_eps, float post_mult, "
    "str sinkhorn, float sinkhorn_eps, int iterations"
)
_ORDINARY = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str))
Launch = Callable[..., None]

OPERATORS: dict[str, Launch] = {}  # name -> what runs; all that are registered
known = Plans()  # kernels, by the signature of a launch
calls = Calls()


def variant_fields(variant: Variant) -> tuple:
    """The last arguments of the coefficients' launches; a key knows plain floats alone."""
    v = variant
    eps = float(v.rms_eps), v.rms_eps_placement, float(v.pre_eps), float(v.post_mult)
    return (*eps, v.sinkhorn, float(v.sinkhorn_eps), v.iterations)


def registered(schema: str) -> Callable[[Launch], Launch]:
    """Register a launch as an operator of its name; the result runs it in eager mode, the operator where traced."""

    def decorate(function: Launch) -> Launch:
        name = f"mhc_{function.__name__}"
        OPERATORS[name] = function
        operator = mutating_op(name, schema, function)

        @functools.wraps(function)
        def launch(first: Tensor, *rest) -> None:
            if is_plain(first) and _ORDINARY.issuperset(map(type, rest)):
                function(first, *rest)
            else:
                operator(first, *rest)

        return launch

    return decorate


def rows_key(*matrices: Tensor | None) -> tuple:
    """All that a kernel is specialised on of matrices but for their number of rows."""
    return tuple([None if t is None else (t.dtype, t.shape[1], t.stride(0), t.data_ptr() & 15) for t in matrices])


def dtypes_of(*tensors: Tensor | None) -> tuple:
    return tuple([None if t is None else t.dtype for t in tensors])


def cutlass_dtypes(*tensors: Tensor | None) -> tuple:
    return tuple([None if t is None else cutlass_dtype(t.dtype) for t in tensors])


def name_of(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def shared_variant(fields: tuple) -> Variant:
    """The kernels know neither orientation nor layout: variants that differ in them share one."""
    return Variant(*fields, res_orientation="io", layout="streams")


def streams_of(layout: str, channels: int, x: Tensor, *matrices: Tensor | None) -> StreamLayout:
    """How threads share the tokens of ``x`` (M, n C) and of other matrices, (M, n C) or (M, C), of its dtype."""
    itemsize = x.element_size()
    rows = [t for t in (x, *matrices) if t is not None]
    alignment = math.gcd(16 // itemsize, *(t.stride(0) for t in rows), *(t.data_ptr() // itemsize for t in rows))
    return stream_layout(x.shape[1] // channels, channels, layout, itemsize, alignment)


def row_alignment(t: Tensor | None) -> int:
    """Elements on which all rows of coefficients start."""
    return 1 if t is None else math.gcd(4, t.shape[1], t.stride(0), t.data_ptr() // t.element_size())


def all_aligned(width: int, *matrices: Tensor) -> bool:
    """Whether all rows start on 16 bytes and ``width`` elements of them end on 16."""
    for t in matrices:
        size = t.element_size()
        if t.data_ptr() % 16 or t.stride(0) * size % 16 or width * size % 16:
            return False
    return True


def rows_of_sums(like: Tensor, outputs: int, tokens: int, columns: int) -> Tensor:
    """Room for ``outputs`` partial rows for every ``tokens`` tokens, of whole CTAs of SumRows."""
    chunks = -(-like.shape[0] // tokens)
    return like.new_empty((outputs, chunks, -(-columns // SUM_COLUMNS) * SUM_COLUMNS), dtype=torch.float32)


def dropout_arguments(p: float) -> tuple[int, float]:
    """(threshold of the random words, what is kept is multiplied by)."""
    return int(p * 2**32), 1.0 / (1.0 - p)


def zero(*sums: tuple[Tensor | None, bool]) -> None:
    for t, accumulate in sums:
        if t is not None and not accumulate:
            t.zero_()
