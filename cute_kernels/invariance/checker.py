"""check_invariance: does a row of a function's result depend on the other rows? Bit by bit, forward and gradients."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cute_kernels.invariance.runs import FILLER, Rows, Run, Runner, has_rows, summary
from cute_kernels.runtime.checks import expect, expect_tensor
from jit_cache.files import write_whole

TRANSFORMS = {
    "T1": "population: the first m rows alone",
    "T2": "position: the same rows, rotated",
    "T3": "neighbours: other rows replaced",
    "T4": "padding: rows put before and after",
    "T5": "splitting: the batch in chunks",
    "T6": "selection: rows gathered and permuted",
    "B1": "parameter gradients: zero rows appended",
}
ROW_TRANSFORMS = tuple(name for name in TRANSFORMS if name.startswith("T"))
SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 100, 128, 257, 512)
NOT_DETERMINISTIC = "the function itself is not deterministic (dropout, atomics, state?): no transform was tried"
ON_CPU = (
    "all tensors are on the CPU, where this library's ops are plain torch, whose bits depend on the number of rows: "
    "this report says nothing about the kernels; run the same check with CUDA tensors"
)
MAX_CHUNKS = 64  # of one batch, unless the caller names the sizes: 10,000 rows one by one would take minutes


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first element of a tensor that differs from the untransformed run."""

    tensor: str  # "output[1]", "module layers.0", "grad of input[0]", ...
    # In the untransformed run, so that index[0] is the row of the sample; the last of a complex tensor: 1 if imaginary
    index: tuple[int, ...]
    position: int | None  # where the transformed input had that row; None for a parameter's gradient
    expected_bits: str
    got_bits: str
    expected: str
    got: str
    count: int  # elements of this tensor that differ in this call, of total
    total: int

    def __str__(self) -> str:
        place = "" if self.position is None else f" at row {self.position}"
        return (
            f"{self.tensor} at {list(self.index)}: {self.expected_bits} ({self.expected}) became {self.got_bits} "
            f"({self.got}){place}; {self.count} of {self.total} elements differ"
        )


