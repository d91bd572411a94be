"""Backwards of ours have no second derivative: create_graph=True is an error, never a gradient that lacks a part."""

import importlib
import pkgutil

import pytest
import torch

import cute_kernels
from cute_kernels import linear
from cute_kernels.mhc import reference

IN_PLAIN_TORCH = {"_Product"}  # whose backward autograd follows


def autograd_functions() -> list[type]:
    for module in pkgutil.walk_packages(cute_kernels.__path__, "cute_kernels."):
        parts = module.name.split(".")
        # Integrations import packages that are not here, and hold no op
        if not {"__main__", "integrations"} & set(parts) and not any(part.startswith("kernel") for part in parts):
            importlib.import_module(module.name)
    found = torch.autograd.Function.__subclasses__()
    ours = [function for function in found if function.__module__.startswith("cute_kernels.")]
    return [function for function in ours if function.__name__ not in IN_PLAIN_TORCH]


def test_every_backward_refuses():
    assert len(autograd_functions()) >= 15
    for function in autograd_functions():
        with torch.enable_grad(), pytest.raises(RuntimeError, match="has no second derivative, got create_graph=True"):
            function.backward(None, None)


@pytest.mark.parametrize("op", ["linear", "sinkhorn"])
def test_behind_a_sum(op):
    """Whose gradient requires none itself: torch's own check lets it pass."""
    x = torch.randn(16, 16, dtype=torch.bfloat16 if op == "linear" else torch.float32, requires_grad=True)

    def result():
        return linear(x, x.detach()) if op == "linear" else reference.sinkhorn(x.view(-1, 4, 4), variant="exp_clamp")

    with pytest.raises(RuntimeError, match="has no second derivative, got create_graph=True"):
        torch.autograd.grad(result().float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative, got create_graph=True"):
        torch.autograd.grad(result().sum(), x, create_graph=True)
    torch.autograd.grad(result().sum(), x)
