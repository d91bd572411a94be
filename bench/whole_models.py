"""Shared by benchmarks of whole models: random models of transformers, and a measurement of calls in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bench import harness
from bench.bench_transformer import host_us


def random_model(config: Any, device: str) -> Any:
    """A causal language model of transformers in bf16; the same parameters for the same config."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    finally:
        torch.set_default_dtype(default)


def measured(
    case: harness.Case,
    providers: Iterable[str],
    make: Callable[[str], tuple[harness.Call, Callable[[], None]]],
    record: Callable[[harness.Call], harness.Captured],
    error_of: Callable[[harness.Call], dict[str, float]],
    worst: float,
    device: harness.Device,
    repetitions: int,
    breakdown: bool,
) -> harness.Measurement:
    """All providers in turn; one whose result is wrong is a failure.

    Args:
        make: of a provider, its call and what to do before the peak of memory is taken.
        record: what is timed of a call: itself, or a graph of it.
        error_of: name -> error of a call's result, of which none may be above ``worst``.
    """
    found: dict[str, tuple[Any, ...]] = {}
    failures: dict[str, str] = {}
    for provider in providers:
        try:
            call, prepare = make(provider)
            device.warm_up(call)
            errors = error_of(call)
            wrong = [f"{name} {error:.1e}" for name, error in errors.items() if not error <= worst]  # NaN, too
            if wrong:
                failures[provider] = f"wrong result: {wrong[0]} > {worst:.1e}"
                continue
            prepare()
            found[provider] = record(call), device.peak_bytes(call), host_us(call, device), errors
        except Exception as exception:  # one that does not take the case
            failures[provider] = harness.describe(exception)
    *times, copies = device.time_us([call for call, *_ in found.values()] + [device.copy(case.bytes)], repetitions)
    results = {}
    for (provider, (call, peak, host, errors)), samples in zip(found.items(), times, strict=True):
        kernels, launches = harness.profiled(call.call, device, provider, failures) if breakdown else ({}, 0)
        results[provider] = harness.Result(
            us=statistics.median(samples),
            us_min=min(samples),
            us_max=max(samples),
            host_us=host,
            peak_bytes=peak,
            error=errors,
            kernels=kernels,
            launches=launches,
        )
    return harness.Measurement(case, statistics.median(copies), results, failures)
