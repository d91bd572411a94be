"""Which kernels computed a result: the contract, the kernel, the architecture and the versions of what compiled it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from cute_kernels.runtime import launches
from cute_kernels.runtime.checks import expect
from cute_kernels.runtime.launches import observed
from cute_kernels.version import __version__


@dataclass(frozen=True)
class Provenance:
    """Where the bits of one matrix product, or one attention, come from: two of one contract agree bit by bit.

    Args:
        contract: the order of the sums: "serial_k16" of products, "kv_grid (B, S)" of attention in blocks of B keys and
            splits of S. "..., unproven" is the intended contract where no GPU has shown it, on all architectures but
            sm_90a.
        kernel: begins with "gemm"; for ``linear_log_prob``'s products with the whole vocabulary with
            "log_prob_statistics" or "log_prob_gradient"; for attention with "attention_forward" or
            "attention_decode"; then its configuration.
        shape: (M, N, K), for a batch (L, M, N, K), as the kernel sees it; of attention (sequences, heads, queries,
            keys, D), of sequences that have not one length the most of queries and keys.
        arch: the architecture, "sm_90a" for example.
        versions: package -> version of this library, torch and the compiler.

    Example:
        >>> from cute_kernels import Provenance
        >>> ours = Provenance("serial_k16", "gemm (any stride)", (8, 16, 32), "sm_90a", {"torch": "2.10"})
        >>> ours.contract, ours.shape
        ('serial_k16', (8, 16, 32))
    """

    contract: str
    kernel: str
    shape: tuple[int, ...]
    arch: str
    versions: dict[str, str]


def provenance(function: Callable, *args: Any, **kwargs: Any) -> tuple[Provenance, ...]:
    """Call ``function`` and say what computed its matrix products and its attention, one entry each, in order.

    Products over nothing, replays of CUDA graphs, and work on CPU tensors launch none of our kernels and have no entry.

    Args:
        function: called once.
        `*args`, `**kwargs`: its arguments.

    Returns:
        A tuple of ``Provenance``: contract, kernel, shape, architecture and versions of each one.

    Raises:
        TypeError: ``function`` cannot be called. Errors of ``function`` pass through.

    Example:
        >>> import torch
        >>> from cute_kernels import mm, provenance
        >>> a = torch.ones(16, 16, dtype=torch.bfloat16)
        >>> provenance(mm, a, a)  # on the CPU no kernel of ours runs
        ()
    """
    expect(callable(function), "provenance", "function", "be callable", type(function).__name__, TypeError)
    with observed() as launched:
        function(*args, **kwargs)
    versions = {"cute-kernels": __version__, "torch": torch.__version__}
    for package in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        versions[package] = version(package)
    entries = []
    for launch, shape, device in launched:
        arch = launches.target_of(device).arch
        contract = launch.contract if arch == "sm_90a" else f"{launch.contract}, unproven"
        entries.append(Provenance(contract, launch.name, shape, arch, versions))
    return tuple(entries)
