"""python -m cute_kernels demo: what the library does on the machine at hand."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from cute_kernels._target import UnsupportedDeviceError, arch_of

ARCHS = ("sm_90a", "sm_100a")
TOKENS = 8192
MODELS = {"Llama-3-8B": 4096, "Qwen3-32B": 5120, "DeepSeek-V3": 7168}  # hidden sizes

DTYPE_NAMES = {"BFloat16": "bf16", "Float16": "fp16", "Float32": "fp32"}

# Relative rms error against fp64 that counts as right: one rounding to bf16 has 1.7e-3.
ERROR_LIMITS = {torch.bfloat16: 1.8e-3, torch.float32: 1e-5}


def run() -> int:
    """Runs the demo; returns the exit status: 0, or 1 if anything failed."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    started = time.monotonic()
    if _has_supported_gpu():
        ok = _measure_models(console)
    else:
        console.print(
            "No supported GPU: every kernel is compiled for "
            + " and ".join(ARCHS)
            + ", and the references are checked.\n"
        )
        # Both are run, so that one failure does not hide another.
        ok = all([_compile_everything(console), _check_references(console)])
        console.print("Nothing was run on a GPU: this shows that the kernels compile, not that they are right or fast.")
    console.print(f"{'OK' if ok else 'FAILED'} after {time.monotonic() - started:.0f} s", style="bold")
    return int(not ok)


def _has_supported_gpu() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        arch_of(torch.cuda.current_device())
    except UnsupportedDeviceError:
        return False
    return True


# With a GPU


def _measure_models(console: Console) -> bool:
    """Checks and times every op, forward and backward, at the sizes of three models."""
    from cute_kernels.__main__ import bench_module

    try:
        bench_norm = bench_module("norm")
    except FileNotFoundError as error:
        console.print(str(error), style="red")
        return False
    console.print(
        f"{torch.cuda.get_device_name()}: compile each op (ours and torch's), check it against fp64, time it\n"
    )
    cases = {bench_norm.Norm(op, TOKENS, hidden): model for model, hidden in MODELS.items() for op in bench_norm.OPS}
    found = bench_norm.run(list(cases), ["cute_kernels", "torch", "torch_compile"], repetitions=30, breakdown=False)

    table = Table(title=f"{TOKENS} tokens, bf16, cold L2", box=None, pad_edge=False)
    for column in ("model", "op", "direction", "shape"):
        table.add_column(column)
    for column in ("error vs fp64", "us", "share of copy's speed", "x torch", "x torch.compile"):
        table.add_column(column, justify="right")
    models = {(norm.op, norm.shape): model for norm, model in cases.items()}
    for measurement in found:
        case, ours = measurement.case, measurement.results.get("cute_kernels")
        row = [models[case.op, case.shape], case.op, case.direction, case.shape]
        if ours is None:
            table.add_row(*row, "[red]failed[/]")
            continue
        peers = (measurement.results.get(peer) for peer in ("torch", "torch_compile"))
        table.add_row(
            *row,
            f"{max(ours.error.values()):.1e}",
            f"{ours.us:.1f}",
            f"{measurement.copy_us / ours.us:.0%}",
            *("-" if peer is None else f"{peer.us / ours.us:.2f}" for peer in peers),
        )
    console.print(table)
    console.print("The copy is an elementwise kernel that moves the bytes that the op must move at least.\n")
    return bool(found) and all("cute_kernels" in measurement.results for measurement in found)


# Without a GPU


