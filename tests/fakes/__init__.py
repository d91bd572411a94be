"""Fake kernels: plain torch in the place of what a builder compiles; all above it is what runs on a GPU.

A family's file has a function for each of its builders, by the builder's name. It takes the builder's arguments, by
name, and then what the kernel's entry takes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from cute_kernels import uninstall
from cute_kernels.invariance import installation, scopes
from cute_kernels.invariance.compiled_operators import opaque_operators
from cute_kernels.invariance.registration import Registration
from cute_kernels.runtime import launches, operators
from cute_kernels.runtime.targets import Target
from tests.fakes import attention, gemm, log_prob, mhc, moe, mxfp8, norm, reduction, sampling, scatter
from tests.fakes.entry import check_entry

FAMILIES = (attention, gemm, log_prob, mhc, moe, mxfp8, norm, reduction, sampling, scatter)
NUM_SMS = 132


@contextlib.contextmanager
def fake_kernels(arch: str = "sm_90a", computes: bool = True, num_sms: int = NUM_SMS) -> Iterator[list[tuple]]:
    """Within it CPU tensors go where CUDA tensors would, and each launch runs a fake, which checks what it gets.

    Yields the list of builder calls, (builder, arguments): the kernels that a GPU would have needed. Without
    ``computes`` the results are left as they were allocated.
    """
    jobs: list[tuple] = []

    def load(builder: Any, *arguments: Any) -> Callable[..., None]:
        jobs.append((builder, arguments))
        static, program = inspect.signature(builder.build).bind(*arguments).arguments, builder.build(*arguments)
        (compute,) = [found for family in FAMILIES if (found := getattr(family, builder.__name__, None))]

        def function(*values: Any) -> None:
            check_entry(program, values)
            if computes:
                with scopes.inside():  # as a kernel, it calls none of torch's operators
                    compute(static, *values)

        return function

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(launches, "load", load))
        stack.enter_context(mock.patch.object(launches, "target_of", lambda index: Target(arch, num_sms)))
        stack.enter_context(mock.patch.object(operators, "on_gpu", lambda x: True))
        stack.enter_context(mock.patch.object(operators, "_current_device", lambda: None))  # memory is the CPU's
        library = stack.enter_context(torch.library._scoped_library("cute_kernels", "IMPL"))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # some have one for the CPU
            for name, launch in (operators.OPERATORS | operators.FUNCTIONAL_OPERATORS).items():
                library.impl(name, launch.implementation, "CPU", allow_override=True)
        launches.forget()
        stack.callback(launches.forget)
        yield jobs


@contextlib.contextmanager
def recorded_launches(arch: str = "sm_90a", num_sms: int = NUM_SMS) -> Iterator[list[tuple]]:
    """``fake_kernels`` that compute nothing. Yields a list of (builder, its arguments, what it is launched with), the
    tensors as (shape, strides, dtype).
    """
    seen: list[tuple] = []

    def load(builder: Any, *arguments: Any) -> Callable[..., None]:
        def function(*values: Any) -> None:
            described = [(v.shape, v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v for v in values]
            seen.append((builder, arguments, described))

        return function

    with fake_kernels(arch, num_sms=num_sms), mock.patch.object(launches, "load", load):
        yield seen


@functools.cache
def _registration(backend: str) -> Registration:
    """Made once: it asks for 800 kernels of torch's."""
    return Registration(backend)


@contextlib.contextmanager
def covered(backend: str = "CPU") -> Iterator[None]:
    """Within it the tensors of this dispatch key are those that ``batch_invariant`` and ``install`` are about."""
    uninstall()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(installation, "has_device", lambda: True))
        stack.enter_context(mock.patch.object(installation, "make_registration", lambda: _registration(backend)))
        stack.callback(uninstall)
        yield


@contextlib.contextmanager
def fake_gpu(arch: str = "sm_90a") -> Iterator[list[tuple]]:
    """``fake_kernels`` for what asks whether a tensor is on a GPU: ``batch_invariant``, a captured step."""
    opaque_operators()  # of compiled graphs: one that was made later would run torch's own kernel
    on_gpu = mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: True))
    with on_gpu, fake_kernels(arch) as jobs, covered():
        yield jobs
