"""python -m cute_kernels check: check_invariance over the library's ops on the machine at hand."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from cute_kernels.cli.demo import _has_supported_gpu
from cute_kernels.invariance.checker import ROW_TRANSFORMS, TRANSFORMS, Report, check_invariance
from jit_cache.command import Outcome, UsageError, progress

DTYPE = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Subject:
    """One call of an op: what is built on a device and checked."""

    op: str
    case: str
    make: Callable[[Make], tuple[Callable, tuple[Tensor, ...]]]  # (function, sample)
    transforms: tuple[str, ...] = tuple(TRANSFORMS)
    invariant: bool = True  # False: a positive control, which the checker has to catch
    gradients: bool = True  # False: there are none


class Make:
    """Makes tensors from one seed on one device."""

    def __init__(self, device: str, rows: int) -> None:
        self.device, self.rows = device, rows
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, device="cpu").mul_(std).add_(mean).to(self.device, DTYPE)

    def batch(self, width: int) -> Tensor:
        return self.normal(self.rows, width)


def run(only: Sequence[str] | None) -> Outcome:
    """Checks every op, prints one line each; returns the exit status, 1 if anything failed, and a dict for each.

    Raises:
        UsageError: there is no such op.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    has_gpu = _has_supported_gpu()
    subjects = _subjects(has_gpu)
    known = list(dict.fromkeys(subject.op for subject in subjects))
    if unknown := sorted(set(only or ()) - set(known)):
        raise UsageError(f"no such op here: {', '.join(unknown)}; there are: {', '.join(known)}")
    subjects = [subject for subject in subjects if only is None or subject.op in only]
    if has_gpu:
        console.print(f"{torch.cuda.get_device_name()}, {DTYPE}: rows compared bit by bit, forward and gradients\n")
    else:
        console.print(
            "No supported GPU: the ops are plain torch here, whose products depend on the number of rows. These "
            "references are only held to run-to-run determinism (B0); this shows nothing about the kernels.\n"
        )
    table = Table(box=None, pad_edge=False)
    for column in ("op", "case", "result", "cases", "seconds"):
        table.add_column(column, justify="right" if column in ("cases", "seconds") else "left")
    reports: list[tuple[Subject, Report | None, str, bool]] = []
    with progress("checking", len(subjects)) as update:
        for subject in subjects:
            started = time.monotonic()
            make = Make("cuda", 513) if has_gpu else Make("cpu", 33)  # anew: the same tensors, whatever else is checked
            report, result, ok = _check(subject, make, has_gpu)
            reports.append((subject, report, result, ok))
            cells = [subject.op, subject.case, result, "-" if report is None else str(len(report.results))]
            cells = [escape(cell) for cell in (*cells, f"{time.monotonic() - started:.1f}")]
            table.add_row(*cells, style=None if ok else "red")
            update(len(reports), subject.op)
    console.print(table)
    for _, report, _, ok in reports:
        if report is not None and not ok:
            console.print(f"\n{report}", markup=False, highlight=False)
    all_ok = all(ok for *_, ok in reports)
    console.print(f"\n{'OK' if all_ok else 'FAILED'}", style="bold")
    found = [
        {
            "op": subject.op,
            "case": subject.case,
            "result": result,
            "ok": ok,
            "report": None if report is None else dataclasses.asdict(report),
        }
        for subject, report, result, ok in reports
    ]
    return int(not all_ok), found


def _check(subject: Subject, make: Make, has_gpu: bool) -> tuple[Report | None, str, bool]:
    """(report, one line about it, whether it is as expected)."""
    try:
        function, sample = subject.make(make)
        transforms = subject.transforms if has_gpu else ()
        report = check_invariance(function, sample, transforms=transforms, gradients=subject.gradients)
    except Exception as error:  # one op's failure does not hide another's
        return None, f"{type(error).__name__}: {error}", False
    differing = [result.transform for result in report.results if result.status == "differs"]
    failed = ", ".join(dict.fromkeys(result.transform for result in report.results if result.status != "ok"))
    if subject.invariant:
        if subject.gradients and (missing := missing_gradients(function, sample, report)):
            return report, f"NOT CHECKED, there is none: {missing}", False
        passed = "invariant" if has_gpu else "deterministic"
        return report, passed if report.ok else f"NOT INVARIANT: {failed}", report.ok
    # A function that is not deterministic, or that fails, is no proof that the checker sees what it should
    if "T1" in differing and "B0" not in failed:
        return report, f"not invariant (expected: positive control): {failed}", True
    return report, "NOT CAUGHT: the positive control passed as invariant", False


