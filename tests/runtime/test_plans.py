"""Plans: what an earlier call came to is found by calls like it, and by no other."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.runtime import launches
from cute_kernels.runtime.plans import MAX_GUARDS, Plans


class Subclass(Tensor):
    pass


def pair(**options) -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 8, **options), torch.zeros(8, 16, **options)


@pytest.fixture
def plans():
    plans, (a, b) = Plans(), pair()
    plans.keep("options", "plan", a, b)
    return plans


def test_calls_like_it(plans):
    for _ in range(2):
        assert plans.find("options", *pair()) == "plan"
    assert plans.find("others", *pair()) is None
    launches.forget()
    assert plans.find("options", *pair()) is None


OTHERS = {
    "another shape": lambda a: torch.zeros(5, 8),
    "other strides": lambda a: torch.zeros(8, 4).t(),
    "another dtype": lambda a: a.to(torch.int32),
    "another device": lambda a: a.to("meta"),
    "another address": lambda a: torch.zeros(33)[1:].view(4, 8),
    "a gradient": lambda a: a.requires_grad_(),
    "a parameter": lambda a: torch.nn.Parameter(a, requires_grad=False),
    "a subclass": lambda a: a.as_subclass(Subclass),
    "a lazy sign": lambda a: a._neg_view(),
    "sparse": lambda a: a.to_sparse(),
    "a list": lambda a: a.tolist(),
    "none": lambda a: None,
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_tensors(plans, other):
    a, b = pair()
    assert plans.find("options", OTHERS[other](a), b) is None
    assert plans.find("options", *pair()) == "plan"


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        lambda: torch.autocast("cpu"),
        FakeTensorMode,
        TorchDispatchMode,
        forward_ad.dual_level,
    ],
    ids=["inference", "autocast", "fake", "dispatch", "forward_ad"],
)
def test_other_modes(plans, mode):
    a, b = pair()
    with mode():
        assert plans.find("options", a, b) is None
    assert plans.find("options", a, b) == "plan"


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, torch.func.functionalize])
def test_transforms(plans, transform):
    a, b = pair()
    found = []

    def function(x: Tensor) -> Tensor:
        found.append(plans.find("options", a, b))
        return x.sum()

    transform(function)(torch.ones(2))
    assert found == [None] and plans.find("options", a, b) == "plan"


@pytest.mark.parametrize("first", [True, False])
def test_gradients_that_are_not_wanted(first):
    """A guard does not tell."""
    plans, (a, b) = Plans(), pair(requires_grad=True)
    with torch.set_grad_enabled(first):
        plans.keep("options", "plan", a, b)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert plans.find("options", a, b) == ("plan" if enabled is first else None)


@pytest.mark.parametrize("context", [contextlib.nullcontext, forward_ad.dual_level])
def test_what_is_not_kept(context):
    """A tensor that is given twice; a call that may want a tangent."""
    plans, (a, b) = Plans(), pair()
    with context():
        plans.keep("options", "plan", a, *([a] if context is contextlib.nullcontext else [b]))
    assert not plans.guarded


def test_the_newest_layouts_stay():
    plans = Plans()
    layouts = [torch.zeros(4, 64)[:, :8].as_strided((4, 8), (8 * i, 1)) for i in range(1, MAX_GUARDS + 3)]
    for i, a in enumerate(layouts):
        plans.keep("options", i, a)
    assert [plans.find("options", a) for a in layouts] == [None, None, *range(2, MAX_GUARDS + 2)]


def test_no_tensor_is_held():
    plans, (a, b) = Plans(), pair()
    plans.keep("options", "plan", a, b)
    gone = weakref.ref(a)
    del a
    gc.collect()
    assert gone() is None