@dataclasses.dataclass(frozen=True)
class Result:
    transform: str  # B0, T1 to T6, B1
    case: str
    status: str  # "ok", "differs" or "error"
    difference: Difference | None = None
    message: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings of ``check_invariance``; true if nothing differs."""

    target: str
    rows: int
    seed: int
    tensors: tuple[str, ...]  # compared, in order of execution: forward, then backward
    notes: tuple[str, ...]  # what was not compared, and why
    results: tuple[Result, ...]

    @property
    def ok(self) -> bool:
        return bool(self.results) and all(result.status == "ok" for result in self.results)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def first_difference(self) -> Difference | None:
        """The difference in the tensor that is computed first."""
        found = [result.difference for result in self.results if result.difference is not None]
        return min(found, key=lambda difference: self.tensors.index(difference.tensor), default=None)

    def raise_if_failed(self) -> None:
        """Raises AssertionError with the table, unless all is well."""
        if not self.ok:
            raise AssertionError(str(self))

    def save(self, path: str | Path) -> None:
        """Writes the report as JSON. Raises OSError; a file that it replaces is then still there."""
        write_whole(path, (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode())

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        verdict = "invariant" if self.ok else "NOT INVARIANT"
        table = Table(title=f"{self.target}: {verdict} ({self.rows} rows)", box=None, pad_edge=False)
        for column in ("transform", "cases", "status", "first failure"):
            table.add_column(column, overflow="fold")
        for transform in dict.fromkeys(result.transform for result in self.results):
            results = [result for result in self.results if result.transform == transform]
            failed = [result for result in results if result.status != "ok"]
            name = f"{transform} {TRANSFORMS.get(transform, 'the same call again')}"
            status, detail = "ok", ""
            if failed:
                statuses = {result.status for result in failed}
                status = f"{len(failed)} {' / '.join(sorted(statuses))}"
                detail = ". ".join(map(str, filter(None, (failed[0].difference, failed[0].message))))
                detail = f"{failed[0].case}: {detail}"
            table.add_row(name, str(len(results)), status, detail)
        text = io.StringIO()
        console = Console(file=text, width=160, markup=False, highlight=False, emoji=False)
        console.print(table)
        if (first := self.first_difference) is not None:
            console.print(f"first in order of execution: {first}")
        for note in self.notes:
            console.print(f"note: {note}")
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def check_invariance(
    module_or_fn: Callable[..., Any],
    sample: Tensor | Sequence[Tensor],
    *,
    gradients: bool = True,
    transforms: Sequence[str] = ROW_TRANSFORMS,
    sizes: Sequence[int] | None = None,
    seed: int = 0,
) -> Report:
    """Compare a row's results and gradients, bit by bit, between one batch and transformed batches that hold the row.

    Args:
        module_or_fn: called with the sample's tensors; returns a tensor, or tuples, lists, mappings and dataclasses of
            them. Arguments without a batch dimension, such as weights, belong into it: a module's parameters,
            ``functools.partial``, or ``lambda x: linear(x, weight)``.
        sample: a tensor (rows, ...) or a sequence of such, at least 2 rows. Dimension 0 is the batch of independent
            rows; in 3-D activations it is the sequence. The function gets contiguous copies. Integer and bool tensors
            are transformed alike, but where a transform makes up a row they get one of the sample's, so that token ids
            stay valid.
        gradients: also differentiate, with a fixed random incoming gradient for each row of each output, transformed as
            the row is (a NaN row gets a NaN gradient). False checks the function under ``torch.no_grad()``.
        transforms: which of T1 to T6 and, for a module's parameters, B1 (``tuple(TRANSFORMS)``: all). B0, the same call
            again, always runs.
        sizes: numbers of rows for T1 and T5, each from 1 to rows - 1; default: those of ``SIZES`` that fit.
        seed: of incoming gradients, made-up rows and permutations. torch's own generators are not touched.

    Returns:
        A ``Report``, true if nothing differs. For a module every submodule's output, and the gradient of its input, is
        compared too, so that ``report.first_difference`` names the first one that differs.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, the expected value and the given one. Errors of the
            function on the sample itself pass through.

    Numerics:
        Equal means the same raw bits: +0 is not -0, and NaNs are equal if their bits are. Gradients of a module's
        parameters are sums over rows: they, or the sums in ``main_grad``, are held to B0 and, on request, B1 (trailing
        rows of zeros with zero incoming gradients) alone. B1 holds where rows are added in their order, as by products;
        in norms and hyper-connections the number of rows decides about the order. If rows differ in B0 the function is
        not deterministic, and nothing else is run.

    A prompt against decoding: the rows are the tokens of one sequence, and ``transforms=("T5",)`` splits them, with
    ``sizes=(1,)`` token by token. The function gets tokens and their positions, (S,) each, begins a new cache where the
    first position is 0, and returns the tokens' logits. Without ``gradients``.

    Parameters' ``grad`` and ``main_grad``, buffers, hooks and the training mode are left as they were. All activations
    and their gradients of two runs are kept in memory. On a CPU the ops are plain torch, which is not invariant: a note
    in the report says so where all tensors are there.

    Example:
        >>> import torch
        >>> from cute_kernels import check_invariance
        >>> bool(check_invariance(torch.square, torch.ones(4, 8)))
        True
        >>> report = check_invariance(lambda x: x - x.mean(0), torch.arange(8.0).view(4, 2))
        >>> report.ok, report.first_difference.tensor
        (False, 'output')
    """
    inputs = _check_arguments(module_or_fn, sample, gradients, transforms, sizes, seed)
    rows = list(range(len(inputs[0])))
    runner = Runner(module_or_fn, inputs, gradients, seed)
    with runner.hooked():
        runner.survey(rows)
        base = runner.run(rows)
        results = [_check_case(runner, base, "B0", f"again, {i}", [rows]) for i in (1, 2)]
        if any(_blames_function(result, runner) for result in results):
            runner.note(NOT_DETERMINISTIC)
            transforms = ()
        for transform in transforms:
            if transform != "B1" or runner.parameters:
                for case in _cases(transform, len(rows), sizes, seed):
                    results.append(_check_case(runner, base, transform, *case))
    if all(tensor.device.type == "cpu" for tensor in (*inputs, *base.rows.values(), *base.sums.values())):
        runner.note(ON_CPU)
    tensors = (*runner.compared, *base.sums)
    return Report(_name(module_or_fn), len(rows), seed, tensors, tuple(runner.notes), tuple(results))


def _blames_function(result: Result, runner: Runner) -> bool:
    """Whether the same call again failed or gave other rows: then no difference tells of a transform."""
    return result.status == "error" or (result.difference is not None and result.difference.tensor in runner.compared)


def _check_arguments(function, sample, gradients, transforms, sizes, seed) -> tuple[Tensor, ...]:
    op = "check_invariance"
    expect(callable(function), op, "module_or_fn", "be callable", type(function).__name__, TypeError)
    inputs = (sample,) if isinstance(sample, Tensor) else sample
    expect(isinstance(inputs, (tuple, list)), op, "sample", "be a tensor or tensors", type(sample).__name__, TypeError)
    expect(len(inputs) > 0, op, "sample", "have a tensor", "none")
    for i, tensor in enumerate(inputs):
        expect_tensor(op, f"sample[{i}]", tensor)
        expect(not tensor.is_complex(), op, f"sample[{i}]", "be real", tensor.dtype, TypeError)
        expect(tensor.dim() > 0, op, f"sample[{i}]", "have dimension 0 as its batch", "a scalar")
        expect(len(tensor) == len(inputs[0]), op, f"sample[{i}]", f"have {len(inputs[0])} rows", len(tensor))
    rows = len(inputs[0])
    expect(rows >= 2, op, "sample", "have at least 2 rows", rows)
    expect(isinstance(gradients, bool), op, "gradients", "be a bool", type(gradients).__name__, TypeError)
    expect(isinstance(transforms, (tuple, list)), op, "transforms", "be a tuple", type(transforms).__name__, TypeError)
    for name in transforms:
        expect(
            isinstance(name, str) and name in TRANSFORMS, op, "transforms", f"be of {', '.join(TRANSFORMS)}", repr(name)
        )
    expect(isinstance(sizes, (tuple, list, type(None))), op, "sizes", "be a tuple", type(sizes).__name__, TypeError)
    for size in (1,) if sizes is None else sizes or (0,):
        expect(type(size) is int and 0 < size < rows, op, "sizes", f"be integers from 1 to {rows - 1}", sizes)
    expect(type(seed) is int, op, "seed", "be an integer", type(seed).__name__, TypeError)
    expect(-(2**63) <= seed < 2**63, op, "seed", "fit into 64 bits", seed)
    return tuple(inputs)


def _cases(transform: str, rows: int, sizes: Sequence[int] | None, seed: int) -> Iterator[tuple[str, list[Rows], str]]:
    """(name, the rows of each call, what FILLER rows hold): all of a transform's cases are of this form."""
    every = list(range(rows))
    fitting = sizes or [size for size in SIZES if size < rows]
    if transform == "T1":
        for size in fitting:
            yield f"{size} of {rows} rows", [every[:size]], "zeros"
    elif transform == "T2":
        for shift in sorted({shift for shift in (1, 77, rows // 2, rows - 1) if shift < rows}):
            yield f"rotated by {shift}", [every[-shift:] + every[:-shift]], "zeros"
    elif transform == "T3":
        middle = rows // 2
        for filler in ("noise", "large", "inf", "nan"):
            yield f"row {middle} {filler}", [[FILLER if row == middle else row for row in every]], filler
            yield f"odd rows {filler}", [[FILLER if row % 2 else row for row in every]], filler
    elif transform == "T4":
        for before, after in ((0, 1), (0, 28), (1, 0), (16, 0), (3, 61)):
            for filler in ("zeros", "noise", "nan"):
                padded = [FILLER] * before + every + [FILLER] * after
                yield f"{before} rows before, {after} after, {filler}", [padded], filler
    elif transform == "T5":
        for size in sizes or [size for size in fitting if rows <= MAX_CHUNKS * size]:
            yield f"chunks of {size}", [every[i : i + size] for i in range(0, rows, size)], "zeros"
        for size in sorted({size for size in (1, 100, rows // 2, rows - 1) if size < rows}):
            yield f"{size} + {rows - size}", [every[:size], every[size:]], "zeros"
    elif transform == "T6":
        shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
        yield "permuted", [shuffled], "zeros"
        yield "reversed", [every[::-1]], "zeros"
        yield "every third", [every[::3]], "zeros"
        yield "half, permuted", [shuffled[: (rows + 1) // 2]], "zeros"
        yield "some rows twice", [shuffled[: (rows + 1) // 2] + shuffled[:5]], "zeros"
    else:
        for after in (1, 16, 208):
            yield f"{after} zero rows after", [every + [FILLER] * after], "zeros"


def _check_case(
    runner: Runner, base: Run, transform: str, case: str, calls: Sequence[Rows], filler: str = "zeros"
) -> Result:
    """Runs the calls of one case and compares each with the untransformed run, up to the first difference."""
    try:
        for rows in calls:
            run = runner.run(rows, filler)
            difference = None if transform == "B1" else _compare_rows(runner, base, run, rows)
            if difference is None and transform in ("B0", "B1"):
                difference = _compare_sums(base, run)
            if difference is not None:
                return Result(transform, case, "differs", difference)
    except Exception as error:
        return Result(transform, case, "error", message=summary(error))
    return Result(transform, case, "ok")


def _compare_rows(runner: Runner, base: Run, run: Run, rows: Rows) -> Difference | None:
    kept = [position for position, row in enumerate(rows) if row != FILLER]
    for name in runner.compared:
        got, want = run.rows.get(name), base.rows[name]
        if not has_rows(got, len(rows)):
            shape = "missing" if got is None else f"of shape {tuple(got.shape)}"
            if not name.startswith(("module ", "grad of module ")):
                raise ValueError(f"{name} is {shape} for {len(rows)} rows")
            runner.note(f"{name} is not compared in all cases: it is {shape} for {len(rows)} rows")
            continue
        want = want[torch.tensor([rows[position] for position in kept], device=want.device)]
        got = got[torch.tensor(kept, device=got.device)]
        if difference := _first_difference(name, want, got):
            position = kept[difference.index[0]]
            return dataclasses.replace(difference, index=(rows[position], *difference.index[1:]), position=position)
    for name in run.rows.keys() - base.rows.keys():
        if name.startswith(("output", "grad of input")) and has_rows(run.rows[name], len(rows)):
            raise ValueError(f"{name} is there for these {len(rows)} rows, but not for the sample")
    return None


def _compare_sums(base: Run, run: Run) -> Difference | None:
    if base.sums.keys() != run.sums.keys():
        raise ValueError(f"{', '.join(sorted(base.sums.keys() ^ run.sums.keys()))}: not there for all numbers of rows")
    for name, want in base.sums.items():
        if difference := _first_difference(name, want, run.sums[name]):
            return difference
    return None


def _first_difference(name: str, want: Tensor, got: Tensor) -> Difference | None:
    if (got.dtype, got.shape[1:]) != (want.dtype, want.shape[1:]):
        raise ValueError(f"{name} is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}")
    if want.is_complex():
        want, got = torch.view_as_real(want), torch.view_as_real(got)
    differs = _bits(want) != _bits(got)
    count = int(differs.sum())
    if not count:
        return None
    flat = int(differs.flatten().byte().argmax())  # the first maximum
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat, device="cpu"), want.shape))
    texts = []
    for tensor in (want, got):
        value = tensor[index]
        bits = int(_bits(value)) & (1 << 8 * value.element_size()) - 1
        texts.append((f"0x{bits:0{2 * value.element_size()}x}", str(value.item())))
    (want_bits, want_text), (got_bits, got_text) = texts
    return Difference(name, index, None, want_bits, got_bits, want_text, got_text, count, differs.numel())


def _bits(tensor: Tensor) -> Tensor:
    """The raw bits as integers: +0 is not -0, a NaN equals itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def _name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
