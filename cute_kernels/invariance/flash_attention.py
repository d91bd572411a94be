"""``attention`` as one of torch's implementations of flash attention, which its user activates for the process.

torch.nn.attention has a list of them (torch 2.11). An active one takes every call that torch gives to its flash
backend, outside of ``batch_invariant``, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.invariance.errors import tensors
from cute_kernels.invariance.fused_attention import REPLACEMENTS

NAME = "CUTE_KERNELS"
OPERATORS = [name for name in REPLACEMENTS if "flash" in name]


class Active:
    """Our kernels under the operators of torch's flash backend, until ``remove``.

    Args:
        backend: the dispatch key of the tensors. Tests take "CPU".
    """

    def __init__(self, backend: str = "CUDA") -> None:
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in OPERATORS:
                kernel = _or_error(name, REPLACEMENTS[name])
                self._library.impl(name.removesuffix(".default"), kernel, backend, allow_override=True)

    def remove(self) -> None:
        """Restore what was there before."""
        self._library._destroy()


def _or_error(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; where ``attention`` does not take the arguments, an error instead of another algorithm."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if found is NotImplemented:
            given = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in tensors((*args, *kwargs.values())))
            raise NotImplementedError(
                f"{name} by cute_kernels: expected bf16 or fp16, head sizes that are multiples of 8 up to 256, no "
                f"dropout, no mask but causal and windows, a Hopper GPU, got {given}"
            )
        return found

    return kernel


def register() -> None:
    """Let ``torch.nn.attention.activate_flash_attention_impl("CUTE_KERNELS")`` find ours; it activates nothing."""
    if hasattr(torch.nn.attention, "register_flash_attention_impl"):
        torch.nn.attention.register_flash_attention_impl(NAME, register_fn=Active)
