"""python -m cute_kernels demo: what the library does on the machine at hand."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from cute_kernels.runtime.targets import UnsupportedDeviceError, arch_of
from jit_cache.command import Outcome, progress
from jit_cache.prewarm import Job

ARCHS = ("sm_90a", "sm_100a")
TOKENS = 8192
MODELS = {"Llama-3-8B": 4096, "Qwen3-32B": 5120, "DeepSeek-V3": 7168}  # hidden sizes
FEED_FORWARD = {"Llama-3-8B": 14336, "Qwen3-32B": 25600, "DeepSeek-V3": 18432}  # of dense layers
EXPERT_WEIGHTS = {"DeepSeek-V3": (8, 2048, 7168)}  # a GPU's experts, outputs, inputs
VOCABULARIES = {"Llama-3-8B": (1024, 128256, 4096)}  # tokens, vocabulary, hidden size
CONNECTIONS = {"DeepSeek-V3": (4096, 7168)}  # tokens, channels of each of four streams
DECODE_TOKENS = 16
REPETITIONS = 30

DTYPE_NAMES = {"BFloat16": "bf16", "Float16": "fp16", "Float32": "fp32"}

# Relative rms error against fp64 that counts as right: one rounding to bf16 has 1.7e-3, to fp16 2.1e-4.
ERROR_LIMITS = {torch.bfloat16: 1.8e-3, torch.float16: 2.3e-4, torch.float32: 1e-5}
E4M3_LIMIT = 3e-2  # of what blocks of fp8 hold; normal numbers have 2.7e-2


@dataclasses.dataclass
class Findings:
    """Where the demo prints, and what --json tells: a dict for each thing that was tried."""

    console: Console
    kernels: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    references: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    measurements: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    batches: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def run() -> Outcome:
    """Runs the demo; returns the exit status, 1 if anything failed, and what was found."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    found = Findings(console)
    started = time.monotonic()
    has_gpu = _has_supported_gpu()
    if has_gpu:
        ok = _measure_models(found)
    else:
        console.print(
            f"No supported GPU: one kernel of each builder is compiled for {' and '.join(ARCHS)}, "
            "and the references are checked.\n"
        )
        # Both are run, so that one failure does not hide another.
        ok = all([_compile_representatives(found), _check_references(found)])
        console.print("Nothing was run on a GPU: this shows that the kernels compile, not that they are right or fast.")
        console.print("`jit-cache prewarm cute_kernels --arch sm_90a` compiles the kernels of all common models.")
    seconds = time.monotonic() - started
    verdict = "OK" if ok else "FAILED"
    console.print(f"{verdict} after {seconds:.0f} s" if has_gpu else _last_line(found, verdict, seconds), style="bold")
    lists = {name: value for name, value in vars(found).items() if name != "console"}
    return int(not ok), {
        "ok": ok,
        "seconds": seconds,
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        **lists,
    }


def _has_supported_gpu() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        arch_of(torch.cuda.current_device())
    except UnsupportedDeviceError:
        return False
    return True


# With a GPU


def _measure_models(found: Findings) -> bool:
    """Checks and times the ops, forward and backward, at the sizes of three models; tries a product's invariance."""
    from cute_kernels.cli.bench import bench_module

    try:
        names = ("norm", "gemm", "reduction", "log_prob", "mhc", "mxfp8")
        bench_norm, bench_gemm, bench_reduction, bench_log_prob, bench_mhc, bench_mxfp8 = map(bench_module, names)
    except FileNotFoundError as error:
        found.console.print(str(error), style="red")
        return False
    found.console.print(
        f"{torch.cuda.get_device_name()}: compile each op (ours and torch's), check it against fp64, time it\n"
    )
    # All are run, so that one failure does not hide another.
    return all(
        [
            _measure_norms(found, bench_norm),
            _measure_gemms(found, bench_gemm),
            _measure_reductions(found, bench_reduction),
            _measure_log_probs(found, bench_log_prob),
            _measure_connections(found, bench_mhc),
            _measure_quantizers(found, bench_mxfp8),
            _check_batches(found),
        ]
    )


