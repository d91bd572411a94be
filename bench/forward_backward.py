"""Helpers for benchmarks of ops with a backward: two calls a provider, one measurement a direction.

A case knows its ``directions``, and the `harness.Case` of each: ``case(direction)``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bench import harness

Calls = tuple[harness.Call, Callable[[], harness.Call]]  # a forward, and a factory of its backward


class ForwardBackward(Protocol):
    """A case."""

    @property
    def directions(self) -> Sequence[str]: ...
    def case(self, direction: str) -> harness.Case: ...


def autograd_calls(
    function: Callable[..., Tensor | Sequence[Tensor]], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor]
) -> Calls:
    """The two calls of a differentiable function: its forward, and a factory of its backward.

    The factory runs the forward once, untimed. The backward returns the gradients of `inputs`, in that order.
    """

    def forward() -> Sequence[Tensor]:
        outputs = function(*inputs)
        return (outputs,) if isinstance(outputs, Tensor) else outputs

    def make_backward() -> harness.Call:
        outputs = forward()
        return lambda: torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=True)

    return forward, make_backward


def compile_kernels(make: Callable[[Any], Calls], cases: Iterable[ForwardBackward], device: harness.Device) -> None:
    """Compiles our kernels of these cases, before any peer is imported: quack changes classes of the CuTe DSL."""
    for case in dict.fromkeys(cases):
        with contextlib.suppress(Exception):  # raised again, and reported, where the case is measured
            forward, make_backward = make(case)
            forward()
            if "bwd" in case.directions:
                make_backward()()
    device.synchronize()


def measure(
    case: ForwardBackward,
    directions: Sequence[str],
    providers: Mapping[str, Callable[[], Calls | None]],
    truth: Mapping[str, Mapping[str, Tensor]],
    device: harness.Device,
    *,
    least: Mapping[str, Mapping[str, float]] | None = None,
    **options: Any,
) -> list[harness.Measurement]:
    """One `harness.measure` for each direction ("fwd", "bwd"). A provider is set up once, so that it compiles once.

    providers: name -> what makes its calls; None: it has no such op. truth, least: of `harness.measure`, by direction
    """
    set_up = {provider: functools.cache(make) for provider, make in providers.items()}
    measurements = []
    for direction in directions:
        makers = {provider: functools.partial(_call_of, calls, direction) for provider, calls in set_up.items()}
        rounding = None if least is None else least[direction]
        what = case.case(direction), makers, truth[direction], device
        measurements.append(harness.measure(*what, least=rounding, **options))
    return measurements


def _call_of(set_up: Callable[[], Calls | None], direction: str) -> harness.Call | None:
    calls = set_up()
    if calls is None:
        return None
    forward, make_backward = calls
    return forward if direction == "fwd" else make_backward()


def run(
    cases: Sequence[ForwardBackward],
    measure_case: Callable[..., Sequence[harness.Measurement]],
    providers: Sequence[str],
    make_device: Callable[[], harness.Device] | None = None,
    **settings: Any,
) -> list[harness.Measurement]:
    """`harness.run` of these cases, beside torch, whose error is the yardstick."""
    selected = [(case, [case.case(direction) for direction in case.directions]) for case in cases]
    return harness.run(selected, measure_case, [*providers, "torch"], make_device or harness.CudaDevice, **settings)


def names(cases: Iterable[ForwardBackward]) -> list[str]:
    return [case.case(direction).name for case in cases for direction in case.directions]
