"""What the families share of eager calls: their plans, and memory for what they return."""

import sys
import threading
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.gemm import launch as gemm
from cute_kernels.mxfp8 import launch as mxfp8
from cute_kernels.norm import launch as norm
from cute_kernels.runtime import operators
from cute_kernels.runtime.operators import Calls, Plans, allocator


@pytest.mark.parametrize("family", [gemm, mxfp8, norm], ids=lambda family: family.__name__.split(".")[1])
def test_plans_are_forgotten_in_time(family, monkeypatch):
    monkeypatch.setattr(operators, "MAX_PLANS", 4)
    plans = type(family._plans)()
    assert type(getattr(family, "calls", Calls())) is Calls and issubclass(Calls, Plans)
    for size in range(12):
        plans[size,] = size
        assert plans[size,] == size and len(plans) <= 4
    assert type(plans) is Plans


def vectors(count: int) -> list[torch.Tensor]:
    """Some that are alike, but that each has another size."""
    return [torch.zeros(64, 3 + i) for i in range(count)]


def remember(calls: Calls, key: tuple, found: object, *tensors: torch.Tensor) -> None:
    """As two calls do: of the first only the key is kept."""
    for _ in range(2):
        calls.remember(key, found, *tensors)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a_call_alike_is_known(count):
    calls, tensors = Calls(), vectors(count)
    remember(calls, ("key",), "found", *tensors)
    assert calls.find(("key",), *tensors) == calls.find(("key",), *vectors(count)) == "found"
    assert calls.find(("other",), *tensors) is None
    for i, t in enumerate(tensors):
        for other in (
            t.double(),
            t[:5],
            t[None],
            torch.zeros(64, 2 * t.shape[1])[:, ::2],
            torch.zeros(64 * t.shape[1] + 1)[1:].view(t.shape),  # off 16 bytes
            t.clone().requires_grad_(),
            torch.nn.Parameter(t, requires_grad=False),
            t.to("meta"),
            torch.zeros(t.shape, dtype=torch.complex64).conj().imag,
        ):
            assert calls.find(("key",), *tensors[:i], other, *tensors[i + 1 :]) is None
    off = [torch.zeros(64 * t.shape[1] + 1)[1:].view(t.shape) for t in tensors]
    remember(calls, ("off",), "found", *off)
    assert calls["off",] == ()


def test_what_comes_once_costs_no_guard(monkeypatch):
    """The sizes of batches that differ all the time: a key is kept of each, nothing else."""
    monkeypatch.setattr(operators, "TensorGuards", lambda *args, **options: pytest.fail("a guard was made"))
    calls = Calls()
    for rows in range(1, 40):
        calls.remember(("key", rows), object(), torch.zeros(rows, 8))
    assert len(calls) == 39 and set(calls.values()) == {()}


def test_no_call_is_known_where_torch_would_see_it():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    calls, (x, weight) = Calls(), vectors(2)
    remember(calls, ("key",), "found", x, weight)

    def find(x=x):
        return calls.find(("key",), x, weight)

    for mode in (Mode(), FakeTensorMode(), torch.autocast("cpu"), torch.inference_mode(), forward_ad.dual_level()):
        with mode:
            assert find() is None
    seen = []
    for transform in (torch.func.functionalize, torch.vmap):
        transform(lambda x: (seen.append((find(x), find())), x * 2)[1])(x)
    assert seen == [(None, None)] * 2 and find() == "found"
    with forward_ad.dual_level():
        remember(calls, ("dual",), "found", x, weight)
    assert calls["dual",] == ()


def test_what_is_no_key_is_no_known_call():
    """A symbolic size has no hash, as a list has none."""
    assert Calls().find(([],), *vectors(2)) is None


def test_a_tensor_given_twice_is_no_known_call(monkeypatch):
    """No guard accepts it: none is made."""
    calls, (x,) = Calls(), vectors(1)
    monkeypatch.setattr(operators, "TensorGuards", lambda *args, **options: pytest.fail("a guard was made"))
    remember(calls, ("key",), "found", x, x)
    assert calls["key",] == ()


def test_the_first_guards_of_one_key_stay():
    """Were the last ones to stay, more calls than that in turn would find none and make one each."""
    calls = Calls()
    for rows in (1, *range(1, 12)):
        calls.remember(("key",), rows, torch.zeros(rows, 8))
    assert len(calls["key",]) == operators.MAX_GUARDS
    assert calls.find(("key",), torch.zeros(11, 8)) is None and calls.find(("key",), torch.zeros(1, 8)) == 1


def test_another_guard_of_a_key_forgets_no_other_key(monkeypatch):
    monkeypatch.setattr(operators, "MAX_PLANS", 4)
    calls = Calls()
    for rows in range(1, 5):
        remember(calls, ("key", rows), rows, torch.zeros(rows, 8))
    assert all(calls.find(("key", rows), torch.zeros(rows, 8)) == rows for rows in range(1, 5))


class OfDevice:
    """A tensor as an allocator sees one."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def get_device(self) -> int:
        return -1 if self.device.index is None else self.device.index


@pytest.mark.parametrize(
    "device, devices, current, past_the_dispatcher",
    [("cuda:0", 1, 0, True), ("cuda:1", 2, 1, True), ("cuda:0", 2, 1, False), ("cpu", 1, 0, False)],
)
def test_allocates_on_the_device_of_its_tensor(device, devices, current, past_the_dispatcher, monkeypatch):
    """What is past the dispatcher takes the current device; where there is one, nobody asks which that is."""
    current_device = mock.Mock(return_value=current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(operators, "_current_device", current_device)
    monkeypatch.setattr(operators, "_empty_strided_cuda", fast := mock.Mock())
    monkeypatch.setattr(torch, "empty_strided", slow := mock.Mock())
    found = allocator(OfDevice(device))((2, 3), (3, 1), torch.bfloat16)
    if past_the_dispatcher:
        fast.assert_called_once_with((2, 3), (3, 1), torch.bfloat16)
        assert found is fast.return_value and not slow.called
    else:
        slow.assert_called_once_with((2, 3), (3, 1), dtype=torch.bfloat16, device=torch.device(device))
        assert found is slow.return_value and not fast.called
    assert current_device.called == (devices == 2)


def in_threads(work):
    """Call ``work`` with the number of each of eight threads, which take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)


def test_threads_that_remember_together(monkeypatch):
    """More keys than are kept: one thread forgets all, amid what another remembers."""
    monkeypatch.setattr(operators, "MAX_PLANS", 2)
    calls, (x,), errors = Calls(), vectors(1), []

    def work(thread):
        try:
            for i in range(2000):
                key = (thread, i // 3)
                calls.remember(key, "found", x)
                assert calls.find(key, x) in (None, "found")
        except Exception as error:
            errors.append(error)

    in_threads(work)
    assert not errors and len(calls) <= 2 + 8
