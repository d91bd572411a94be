"""What the families share of eager calls: their plans, and memory for what they return."""

from unittest import mock

import pytest
import torch

from cute_kernels import _op
from cute_kernels._op import Plans, allocator
from cute_kernels.gemm import launch as gemm
from cute_kernels.mhc import launch as mhc
from cute_kernels.mxfp8 import launch as mxfp8
from cute_kernels.norm import launch as norm


@pytest.mark.parametrize("family", [gemm, mhc, mxfp8, norm], ids=lambda family: family.__name__.split(".")[1])
def test_plans_are_forgotten_in_time(family, monkeypatch):
    monkeypatch.setattr(_op, "MAX_PLANS", 4)
    plans = type(family._plans)()
    for size in range(12):
        plans[size,] = size
        assert plans[size,] == size and len(plans) <= 4
    assert type(plans) is Plans


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
    monkeypatch.setattr(_op, "_current_device", current_device)
    monkeypatch.setattr(_op, "_empty_strided_cuda", fast := mock.Mock())
    monkeypatch.setattr(torch, "empty_strided", slow := mock.Mock())
    found = allocator(OfDevice(device))((2, 3), (3, 1), torch.bfloat16)
    if past_the_dispatcher:
        fast.assert_called_once_with((2, 3), (3, 1), torch.bfloat16)
        assert found is fast.return_value and not slow.called
    else:
        slow.assert_called_once_with((2, 3), (3, 1), dtype=torch.bfloat16, device=torch.device(device))
        assert found is slow.return_value and not fast.called
    assert current_device.called == (devices == 2)