def _compile_everything(console: Console) -> bool:
    """Compiles, or finds in the cache, what the families' `specializations` name; prints what each needs of a GPU."""
    from jit_cache.prewarm import Result, discover, prewarm

    jobs = discover("cute_kernels", ARCHS)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=len(jobs))

        def show(result: Result, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        report = prewarm(jobs, progress=show)

    table = Table(box=None, pad_edge=False)
    for column in ("kernel", "arch"):
        table.add_column(column)
    for column in ("registers", "local bytes", "shared bytes", "seconds", "KB"):
        table.add_column(column, justify="right")
    for result in report.results:
        table.add_row(*_row(result))
    console.print(table)
    compiled = sum(result.status == "compiled" for result in report.results)
    console.print(
        f"{len(report.results)} kernels in {report.seconds:.0f} s: {compiled} compiled now, "
        f"{len(report.failed)} failed, the others were in the cache\n"
    )
    for result in report.failed:
        console.print(result.error, style="red", markup=False)
    return report.ok


def _row(result: Any) -> list[str]:
    """The cells of one compiled object; of an object with several CUDA kernels the numbers of each."""
    arguments = ", ".join(_short(value) for value in result.arguments[1:])
    name = escape(f"{result.builder.rpartition('.')[2]}({arguments})")
    if result.record is None:
        return [name, result.arch, "failed"]
    kernels = result.record["kernels"]
    shared = [kernel["static_smem_bytes"] + kernel.get("dynamic_smem_bytes", 0) for kernel in kernels]
    return [
        name,
        result.arch,
        ", ".join(str(kernel["registers"]) for kernel in kernels),
        ", ".join(str(kernel["stack_bytes"]) for kernel in kernels),
        ", ".join(map(str, shared)),
        f"{result.record['seconds']:.2f}",
        f"{result.record['files']['.o']['size'] / 1024:.0f}",
    ]


def _short(value: Any) -> str:
    """A builder's argument in few letters: a dtype by its usual name, a dataclass by its first plain field."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, type):
        return DTYPE_NAMES.get(value.__name__, value.__name__)
    if isinstance(value, tuple):
        return f"({', '.join(map(_short, value))})"
    if dataclasses.is_dataclass(value):
        name = dataclasses.fields(value)[0].name
        first = getattr(value, name)
        return _short(first) if dataclasses.is_dataclass(first) else f"{name}={first}"
    return str(value)


def _check_references(console: Console) -> bool:
    """Forward and backward of every op on the CPU, where the references run, against the references in fp64."""
    import cute_kernels
    from cute_kernels.norm import reference

    table = Table(title="References on the CPU: relative rms error against fp64", box=None, pad_edge=False)
    for column in ("op", "dtype", "y", "dx", "dw", "db", "limit"):
        table.add_column(column, justify="left" if column in ("op", "dtype") else "right")
    ok = True
    for op in ("rms_norm", "layer_norm"):
        for dtype, limit in ERROR_LIMITS.items():
            errors = _errors(getattr(cute_kernels, op), getattr(reference, op), dtype, has_bias=op == "layer_norm")
            passed = [error <= limit for error in errors]  # False for NaN
            ok = ok and all(passed)
            cells = [
                f"{error:.1e}" if good else f"[red]{error:.1e}[/]" for error, good in zip(errors, passed, strict=True)
            ]
            table.add_row(op, str(dtype).removeprefix("torch."), *cells, *["-"] * (4 - len(cells)), f"{limit:.1e}")
    console.print(table)
    console.print()
    return ok


def _errors(
    op: Callable[..., Tensor], reference: Callable[..., Tensor], dtype: torch.dtype, *, has_bias: bool
) -> list[float]:
    """Relative rms errors of y, dx, dw (and db) against the reference computed in fp64."""
    generator = torch.Generator().manual_seed(0)
    rows, cols = 256, min(MODELS.values())

    def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(std).add_(mean).to(dtype)

    inputs = [normal(rows, cols), normal(cols, mean=1.0, std=0.1), *[normal(cols, std=0.1)] * has_bias]
    dy = normal(rows, cols)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    exact_leaves = [tensor.detach().float().requires_grad_() for tensor in inputs]
    y = op(*leaves)
    exact_y = reference(*exact_leaves, compute_dtype=torch.float64)
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    exact = [exact_y, *torch.autograd.grad(exact_y, exact_leaves, dy.float())]
    return [
        float(torch.linalg.vector_norm(got.detach().double() - want) / torch.linalg.vector_norm(want))
        for got, want in zip(found, (tensor.detach().double() for tensor in exact), strict=True)
    ]
