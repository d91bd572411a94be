"""Models that FSDP2 shards: a parameter is whole inside of the forward of the module that owns it, and nowhere else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from cute_kernels.runtime.checks import fail

P = ParamSpec("P")
Result = TypeVar("Result")


def gathered(function: Callable[P, Result]) -> Callable[P, Result]:
    """``function(model, ...)``; of a sharded model as its forward, and as that of a head that is sharded by itself.

    The hooks of these forwards gather the embedding, the last norm and the head, and find the results, whose backward
    begins with other hooks.

    Raises:
        ValueError: the model's MixedPrecisionPolicy has rounded the results, by its output_dtype.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        model = args[0] if args else kwargs.get("model")
        run = functools.partial(function, *args, **kwargs)
        owners = _owners(model)
        for owner in reversed(owners):
            run = functools.partial(_as_forward, owner, run)
        results = run()
        for result in results if owners else ():  # type: ignore[attr-defined]
            if result.is_floating_point() and result.dtype is not torch.float32:
                expected = "be None or torch.float32: it rounds log-probabilities"
                fail(f"models.{function.__name__}", "output_dtype of the model's policy", expected, result.dtype)
        return results

    return call


def _owners(model: object) -> list[nn.Module]:
    """The sharded ones of: peft's model, that of transformers, its head."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    found = dict.fromkeys((model, base, head))
    return [module for module in found if isinstance(module, FSDPModule) and isinstance(module, nn.Module)]


def _as_forward(owner: nn.Module, run: Callable[[], Result]) -> Result:
    before = vars(owner).get("forward")
    owner.forward = lambda call: call()
    try:
        return owner(run)  # FSDP of torch 2.11 fails where a forward has no argument
    finally:
        del owner.forward
        if before is not None:
            owner.forward = before
