"""The launch cache, allocation, and which of its two ways a call takes."""

import sys
import threading
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.runtime import launches, operators
from cute_kernels.runtime.launches import LaunchCache, bounded
from cute_kernels.runtime.targets import Target
from tests.fakes import fake_kernels
from tests.runtime.thread_cases import OPS


class Spec(NamedTuple):
    n: int


@pytest.fixture
def made(monkeypatch):
    """A cache of entries that are pairs, and the Specs that it made them of."""
    monkeypatch.setattr(launches, "target_of", lambda index: Target("sm_90a", 132 + index))
    specs: list = []

    def make(target, spec):
        specs.append((target.num_sms, spec))
        return target, spec

    return LaunchCache(make), specs


def test_an_entry_is_made_once_for_each_spec_and_device(made):
    cache, specs = made
    for _ in range(3):
        for index in (0, 1):
            for n in (8, 16):
                assert cache.get(index, Spec(n)) == (Target("sm_90a", 132 + index), Spec(n))
    assert specs == [(132, Spec(8)), (132, Spec(16)), (133, Spec(8)), (133, Spec(16))]
    launches.forget()
    cache.get(0, Spec(8))
    assert len(specs) == 5


def test_old_entries_are_forgotten(monkeypatch):
    """Those of old batches' sizes: a cache does not grow without end."""
    monkeypatch.setattr(launches, "MAX_ENTRIES", 4)
    entries = bounded()
    for size in range(12):
        entries[size] = entries[size] = size
        assert entries[size] == size and len(entries) <= 4


def test_an_entry_that_cannot_be_made_is_not_kept(monkeypatch):
    monkeypatch.setattr(launches, "target_of", lambda index: Target("sm_90a", 132))
    fails = [True, False]

    def make(target, spec):
        if fails.pop(0):
            raise RuntimeError("no kernel")
        return spec

    cache = LaunchCache(make)
    with pytest.raises(RuntimeError, match="no kernel"):
        cache.get(0, Spec(1))
    assert cache.get(0, Spec(1)) == Spec(1)


def test_threads_that_make_the_same_entries(made, monkeypatch):
    """More of them than are kept: one thread forgets all, amid what another looks up."""
    monkeypatch.setattr(launches, "MAX_ENTRIES", 2)
    cache, _ = made
    errors, before = [], sys.getswitchinterval()

    def work():
        try:
            for i in range(2000):
                assert cache.get(0, Spec(i // 3))[1] == Spec(i // 3)
        except Exception as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors


def test_what_torch_would_see_is_not_eager():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    x, seen = torch.zeros(4, 3), []
    assert operators.is_eager(x, torch.nn.Parameter(x), None, 1, 1.0, "text", True)
    for mode in (Mode(), FakeTensorMode()):
        with mode:
            assert not operators.is_eager(x)
    for transform in (torch.func.functionalize, torch.vmap):
        transform(lambda x: (seen.append(operators.is_eager(x)), x * 2)[1])(x)
    assert seen == [False, False]


class OfDevice(torch.Tensor):
    """A tensor as ``empty`` sees one."""

    index = -1

    def get_device(self) -> int:
        return self.index


@pytest.mark.parametrize("index, current, fast_path", [(0, 0, True), (1, 1, True), (0, 1, False), (-1, 0, False)])
def test_allocates_on_the_device_of_its_tensor(index, current, fast_path, monkeypatch):
    """The allocation past the dispatcher takes the current device."""
    monkeypatch.setattr(operators, "_ORDINARY", frozenset((OfDevice, type(None))))
    monkeypatch.setattr(operators, "_current_device", lambda: current)
    monkeypatch.setattr(operators, "_empty_strided_cuda", fast := mock.Mock())
    like = torch.zeros(1).as_subclass(OfDevice)
    like.index = index
    found = operators.empty(like, (2, 3), torch.bfloat16)
    if fast_path:
        fast.assert_called_once_with((2, 3), (3, 1), torch.bfloat16)
        assert found is fast.return_value
    else:
        assert not fast.called and found.shape == (2, 3) and found.dtype is torch.bfloat16


NO_LAUNCH = {"to_blocked", "from_blocked", "mhc.dropout_mask", "batch_invariant", "merge_attention"}
NO_LAUNCH |= {"scatter.embedding"}  # its forward is torch's
NO_LAUNCH |= {"moe.load_balancing_loss", "moe.router_logits", "moe.z_loss"}  # of other ops, each of which asks
NO_BACKWARD = {"quantize_rowwise", "quantize_colwise", "quantize_dual", "quantize_3d_colwise", "quantize_3d_dual"}
NO_BACKWARD |= {"dequantize", "sample", "scatter.embedding_backward", "attention_with_kv_cache", "moe.plan"}
# Their backwards are torch's
NO_BACKWARD |= {f"reduction.{op}" for op in ("sum", "mean", "logsumexp", "norm", "norms", "var", "std")}
NO_BACKWARD |= {"scatter.index_sum"}
# Before and behind the sublayer; of a plan or a route that the case calls, too
FORWARDS = dict.fromkeys(("mhc.hyper_connection", "moe.permute", "moe.combine"), 2) | {"moe.experts": 2}
BACKWARDS = dict.fromkeys(("mhc.hyper_connection", "moe.experts"), 2)


@pytest.mark.parametrize("op", sorted(OPS.keys() - NO_LAUNCH))
def test_a_forward_asks_once_how_it_goes_on_and_a_backward_once(op, generator, monkeypatch):
    function, tensors = OPS[op](generator, 40)
    asked = mock.Mock(return_value=0)
    monkeypatch.setattr(operators, "_len_torch_dispatch_stack", asked)
    forwards = FORWARDS.get(op, 1)
    with fake_kernels(computes=False):
        function(*tensors)
        assert asked.call_count == forwards
        if op in NO_BACKWARD:
            return
        tensors = [t.requires_grad_() if t.is_floating_point() else t for t in tensors]
        results = function(*tensors)
        assert asked.call_count == 2 * forwards
        results = (results,) if isinstance(results, torch.Tensor) else results
        sum(result.float().sum() for result in results if result.requires_grad).backward()
        assert asked.call_count == 2 * forwards + BACKWARDS.get(op, 1)