def _measure_norms(found: Findings, bench_norm: ModuleType) -> bool:
    cases = {bench_norm.Norm(op, TOKENS, hidden): model for model, hidden in MODELS.items() for op in bench_norm.OPS}
    providers = ["cute_kernels", "torch", "torch_compile"]
    measured = bench_norm.run(list(cases), providers, repetitions=REPETITIONS, breakdown=False)
    models = {(norm.op, norm.shape): model for norm, model in cases.items()}
    ok = _show(
        found,
        f"Norms: {TOKENS} tokens, bf16, cold L2",
        {"model": lambda m: models[m.case.op, m.case.shape], **OP, **DIRECTION, **SHAPE},
        {**ERROR, **TIME, **SHARE, "x torch": _times("torch"), "x torch.compile": _times("torch_compile")},
        measured,
    )
    found.console.print("The copy is an elementwise kernel that moves the bytes that the op must move at least.\n")
    return ok


def _measure_reductions(found: Findings, bench_reduction: ModuleType) -> bool:
    """softmax and log_softmax of hidden states and of logits, and sums."""
    providers = ["cute_kernels", "torch", "torch_compile"]
    measured = bench_reduction.run(
        bench_reduction.reductions(quick=True), providers, repetitions=REPETITIONS, breakdown=False
    )
    return _show(
        found,
        "Reductions: bf16, cold L2",
        {"variant": lambda m: m.case.variant, **OP, **DIRECTION, **SHAPE},
        {**ERROR, **TIME, **SHARE, "x torch": _times("torch"), "x torch.compile": _times("torch_compile")},
        measured,
    )


def _measure_gemms(found: Findings, bench_gemm: ModuleType) -> bool:
    """The first linear layer of each model's feed-forward network, and one of them for few tokens."""
    cases = {
        bench_gemm.Gemm(TOKENS, FEED_FORWARD[model], hidden, direction): model
        for model, hidden in MODELS.items()
        for direction in bench_gemm.DIRECTIONS
    }
    model, hidden = next(iter(MODELS.items()))
    cases[bench_gemm.Gemm(DECODE_TOKENS, FEED_FORWARD[model], hidden, variant="decode")] = model
    measured = bench_gemm.run(list(cases), ["cute_kernels", "cublas"], repetitions=REPETITIONS, breakdown=False)
    models = {gemm.case: model for gemm, model in cases.items()}
    flops = {"TFLOP/s": lambda m: f"{1e-6 * m.case.flops / m.results['cute_kernels'].us:.0f}"}
    ok = _show(
        found,
        "Linear layers: tokens x outputs x inputs, bf16, cold L2",
        {"model": lambda m: models[m.case], **DIRECTION, **SHAPE},
        {**ERROR, **TIME, **flops, "x cuBLAS": _times("cublas")},
        measured,
    )
    return ok and len(measured) == len(cases)


def _measure_log_probs(found: Findings, bench_log_prob: ModuleType) -> bool:
    """Log-probabilities over a model's vocabulary, beside torch, whose logits are in memory."""
    cases = {bench_log_prob.LogProb(*shape): model for model, shape in VOCABULARIES.items()}
    providers = ["cute_kernels", "torch", bench_log_prob.FLOOR]
    measured = bench_log_prob.run(list(cases), providers, repetitions=REPETITIONS, breakdown=False)
    models = {case.shape: model for size, model in cases.items() for case in size.cases}
    peaks = {
        name: lambda m, name=name: f"{m.results[name].peak_bytes / 2**20:.0f}" if name in m.results else "-"
        for name in providers[:2]
    }
    return _show(
        found,
        "linear_log_prob: tokens x vocabulary x inputs, bf16, cold L2",
        {"model": lambda m: models[m.case.shape], **DIRECTION, **SHAPE},
        {
            **ERROR,
            **TIME,
            "x torch": _times("torch"),
            "x cuBLAS's products alone": _times(bench_log_prob.FLOOR),
            "MiB": peaks["cute_kernels"],
            "torch's": peaks["torch"],
        },
        measured,
    )


def _measure_connections(found: Findings, bench_mhc: ModuleType) -> bool:
    """The part of a layer that hyper-connections add: everything before and after one sublayer."""
    cases = {bench_mhc.Connection("layer", *shape): model for model, shape in CONNECTIONS.items()}
    measured = bench_mhc.run(list(cases), ["cute_kernels", "torch"], repetitions=REPETITIONS, breakdown=False)
    models = {connection.shape: model for connection, model in cases.items()}
    return _show(
        found,
        "Hyper-connections: tokens x streams x channels, bf16, cold L2",
        {"model": lambda m: models[m.case.shape], **DIRECTION, **SHAPE},
        {**ERROR, **TIME, **SHARE, "x torch": _times("torch")},
        measured,
    )


