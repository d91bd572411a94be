"""The guarded cache: an entry is found by calls like its own, and by no other."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.runtime import launches
from cute_kernels.runtime.guarded import MAX_GUARDS, GuardedCache, guardable


class Subclass(Tensor):
    pass


def pair(**options) -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 8, **options), torch.zeros(8, 16, **options)


@pytest.fixture
def cache():
    cache, (a, b) = GuardedCache(), pair()
    cache.put("options", "entry", a, b)
    return cache


def test_calls_like_it(cache):
    for _ in range(2):
        assert cache.get("options", *pair()) == "entry"
    assert cache.get("others", *pair()) is None
    launches.forget()
    assert cache.get("options", *pair()) is None


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
def test_other_tensors(cache, other):
    a, b = pair()
    assert cache.get("options", OTHERS[other](a), b) is None
    assert cache.get("options", *pair()) == "entry"


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
def test_other_modes(cache, mode):
    a, b = pair()
    with mode():
        assert cache.get("options", a, b) is None
    assert cache.get("options", a, b) == "entry"


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, torch.func.functionalize])
def test_transforms(cache, transform):
    a, b = pair()
    found = []

    def function(x: Tensor) -> Tensor:
        found.append(cache.get("options", a, b))
        return x.sum()

    transform(function)(torch.ones(2))
    assert found == [None] and cache.get("options", a, b) == "entry"


@pytest.mark.parametrize("first", [True, False])
def test_gradients_that_are_not_wanted(first):
    """A guard does not tell."""
    cache, (a, b) = GuardedCache(), pair(requires_grad=True)
    with torch.set_grad_enabled(first):
        cache.put("options", "entry", a, b)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert cache.get("options", a, b) == ("entry" if enabled is first else None)


def test_what_is_not_kept():
    """A tensor that is given twice, or does not start on 16 bytes; a subclass; other modes."""
    a, b = pair()
    assert guardable(a, b)
    assert not guardable(a, a)
    assert not guardable(a, torch.zeros(129)[1:].view(8, 16))
    assert not guardable(a, b.as_subclass(Subclass))
    for mode in (forward_ad.dual_level, TorchDispatchMode):
        with mode():
            assert not guardable(a, b)


def test_the_newest_layouts_stay():
    cache = GuardedCache()
    layouts = [torch.zeros(4, 64)[:, :8].as_strided((4, 8), (8 * i, 1)) for i in range(1, MAX_GUARDS + 3)]
    for i, a in enumerate(layouts):
        cache.put("options", i, a)
    assert [cache.get("options", a) for a in layouts] == [None, None, *range(2, MAX_GUARDS + 2)]


def test_no_tensor_is_held():
    cache, (a, b) = GuardedCache(), pair()
    cache.put("options", "entry", a, b)
    gone = weakref.ref(a)
    del a
    gc.collect()
    assert gone() is None
