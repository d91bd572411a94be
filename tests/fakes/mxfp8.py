"""Fakes of the quantizers: the reference, by the kernels' rule of scales."""

import threading
from unittest import mock

import torch
from torch import Tensor

from cute_kernels.mxfp8 import reference
from cute_kernels.mxfp8.checks import SCALE
from cute_kernels.mxfp8.config import DualConfig, scale_rule

_one_at_a_time = threading.Lock()  # of threads that put the rule in place


def mxfp8_quantize(static, x, q_k, s_k, q_n, s_n, *rest) -> None:
    spec, (*counter, num_ctas) = static["spec"], rest
    assert [t.dtype for t in counter] == [torch.int32] * isinstance(static["config"], DualConfig)
    assert num_ctas >= 1 and x.data_ptr() % 16 == 0 and x.dim() == spec.rank and x.dtype is spec.x
    assert (x.stride(-2) == 1) == spec.transposed
    assert (q_k is not None, q_n is not None) == (spec.along_k, spec.along_n)
    assert (s_k is None) == (q_k is None) and (s_n is None) == (q_n is None)
    with _one_at_a_time, mock.patch.object(reference, "scales", emulated_scales):
        for q, s, computation in ((q_k, s_k, reference.along_k), (q_n, s_n, reference.along_n)):
            if q is not None:
                assert q.dtype is spec.q and s.dtype is SCALE
                wanted = computation(x, spec.mode, spec.scale_layout, spec.q, spec.square)
                assert q.stride() == wanted[0].stride() and s.stride() == wanted[1].stride()
                q.copy_(wanted[0])
                s.copy_(wanted[1])


def mxfp8_dequantize(static, q, scale, y, num_ctas) -> None:
    spec = static["spec"]
    assert num_ctas >= 1 and y.stride() == q.stride() and q.dim() == spec.rank
    assert q.dtype is spec.q and y.dtype is spec.y and (q.stride(-2) == 1) == spec.transposed
    y.copy_(reference.dequantize(q, scale, dtype=y.dtype))


def emulated_scales(amax: Tensor, mode: str, dtype: torch.dtype) -> Tensor:
    """The kernels' integer rule."""
    rule = scale_rule(mode, "e4m3" if dtype is torch.float8_e4m3fn else "e5m2")
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    s = ((bits + rule.add) >> 23) - rule.sub
    return torch.where(bits >= rule.upper, 255, torch.where(bits < rule.lower, 0, s))
