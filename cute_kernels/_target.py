"""From torch to the compiler: architecture of a device, its number of SMs, dtypes."""

from __future__ import annotations

import functools
import re

import torch


class UnsupportedDeviceError(RuntimeError):
    """The GPU has no kernels in this library."""


@functools.cache
def arch_of(device_index: int) -> str:
    """``sm_90a``, ``sm_100a``, ``sm_103a``: what kernels for this CUDA device are compiled for.

    Raises:
        UnsupportedDeviceError: neither a Hopper (9.0) nor a data-centre Blackwell (10.x) GPU.
    """
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


@functools.cache
def sm_count(device_index: int) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@functools.cache
def cutlass_dtype(dtype: torch.dtype | None):
    """The compiler's name of a dtype; None stays None."""
    import cutlass

    names = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32}
    return names[dtype] if dtype is not None else None
