"""Models that FSDP2 shards: a parameter is whole inside of the forward of the module that owns it, and nowhere else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

P = ParamSpec("P")
Result = TypeVar("Result")


def gathered(function: Callable[P, Result]) -> Callable[P, Result]:
    """``function(model, ...)``; of a sharded model as its forward.

    The hooks of that forward gather the embedding, the last norm and the head, and find the results, whose backward
    begins with other hooks.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        model = args[0] if args else kwargs.get("model")
        if not isinstance(model, FSDPModule) or not isinstance(model, nn.Module):
            return function(*args, **kwargs)
        before = vars(model).get("forward")
        model.forward = lambda call: call()
        try:
            # FSDP of torch 2.11 fails where a forward has no argument
            return model(functools.partial(function, *args, **kwargs))
        finally:
            del model.forward
            if before is not None:
                model.forward = before

    return call
