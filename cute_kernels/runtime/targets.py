"""From torch to the compiler: architecture of a device, its number of SMs, dtypes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch


class UnsupportedDeviceError(RuntimeError):
    """The GPU has no kernels in this library: it is neither a Hopper (9.0) nor a data-centre Blackwell (10.x).

    ``backend="reference"`` runs plain torch there.

    Example:
        >>> import torch
        >>> from cute_kernels import UnsupportedDeviceError, rms_norm
        >>> x = torch.ones(2, 4)
        >>> try:
        ...     y = rms_norm(x)
        ... except UnsupportedDeviceError:
        ...     y = rms_norm(x, backend="reference")
        >>> y.shape
        torch.Size([2, 4])
    """


# The target of kernels for tensors of the meta device, whose index is -1: architecture, number of SMs
_meta_target: ContextVar[tuple[str, int]] = ContextVar("target of the meta device")


@contextmanager
def meta_target(arch: str, num_sms: int) -> Iterator[None]:
    """Inside, tensors of the meta device count as tensors of such a GPU: launch code chooses its kernels for them."""
    token = _meta_target.set((arch, num_sms))
    try:
        yield
    finally:
        _meta_target.reset(token)


class Target(NamedTuple):
    """A GPU as launches see it: its architecture (``sm_90a``) and its number of SMs."""

    arch: str
    num_sms: int


def target_of(device_index: int) -> Target:
    """The target of a CUDA device; inside of ``meta_target`` that of tensors of the meta device.

    Raises:
        UnsupportedDeviceError: neither a Hopper (9.0) nor a data-centre Blackwell (10.x) GPU.
    """
    return Target(arch_of(device_index), sm_count(device_index))


def sm_counts(arch: str) -> tuple[int, ...]:
    """Streaming multiprocessors of an architecture's GPUs: H100 SXM and H200; B200 and B300, alone and with a Grace."""
    return (132,) if arch == "sm_90a" else (148, 152)


def arch_of(device_index: int) -> str:
    """``sm_90a``, ``sm_100a``, ``sm_103a``: what kernels for this CUDA device are compiled for.

    Raises:
        UnsupportedDeviceError: neither a Hopper (9.0) nor a data-centre Blackwell (10.x) GPU.
    """
    return arch_of_gpu(device_index) if device_index >= 0 else _meta_target.get()[0]


@functools.cache
def arch_of_gpu(device_index: int) -> str:
    """``arch_of`` a GPU."""
    major, minor = torch.cuda.get_device_capability(device_index)
    if (major, minor) == (9, 0):
        return "sm_90a"
    if major == 10:
        return f"sm_{major}{minor}a"
    raise UnsupportedDeviceError(
        f"cute_kernels: cuda:{device_index} has compute capability {major}.{minor}; kernels exist for 9.0 and 10.x. "
        "Pass backend='reference' to run plain torch"
    )


def expect_arch(arch: str) -> None:
    """Raise ValueError unless there are kernels for ``arch``."""
    if arch != "sm_90a" and re.fullmatch("sm_10[0-9]a", arch) is None:
        raise ValueError(f"prewarm: arch must be 'sm_90a' or of sm_10x, such as 'sm_100a', got {arch!r}")


def sm_count(device_index: int) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return sm_count_of_gpu(device_index) if device_index >= 0 else _meta_target.get()[1]


@functools.cache
def sm_count_of_gpu(device_index: int) -> int:
    """``sm_count`` of a GPU."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@functools.cache
def cutlass_dtype(dtype: torch.dtype | None):
    """The compiler's name of a dtype; None stays None."""
    import cutlass

    names = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32}
    return names[dtype] if dtype is not None else None
