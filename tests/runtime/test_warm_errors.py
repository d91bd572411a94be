"""A bad argument raises after a good call what it raises before any, over fake kernels, every public op."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cute_kernels.runtime import launches
from tests.fakes import fake_kernels
from tests.runtime.thread_cases import FORWARD_ONLY, OPS

# The others are plain torch on every device, or no op
KERNELS = [op for op in OPS if op not in ("to_blocked", "from_blocked", "mhc.dropout_mask", "batch_invariant")]


def bad(t: Tensor) -> Iterator[object]:
    """Values that may stand in a tensor's place by mistake; some of them are good in some places."""
    yield from (None, [1.0], 1.0)
    yield t.to(torch.int16) if t.dtype.is_floating_point else t.double()
    yield t.to(torch.float64)
    yield t.unsqueeze(0)
    yield t[..., None].expand(*t.shape, 2)[..., 0]  # strides of 2
    if t.shape[0] > 1:
        yield t[1:]
    if t.dim() > 1:
        yield t[..., 1:]
        yield t.mT.contiguous()
    if t.dtype.is_floating_point and t.itemsize > 1:
        yield t.to_sparse()


def outcome(function, tensors: tuple) -> tuple[type, str] | None:
    """The error of a call."""
    try:
        function(*tensors)
    except Exception as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize("autograd", [False, True], ids=["no_grad", "autograd"])
@pytest.mark.parametrize("op", KERNELS)
def test_errors_do_not_depend_on_earlier_calls(op, autograd, generator):
    function, tensors = OPS[op](generator, 40)
    if autograd and op not in FORWARD_ONLY:
        tensors = tuple(t.requires_grad_() if t.dtype is torch.bfloat16 else t for t in tensors)
    errors = 0
    with fake_kernels(), torch.set_grad_enabled(autograd):
        for position, t in enumerate(tensors):
            elsewhere = [torch.empty_like(t.detach(), device="meta")] if position else []
            for other in (*bad(t.detach()), *elsewhere):
                arguments = (*tensors[:position], other, *tensors[position + 1 :])
                launches.forget()
                cold = outcome(function, arguments)
                function(*tensors)
                assert outcome(function, arguments) == cold
                if cold is not None:
                    assert cold[0] in (TypeError, ValueError), cold
                    errors += 1
    assert errors >= 5 * len(tensors)
