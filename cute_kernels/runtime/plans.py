"""What a call came to, kept for calls like it: they check nothing, make no Spec, and launch at once.

One of torch's guards, as Dynamo's graphs have them, tells that a call is like an earlier one (0.3 us for three tensors;
their shapes, strides and dtypes as a key take 1.2; CPU). It compares each tensor's type, dtype, device, sizes, strides,
dispatch keys and requires_grad. The dispatch keys are the thread's, too: lazy signs, layouts, functorch, autocast,
inference mode. So what would be refused has no plan, whatever was called before.
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

MAX_GUARDS = 4  # of calls with the same shapes and options; the newest stay

P = TypeVar("P")
_are_plain = frozenset((Tensor, Parameter)).issuperset


class Plans(Generic[P]):
    """Plans of eager calls whose tensors start on 16 bytes.

    Attributes:
        guarded: plans with their guards, by options and shapes. ``launches.forget`` empties it.
    """

    def __init__(self) -> None:
        self.guarded: dict[Hashable, tuple[tuple[Callable[..., bool], P], ...]] = bounded()

    def find(self, options: Hashable, *tensors: Tensor) -> P | None:
        """The plan of an earlier call of equal options and like tensors. Not to be called under Dynamo.

        ``options``: all else that the plan depends on, of types that are told apart: 1, 1.0 and True are equal.
        """
        if not _are_plain(map(type, tensors)) or _len_torch_dispatch_stack() or forward_ad._current_level >= 0:
            return None
        for holds, plan in self.guarded.get(_key(options, tensors), ()):
            if holds(*tensors):
                for t in tensors:
                    if t.data_ptr() & 15:
                        return None
                return plan
        return None

    def keep(self, options: Hashable, plan: P, *tensors: Tensor) -> None:
        """Keep the plan of a call that was checked, and whose mode is eager.

        Not kept: where a forward-mode derivative may be wanted, or a tensor is given twice, which guards refuse.
        """
        if forward_ad._current_level < 0 and len(set(map(id, tensors))) == len(tensors):
            key = _key(options, tensors)
            guard = TensorGuards(*tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[])  # none is dynamic
            self.guarded[key] = ((guard.check, plan), *self.guarded.get(key, ())[: MAX_GUARDS - 1])


def _key(options: Hashable, tensors: tuple[Tensor, ...]) -> Hashable:
    return options, torch.is_grad_enabled(), *[t.shape for t in tensors]