def _measure_quantizers(found: Findings, bench_mxfp8: ModuleType) -> bool:
    """A model's expert weights, one operand and both from one read; bytes are compared with the reference's."""
    cases = {
        bench_mxfp8.Quantize(op, shape): model for model, shape in EXPERT_WEIGHTS.items() for op in bench_mxfp8.OPS
    }
    measured = bench_mxfp8.run(list(cases), ["cute_kernels"], repetitions=REPETITIONS, breakdown=False)
    models = {quantize.case: model for quantize, model in cases.items()}
    ok = _show(
        found,
        "Block-scaled fp8 of expert weights, bf16, cold L2",
        {"model": lambda m: models[m.case], **OP, **SHAPE},
        {"bytes": lambda m: "exact", **TIME, **SHARE},
        measured,
    )
    return ok and len(measured) == len(cases)


Cells = dict[str, Callable[[Any], str]]  # a column's title -> its cell of a measurement
OP: Cells = {"op": lambda m: m.case.op}
DIRECTION: Cells = {"direction": lambda m: m.case.direction}
SHAPE: Cells = {"shape": lambda m: m.case.shape}
ERROR: Cells = {"error vs fp64": lambda m: f"{max(m.results['cute_kernels'].error.values()):.1e}"}
TIME: Cells = {"us": lambda m: f"{m.results['cute_kernels'].us:.1f}"}
SHARE: Cells = {"share of copy's speed": lambda m: f"{m.copy_us / m.results['cute_kernels'].us:.0%}"}


def _times(peer: str) -> Callable[[Any], str]:
    """How many times faster than the peer we are."""
    return lambda m: f"{m.results[peer].us / m.results['cute_kernels'].us:.2f}" if peer in m.results else "-"


def _show(found: Findings, title: str, names: Cells, numbers: Cells, measured: Sequence[Any]) -> bool:
    """Prints a row a measurement, its numbers where our result is right; returns whether all are."""
    table = Table(title=title, box=None, pad_edge=False)
    for column in names:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    for measurement in measured:
        found.measurements.append(dataclasses.asdict(measurement))
        ours = "cute_kernels" in measurement.results
        cells = [cell(measurement) for cell in numbers.values()] if ours else ["[red]failed[/]"]
        table.add_row(*(name(measurement) for name in names.values()), *cells)
    found.console.print(table)
    found.console.print()
    return bool(measured) and all("cute_kernels" in measurement.results for measurement in measured)


def _check_batches(found: Findings, device: str = "cuda") -> bool:
    """Whether a row of linear, and of its gradient, has the same bits in every batch; `check` tries far more."""
    import cute_kernels

    rows, size = 256, min(MODELS.values())
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=generator).mul_(std).to(device, torch.bfloat16)
        for shape, std in (((rows, size), 1.0), ((size, size), size**-0.5))
    )
    try:
        report = cute_kernels.check_invariance(lambda x: cute_kernels.linear(x, weight), x, sizes=(1, 16, 100))
        results = report.results
        failed = [f"{r.transform}, {r.case}: {r.difference or r.message}" for r in results if r.status != "ok"]
        if "grad of input[0]" not in report.tensors:
            failed.append("there is no gradient of x")
    except Exception as error:
        results, failed = (), [f"{type(error).__name__}: {error}"]
    shape = f"{rows}x{size}x{size}"
    found.batches.append({"op": "linear", "shape": shape, "cases": len(results), "failed": failed})
    table = Table(title="Batch invariance: y and dx, bits", box=None, pad_edge=False)
    for column in ("op", "shape", "cases", "result"):
        table.add_column(column, overflow="fold")
    result = f"[red]{escape(failed[0])}[/]" if failed else "invariant"
    table.add_row("linear", shape, str(len(results)), result)
    found.console.print(table)
    found.console.print()
    return not failed


# Without a GPU


def representatives(jobs: Iterable[Job]) -> list[Job]:
    """The first kernel of each builder and architecture, in the order of the jobs."""
    first: dict[tuple[str, str], Job] = {}
    for builder, arguments in jobs:
        first.setdefault((builder.kernel, arguments[0]), (builder, arguments))
    return list(first.values())


