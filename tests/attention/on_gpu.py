"""Helpers for the tests of attention's kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cute_kernels import attention
from cute_kernels.attention.config import ForwardConfig, ForwardSpec, forward_config
from tests.attention.cases import Inputs, rms, same_bits

HOPPER = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


def forward_job(spec: ForwardSpec, config: ForwardConfig | None = None) -> tuple:
    """The builder and the arguments that compile a forward kernel."""
    from cute_kernels.attention.kernel_forward_sm90 import forward_sm90

    return forward_sm90, ("sm_90a", spec, config or forward_config(spec))


def run(inputs: Inputs, causal: bool = False, **options) -> tuple[Tensor, Tensor]:
    return attention(*inputs, causal=causal, return_lse=True, **options)


def assert_same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """The bits of out and lse."""
    for name, a, b in zip(("out", "lse"), found, wanted, strict=True):
        assert same_bits(a, b), f"{name}: {(a != b).sum().item()} of {a.numel()} elements differ, {where(a, b)}"


def where(a: Tensor, b: Tensor) -> str:
    """The first and the last index at which two tensors differ."""
    if a.shape != b.shape:
        return f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    found = (a != b).nonzero()
    return f"from {found[0].tolist()} to {found[-1].tolist()}" if len(found) else "in signs or NaN"


def torch_error(inputs: Inputs, wanted: Tensor, causal: bool) -> float:
    """The best rms error of torch's own kernels. Their causal mask is top-left: only where that is the same."""
    q, k, v = (t.transpose(1, 2) for t in inputs)
    errors = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            errors.append(rms(out.transpose(1, 2).double() - wanted))
        except RuntimeError:  # a backend that does not take the case
            continue
    return min(errors)
