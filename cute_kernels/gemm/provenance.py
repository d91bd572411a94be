"""Which kernels computed a result: the contract, the kernel, the architecture and the versions of what compiled it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from cute_kernels._check import expect
from cute_kernels.gemm import launch
from cute_kernels.gemm.config import CONTRACT


@dataclass(frozen=True)
class Provenance:
    """Where the bits of one matrix product come from: two products of one contract agree bit by bit.

    "serial_k16, unproven": what kernels are meant to be where no GPU has shown it, on all but sm_90a.
    """

    contract: str
    kernel: str
    shape: tuple[int, ...]
    arch: str
    versions: dict[str, str]


def provenance(function: Callable, *args: Any, **kwargs: Any) -> tuple[Provenance, ...]:
    """Call ``function(*args, **kwargs)`` and say what computed its matrix products, one entry each, in order.

    ``shape`` is (M, N, K), of a batch (L, M, N, K), as the kernel sees it. ``kernel`` begins with "gemm" or, of
    ``linear_log_prob``'s products with the whole vocabulary, "log_prob_statistics" and "log_prob_gradient". Products
    over nothing, replays of CUDA graphs, and work on CPU tensors launch none of our kernels and have no entry.

    Raises:
        TypeError: function cannot be called; and whatever it raises.
    """
    import cute_kernels

    expect(callable(function), "provenance", "function", "be callable", type(function).__name__, TypeError)
    with launch.observed() as launches:
        function(*args, **kwargs)
    versions = {"cute-kernels": cute_kernels.__version__, "torch": torch.__version__}
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        versions[package] = version(package)
    entries = []
    for plan, shape, device in launches:
        name = "any stride" if plan.config is None else f"tile {plan.config.tile}, cluster {plan.config.cluster}"
        turns = ", ping-pong" if plan.config is not None and plan.config.ping_pong else ""
        kernel = f"{plan.kernel} ({name}{turns}{', transposed' if plan.transposed else ''})"
        arch = launch.arch_of(device)
        contract = CONTRACT if arch == "sm_90a" else f"{CONTRACT}, unproven"
        entries.append(Provenance(contract, kernel, shape, arch, versions))
    return tuple(entries)