def _compile_representatives(found: Findings) -> bool:
    """Compiles, or finds in the cache, a kernel of each builder that the families' `specializations` name.

    Prints what each needs of a GPU.
    """
    from jit_cache.prewarm import discover, prewarm

    jobs = representatives(discover("cute_kernels", ARCHS))
    with progress("compiling", len(jobs)) as update:
        report = prewarm(jobs, progress=lambda result, done, total: update(done, ""))
    found.kernels += [result.as_json() for result in report.results]
    table = Table(box=None, pad_edge=False)
    for column in ("kernel", "arch"):
        table.add_column(column)
    for column in ("registers", "local bytes", "shared bytes", "seconds", "KB"):
        table.add_column(column, justify="right")
    for result in report.results:
        table.add_row(*_row(result))
    found.console.print(table)
    compiled = sum(result.status == "compiled" for result in report.results)
    found.console.print(
        f"{len(report.results)} kernels in {report.seconds:.0f} s: {compiled} compiled now, "
        f"{len(report.failed)} failed, the others were in the cache\n"
    )
    for result in report.failed:
        found.console.print(result.message, style="red", markup=False)
    return report.ok


def _last_line(found: Findings, verdict: str, seconds: float) -> str:
    """How many kernels compiled, and how many references are right."""
    compiled = [kernel for kernel in found.kernels if kernel["error"] is None]
    families = {kernel["kernel"].split(".")[1] for kernel in compiled}
    right = sum(reference["ok"] for reference in found.references)
    return (
        f"{verdict}: {_share(len(compiled), len(found.kernels))} kernels of {len(families)} families compiled for "
        f"{' and '.join(ARCHS)}, {_share(right, len(found.references))} references right, in {seconds:.0f} s"
    )


def _share(count: int, total: int) -> str:
    return str(count) if count == total else f"{count} of {total}"


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