def missing_gradients(function: Callable, sample: Sequence[Tensor], report: Report) -> str:
    """Names of the gradients that a report should have compared, and has not: the op did not differentiate."""
    names = [f"input[{i}]" for i, tensor in enumerate(sample) if tensor.is_floating_point()]
    if isinstance(function, torch.nn.Module):
        names += [f"parameter {name}" for name, _ in function.named_parameters()]
    return ", ".join(f"grad of {name}" for name in names if f"grad of {name}" not in report.tensors)


def _subjects(has_gpu: bool) -> list[Subject]:
    """All that is checked; on a CPU of the smallest size alone, and without the positive control."""
    subjects = []
    for width in (1000, 4096, 16384) if has_gpu else (256,):
        subjects += _norms(width)
    for width in (1000, 4096, 151936) if has_gpu else (256,):
        subjects += _reductions(width)
    for n, k in ((4096, 4096), (1024, 4096), (4096, 14336)) if has_gpu else ((128, 256),):
        subjects += _products(n, k)
    for n, k in ((1024, 128), (128, 1024), (33, 60)) if has_gpu else ((24, 16),):
        subjects += _batches(n, k)
    for v, k in ((32000, 4096), (50257, 768)) if has_gpu else ((130, 64),):
        subjects.append(_log_prob(v, k))
    for channels in (1280, 4096) if has_gpu else (64,):
        subjects += _connections(channels)
    is_hopper = has_gpu and torch.cuda.get_device_capability() == (9, 0)
    if is_hopper or not has_gpu:  # elsewhere attention has no kernels
        for head_size, length in ((64, 200), (128, 2100)) if has_gpu else ((8, 20),):
            subjects += _attention(head_size, length)
    if is_hopper:
        # cuBLAS splits K for up to 32 rows of it on an H200; what it does elsewhere was not measured
        control = Subject("torch.mm", "4096x4096", _control, ROW_TRANSFORMS, invariant=False)
        subjects.append(control)
    return subjects


def _control(make: Make) -> tuple[Callable, tuple[Tensor, ...]]:
    weight = make.normal(4096, 4096).t()
    return lambda x: torch.mm(x, weight), (make.batch(4096),)


def _norms(width: int) -> list[Subject]:
    from cute_kernels import layer_norm, nn, rms_norm

    def plain(op):
        def make(m: Make):
            weight, bias = m.normal(width, mean=1.0, std=0.1), m.normal(width, std=0.1)
            return lambda x: op(x, weight, bias=bias), (m.batch(width),)

        return make

    def residual(op):
        def make(m: Make):
            weight = m.normal(width, mean=1.0, std=0.1)

            def function(x, residual):
                return op(x, weight, residual=residual, return_residual=True)

            return function, (m.batch(width), m.batch(width))

        return make

    def module(kind):
        return lambda m: (kind(width, device=m.device, dtype=DTYPE), (m.batch(width),))

    # dw and db are summed in an order that the number of rows decides (rms_norm's contract): no B1
    found = []
    for op in (rms_norm, layer_norm):
        found.append(Subject(op.__name__, f"{width}, weight and bias", plain(op), ROW_TRANSFORMS))
        found.append(Subject(op.__name__, f"{width}, weight and residual", residual(op), ROW_TRANSFORMS))
    for kind in (nn.RMSNorm, nn.LayerNorm):
        found.append(Subject(f"nn.{kind.__name__}", str(width), module(kind), ROW_TRANSFORMS))
    return found


def _reductions(width: int) -> list[Subject]:
    from cute_kernels import reduction

    def plain(function):
        return lambda m: (function, (m.batch(width),))

    functions = {
        "softmax": reduction.softmax,
        "log_softmax": reduction.log_softmax,
        "sum": lambda x: reduction.sum(x, 1),
        "mean": lambda x: reduction.mean(x.view(len(x), 8, -1), 1),
    }
    return [
        Subject(f"reduction.{op}", str(width), plain(function), ROW_TRANSFORMS) for op, function in functions.items()
    ]


