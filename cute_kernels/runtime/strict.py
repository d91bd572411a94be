"""CUTE_KERNELS_STRICT_LAYOUT=1: the references refuse the layouts and dtypes that the kernels refuse.

Plain torch takes strides, addresses and fp64 that no kernel does. A program that is tried on a CPU with the variable
set meets the errors that it would meet on a GPU, in the same words. What stays different: fp64 where the caller asks a
reference for ``compute_dtype=torch.float64``; addresses, which a graph of torch.compile does not see; and what is no
matter of layout, such as second derivatives.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import Tensor

from cute_kernels.runtime.autograd import as_rows
from cute_kernels.runtime.operators import is_eager

VARIABLE = "CUTE_KERNELS_STRICT_LAYOUT"


def read(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the variable is set. Raises ValueError for a value that is neither 0 nor 1."""
    value = environ.get(VARIABLE) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"


_STRICT = read()  # once a process


def is_strict() -> bool:
    return _STRICT


def has_address(*tensors: Tensor | None) -> bool:
    """Whether the layouts of these tensors are checked down to their addresses: a trace has none."""
    return _STRICT and is_eager(*tensors)


def strict_rows(op: str, **tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor whose leading dimensions do not collapse to rows of one stride."""
    if _STRICT:
        for name, t in tensors.items():
            if t is not None:
                as_rows(op, name, t)
