"""A cache of calls behind guards: a call like an earlier one skips the checks, makes no Spec, and launches at once.

One of torch's guards, as Dynamo's graphs have them, tells that a call is like an earlier one (0.3 us for three tensors;
their shapes, strides and dtypes as a key take 1.2; CPU). It compares each tensor's type, dtype, device, sizes, strides,
dispatch keys and requires_grad. The dispatch keys are the thread's, too: lazy signs, layouts, functorch, autocast,
inference mode. Addresses, dispatch modes and forward-mode derivatives are asked for beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad
from torch.nn import Parameter

from cute_kernels.runtime.launches import bounded
from cute_kernels.runtime.operators import is_eager

MAX_GUARDS = 4  # of calls with the same device, shapes and options; the newest stay

E = TypeVar("E")
_are_plain = frozenset((Tensor, Parameter)).issuperset


class GuardedCache(Generic[E]):
    """Entries for eager calls whose tensors start on 16 bytes. It holds no tensor.

    Attributes:
        guarded: (guard, entry)s by options, device and shapes. ``launches.forget`` empties it.
    """

    def __init__(self) -> None:
        self.guarded: dict[Hashable, tuple[tuple[Callable[..., bool], E], ...]] = bounded()

    def get(self, options: Hashable, *tensors: Tensor) -> E | None:
        """The entry of a call with equal options and like tensors. Not to be called under Dynamo.

        ``options``: all else that the entry depends on, of types that are told apart: 1, 1.0 and True are equal.
        """
        if not _are_plain(map(type, tensors)) or _len_torch_dispatch_stack() or forward_ad._current_level >= 0:
            return None
        for holds, entry in self.guarded.get(_key(options, tensors), ()):
            if holds(*tensors):
                for t in tensors:
                    if t.data_ptr() & 15:
                        return None
                return entry
        return None

    def put(self, options: Hashable, entry: E, *tensors: Tensor) -> None:
        """Keep the entry of a call that was checked and launched, whose tensors are ``guardable``."""
        key = _key(options, tensors)
        guard = TensorGuards(*tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[])  # none is dynamic
        self.guarded[key] = ((guard.check, entry), *self.guarded.get(key, ())[: MAX_GUARDS - 1])


def guardable(*tensors: Tensor) -> bool:
    """Whether a call may have an entry: eager, without forward-mode derivatives, all tensors on 16 bytes.

    Not one that is given a tensor twice: torch's guards hold for no such call.
    """
    return (
        is_eager(*tensors)
        and forward_ad._current_level < 0
        and len(set(map(id, tensors))) == len(tensors)
        and not any([t.data_ptr() & 15 for t in tensors])
    )


def _key(options: Hashable, tensors: tuple[Tensor, ...]) -> Hashable:
    return options, torch.is_grad_enabled(), tensors[0].get_device(), *[t.shape for t in tensors]