def _check_references(found: Findings) -> bool:
    """Norms, layers and a hyper-connection, forward and backward, on the CPU, where references run, against fp64."""
    import cute_kernels
    from cute_kernels import mhc
    from cute_kernels.attention import reference as attention
    from cute_kernels.gemm import reference as gemm
    from cute_kernels.mhc import reference as mhc_reference
    from cute_kernels.norm import reference as norm
    from cute_kernels.reduction import reference as reduction
    from cute_kernels.runtime.checks import HALVES

    rows, cols, outputs = 256, 4096, 1024
    # (shape, mean, deviation)
    x, scale, shift = ((rows, cols), 0.0, 1.0), ((cols,), 1.0, 0.1), ((cols,), 0.0, 0.1)
    weight, bias = ((outputs, cols), 0.0, cols**-0.5), ((outputs,), 0.0, 0.1)
    partial, fp64, gelu = functools.partial, {"compute_dtype": torch.float64}, {"activation": "gelu"}
    every, fp32 = tuple(ERROR_LIMITS), (torch.float32,)
    streams, phi = ((rows, 4, outputs), 0.0, 1.0), ((24, 4 * outputs), 0.0, (4 * outputs) ** -0.5)

    def connected(module: ModuleType, x: Tensor, phi: Tensor, **options: torch.dtype) -> Tensor:
        alpha, beta = torch.full((3,), 0.5), torch.zeros(24)
        return module.hyper_connection(x, torch.sin, phi, alpha, beta, **options)

    def log_prob(*tensors: Tensor) -> Tensor:
        return cute_kernels.linear_log_prob(*tensors, torch.arange(rows) % outputs)[0]

    def exact_log_prob(*tensors: Tensor) -> Tensor:
        return log_prob(*(tensor.double() for tensor in tensors))

    def exact_linear(*tensors: Tensor, **options: str) -> Tensor:
        return gemm.linear(*(tensor.double() for tensor in tensors), **options)

    # The number: roundings in a gradient, as variances. Behind gelu dz's and its own; z's is hardly felt.
    gelu_linears = partial(cute_kernels.linear, **gelu), partial(exact_linear, **gelu)
    cases = (
        ("rms_norm", cute_kernels.rms_norm, partial(norm.rms_norm, **fp64), (x, scale), every, 1),
        ("layer_norm", cute_kernels.layer_norm, partial(norm.layer_norm, **fp64), (x, scale, shift), every, 1),
        ("softmax", cute_kernels.reduction.softmax, partial(reduction.softmax, **fp64), (x,), every, 1),
        ("linear", cute_kernels.linear, exact_linear, (x, weight), HALVES, 1),
        ("linear_log_prob", log_prob, exact_log_prob, (x, weight), HALVES, 1),
        ("linear, bias, gelu", *gelu_linears, (x, weight, bias), HALVES, 2),
        (
            "hyper_connection",
            partial(connected, mhc),
            partial(connected, mhc_reference, **fp64),
            (streams, phi),
            fp32,
            1,
        ),
    )
    heads = ((2, 20, 4, 16), 0.0, 1.0), ((2, 20, 2, 16), 0.0, 1.0), ((2, 20, 2, 16), 0.0, 1.0)
    attend, exactly = partial(cute_kernels.attention, causal=True), partial(attention.attention, causal=True, **fp64)
    cases += (("attention", attend, exactly, heads, HALVES, 1),)
    table = Table(title="References on the CPU: relative rms error against fp64", box=None, pad_edge=False)
    for column in ("op", "dtype", "y", "dx", "dw", "db", "limit of y", "of gradients"):
        table.add_column(column, justify="left" if column in ("op", "dtype") else "right")
    ok = True
    for name, op, exact, inputs, dtypes, roundings in cases:
        for dtype in dtypes:
            errors = _errors(op, exact, inputs, dtype)
            limits = ERROR_LIMITS[dtype], ERROR_LIMITS[dtype] * roundings**0.5
            passed = [error <= limits[i > 0] for i, error in enumerate(errors)]  # False for NaN
            ok = ok and all(passed)
            cells = [
                f"{error:.1e}" if good else f"[red]{error:.1e}[/]" for error, good in zip(errors, passed, strict=True)
            ]
            cells += ["-"] * (4 - len(cells)) + [f"{limit:.1e}" for limit in limits]
            table.add_row(name, str(dtype).removeprefix("torch."), *cells)
            found.references.append(_reference(name, dtype, errors, limits, all(passed)))
    normal = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    kept = cute_kernels.dequantize(*cute_kernels.quantize_rowwise(normal), dtype=torch.float32)
    error = float((kept - normal.float()).norm() / normal.float().norm())
    is_near = error <= E4M3_LIMIT
    ok = ok and is_near
    cell = f"{error:.1e}" if is_near else f"[red]{error:.1e}[/]"
    table.add_row("quantize_rowwise", "e4m3", cell, "-", "-", "-", f"{E4M3_LIMIT:.1e}", "-")
    found.references.append(_reference("quantize_rowwise", torch.float8_e4m3fn, [error], (E4M3_LIMIT, None), is_near))
    found.console.print(table)
    found.console.print()
    return ok


def _reference(
    op: str, dtype: torch.dtype, errors: Sequence[float], limits: tuple[float, float | None], ok: bool
) -> dict[str, Any]:
    return {
        "op": op,
        "dtype": str(dtype).removeprefix("torch."),
        "errors": dict(zip(("y", "dx", "dw", "db"), errors, strict=False)),
        "limit": limits[0],
        "limit_of_gradients": limits[1],
        "ok": ok,
    }


def _errors(
    op: Callable[..., Tensor],
    exact: Callable[..., Tensor],
    inputs: Sequence[tuple[tuple[int, ...], float, float]],
    dtype: torch.dtype,
) -> list[float]:
    """Relative rms errors of y, dx, dw (and db) against what the exact op makes of the same inputs, held in fp32."""
    generator = torch.Generator().manual_seed(0)

    def normal(shape: Sequence[int], mean: float = 0.0, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(std).add_(mean).to(dtype)

    leaves = [normal(*one).requires_grad_() for one in inputs]
    exact_leaves = [leaf.detach().float().requires_grad_() for leaf in leaves]
    y, exact_y = op(*leaves), exact(*exact_leaves)
    dy = normal(y.shape)
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    wanted = [exact_y, *torch.autograd.grad(exact_y, exact_leaves, dy.to(exact_y.dtype))]
    return [
        float(torch.linalg.vector_norm(got.detach().double() - want) / torch.linalg.vector_norm(want))
        for got, want in zip(found, (tensor.detach().double() for tensor in wanted), strict=True)
    ]