def _products(n: int, k: int) -> list[Subject]:
    """With a weight (n, k)."""
    import cute_kernels
    from cute_kernels import nn

    def product(transposed: bool):
        def make(m: Make):
            b = m.normal(n, k).t() if transposed else m.normal(k, n)
            return lambda a: cute_kernels.mm(a, b), (m.batch(k),)

        return make

    def fused(activation: str | None, has_bias: bool):
        def make(m: Make):
            weight, bias = m.normal(n, k, std=k**-0.5), m.normal(n, std=0.1) if has_bias else None
            return lambda x: cute_kernels.linear(x, weight, bias, activation=activation), (m.batch(k),)

        return make

    def module(main_grad: bool):
        def make(m: Make):
            layer = nn.Linear(k, n, device=m.device, dtype=DTYPE)
            if main_grad:
                layer.weight.main_grad = torch.zeros(n, k, device=m.device)
            return layer, (m.batch(k),)

        return make

    shape = f"{n}x{k}"
    found = [Subject("mm", f"{shape}, b {'K' if t else 'N'}-major", product(t)) for t in (True, False)]
    found.append(Subject("linear", shape, fused(None, False)))
    for activation in (None, "relu", "silu", "gelu"):
        found.append(Subject("linear", f"{shape}, bias, {activation}", fused(activation, True)))
    found += [Subject("nn.Linear", shape + ", main_grad" * with_it, module(with_it)) for with_it in (False, True)]
    return found


def _batches(n: int, k: int) -> list[Subject]:
    """Products of batches with (k, n): rows of three entries that lie between each other's; whole entries."""
    import cute_kernels

    def of_rows(m: Make):
        b = m.normal(3, k, n)
        return lambda a: cute_kernels.bmm(a.transpose(0, 1), b).transpose(0, 1), (m.normal(m.rows, 3, k),)

    def of_entries(m: Make):
        return cute_kernels.bmm, (m.normal(m.rows, 7, k), m.normal(m.rows, k, n))

    found = [("rows", of_rows), ("entries", of_entries)]
    return [Subject("bmm", f"{n}x{k}, {name}", make, ROW_TRANSFORMS) for name, make in found]


def _log_prob(v: int, k: int) -> Subject:
    """Over a vocabulary of v. A target for each row comes of the row itself: it moves with it."""
    import cute_kernels

    def make(m: Make):
        weight = m.normal(v, k, std=2 * k**-0.5)

        def function(x):
            target = (x[:, 0].detach().float().nan_to_num(0.0, 0.0, 0.0).abs() * 1000).long() % v
            return cute_kernels.linear_log_prob(x, weight, target)

        return function, (m.batch(k),)

    return Subject("linear_log_prob", f"{v}x{k}", make)


def _connections(channels: int) -> list[Subject]:
    """A sublayer with its hyper-connection, of four streams in either order."""
    from cute_kernels import mhc

    def connected(layout: str):
        def make(m: Make):
            phi = m.normal(24, 4 * channels, std=(4 * channels) ** -0.5).float()
            alpha, beta = torch.ones(3, device=m.device), m.normal(24).float()
            sides = (4, channels) if layout == "streams" else (channels, 4)

            def function(x):
                return mhc.hyper_connection(x, torch.sin, phi, alpha, beta, layout=layout)

            return function, (m.normal(m.rows, *sides),)

        return make

    found = []
    for layout in ("streams", "channels"):
        found.append(Subject("mhc.hyper_connection", f"4x{channels}, {layout}", connected(layout), ROW_TRANSFORMS))
    return found


def _attention(head_size: int, length: int) -> list[Subject]:
    """Attention of sequences of one length, and of a token behind as many cached keys, without and with a window."""
    import cute_kernels

    def whole(m: Make):
        rows = min(m.rows, 65)  # sequences
        return lambda q, k, v: cute_kernels.attention(q, k, v, causal=True), tuple(
            m.normal(rows, length, heads, head_size) for heads in (4, 2, 2)
        )

    def cached(window: tuple[int, None] | None):
        def make(m: Make):
            def function(q, k, v):
                used = torch.full((len(q),), length, dtype=torch.int32, device=q.device)
                return cute_kernels.attention_with_kv_cache(q, k, v, cache_seqlens=used, window=window)

            rows = min(m.rows, 65)
            sizes = ((1, 4), (length, 2), (length, 2))
            return function, tuple(m.normal(rows, n, heads, head_size) for n, heads in sizes)

        return make

    shape = f"{length}x{head_size}"
    options = {"transforms": ROW_TRANSFORMS, "gradients": False}
    return [
        Subject("attention", f"{shape}, causal", whole, ROW_TRANSFORMS),
        Subject("attention_with_kv_cache", f"{shape}, a token", cached(None), **options),
        Subject("attention_with_kv_cache", f"{shape}, a token, window", cached((length // 2, None)), **options),
    ]
