"""Shared by benchmarks of whole models: random models of transformers, a peer, and a measurement of calls in turn."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import harness
from bench.bench_transformer import host_us
from cute_kernels import uninstall

THEIRS = "batch_invariant_ops"  # a provider, and the package that it needs
PACKAGES = {THEIRS: (THEIRS,)}
ROUNDS = 4

Group = tuple[Callable[[], AbstractContextManager[None]], Sequence[harness.Captured]]


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


@contextlib.contextmanager
def their_mode() -> Iterator[None]:
    """Inside, batch_invariant_ops has its kernels under torch's operators, and ours are not there.

    It has none for attention, which is torch's of products and a softmax: with that its rows depend least on the batch.
    """
    import batch_invariant_ops

    uninstall()
    batch_invariant_ops.enable_batch_invariant_mode()
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        batch_invariant_ops.disable_batch_invariant_mode()


def mode_of(provider: str) -> AbstractContextManager[None]:
    """The state of torch's dispatcher in which a provider's calls run. A block of ours registers by itself."""
    return their_mode() if provider == THEIRS else contextlib.nullcontext()


def time_groups(groups: Sequence[Group], repetitions: int, device: harness.Device) -> list[list[list[float]]]:
    """Times of each call of each group in microseconds; the groups take turns, each with its calls in its mode."""
    rounds = ROUNDS if len(groups) > 1 else 1
    times: list[list[list[float]]] = [[[] for _ in calls] for _, calls in groups]
    for _ in range(rounds):
        for (mode, calls), of_group in zip(groups, times, strict=True):
            with mode():
                for samples, more in zip(of_group, device.time_us(calls, -(-repetitions // rounds)), strict=True):
                    samples += more
    return times


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
            with mode_of(provider):
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
    others = [provider for provider in found if provider != THEIRS]
    calls = [found[provider][0] for provider in others] + [device.copy(case.bytes)]
    groups: list[Group] = [(contextlib.nullcontext, calls)]
    if THEIRS in found:
        groups.append((their_mode, [found[THEIRS][0]]))
    (*times, copies), *apart = time_groups(groups, repetitions, device)
    of_provider = dict(zip([*others, THEIRS], [*times, *sum(apart, [])], strict=False))
    results = {}
    for provider, (call, peak, host, errors) in found.items():
        samples = of_provider[provider]
        with mode_of(provider):
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
