"""Measures GPU calls and writes what was found as JSON lines.

What a time is: the call is captured in a CUDA graph of its own; the graph is replayed between two CUDA events after a
256 MiB buffer has been zeroed, so the L2 cache holds nothing of the inputs. All providers of a case, and an elementwise
copy kernel that moves as many bytes as the op must move at least, take turns in one run; the median over the
repetitions is reported. What is checked is what was timed: the outputs of the graph are overwritten with NaN, the graph
is replayed once more and the result is compared with an fp64 reference. A wrong result is reported and never saved.
README.md says why each choice was made.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import hashlib
import importlib.util
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cute_kernels.cli import env
from jit_cache.files import append_whole

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "bench" / "results"

L2_FLUSH_BYTES = 256 << 20
REPETITIONS = 100
QUICK_REPETITIONS = 30
PROFILES = 3  # of a call at most: right after another's end the profiler at times finds no kernel
WARM_UP_SECONDS = 0.05  # after a compilation the GPU has been idle for seconds and its clocks are down
ERROR_FACTOR = 3.0  # a result may be this many times as far from fp64 as torch's own op in the same dtype

Call = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Case:
    """One measured case, whoever computes it.

    bytes: the least that the op must move through device memory; flops: floating-point operations;
    goal: the share of the same-bytes copy's speed that we aim at (1.0 = as fast as the copy), None if there is no goal.
    """

    family: str
    op: str
    direction: str
    shape: str
    dtype: str
    variant: str
    bytes: int
    flops: int
    goal: float | None = None

    @property
    def name(self) -> str:
        return f"{self.op}.{self.direction}.{self.shape}.{self.dtype}.{self.variant}"


@dataclass(frozen=True)
class Result:
    """The measurements of one provider.

    Times in microseconds; error: output's name -> relative rms against fp64; kernels: name -> us, L2 warm; launches:
    of kernels in one call, 0 where nobody looked.
    """

    us: float
    us_min: float
    us_max: float
    host_us: float
    peak_bytes: int
    error: dict[str, float]
    kernels: dict[str, float]
    launches: int = 0


@dataclass(frozen=True)
class Measurement:
    """All that one run found for one case; failures: provider -> what went wrong."""

    case: Case
    copy_us: float
    results: dict[str, Result]
    failures: dict[str, str]


@dataclass(frozen=True)
class Captured:
    """A captured call: replay() enqueues it, outputs are the tensors that it writes.

    The call is held because it holds the tensors that the replay reads: a graph keeps only what it allocated itself.
    """

    call: Call
    replay: Callable[[], None]
    outputs: tuple[Tensor, ...]


class Device(Protocol):
    """The part of a device that `measure` uses; the tests put a fake here."""

    name: str

    def warm_up(self, call: Call) -> None: ...
    def capture(self, call: Call) -> Captured: ...
    def copy(self, num_bytes: int) -> Captured: ...
    def time_us(self, calls: Sequence[Captured], repetitions: int) -> list[list[float]]: ...
    def host_us(self, calls: Sequence[Call]) -> list[float]: ...
    def peak_bytes(self, call: Call) -> int: ...
    def kernels(self, call: Call) -> tuple[dict[str, float], int]: ...
    def synchronize(self) -> None: ...


def measure(
    case: Case,
    makers: Mapping[str, Callable[[], Call | None]],
    truth: Mapping[str, Tensor],
    device: Device,
    *,
    repetitions: int = REPETITIONS,
    breakdown: bool = True,
    yardstick: str = "torch",
    sample: Callable[[Tensor], Tensor] | None = None,
    start: Mapping[str, Tensor] | None = None,
    floors: Mapping[str, Callable[[], Call | None]] | None = None,
    least: Mapping[str, float] | None = None,
) -> Measurement:
    """Times and checks the providers of one case.

    makers: provider -> a function that makes its call: no arguments, tensors in the order of `truth` returned;
        None: it has no such op. One is the yardstick, a provider of torch's own op, whose error is what the others'
        are compared with: without it there are no results
    truth: output's name -> fp64 reference
    breakdown: whether to profile the kernels of each call
    sample: what of an output is compared with `truth`; None: all of it
    start: output's name -> what it holds before the replay that is checked, where the op adds to it
    floors: like `makers`, for calls that compute less than the op: timed in turn with the others, not checked
    least: output's name -> an error that counts as rounding, where rounding to the output's dtype is not more
    A provider that raises or is wrong goes to `failures` and does not stop the others.
    """
    captured: dict[str, Captured] = {}
    peak_bytes: dict[str, int] = {}
    failures: dict[str, str] = {}
    floors = floors or {}
    for provider, make in {**makers, **floors}.items():
        try:
            call = make()
            if call is None:
                continue
            device.warm_up(call)
            peak_bytes[provider] = device.peak_bytes(call)
            captured[provider] = device.capture(call)
        except Exception as error:  # any provider may fail in its own way; the others are still worth measuring
            failures[provider] = describe(error)

    unchecked = dict.fromkeys(captured, f"no {yardstick} to compare it with")
    if yardstick not in captured:
        return Measurement(case, math.nan, {}, unchecked | failures)
    host_us = dict(zip(captured, device.host_us([graph.call for graph in captured.values()]), strict=True))
    order = [*captured.values(), device.copy(case.bytes)]
    *times, copy_times = device.time_us(order, repetitions)
    copy_us = statistics.median(copy_times)
    errors: dict[str, dict[str, float]] = {}
    for provider, graph in captured.items():
        try:
            errors[provider] = {} if provider in floors else replayed_error(graph, truth, device, sample, start)
        except Exception as error:  # of an output of integers, say
            failures[provider] = describe(error)
    if yardstick not in errors:
        return Measurement(case, copy_us, {}, unchecked | failures)
    limit = error_limits(errors[yardstick], captured[yardstick], truth, least)

    results: dict[str, Result] = {}
    for provider, samples in zip(captured, times, strict=True):
        if provider not in errors:
            continue
        wrong = [
            f"{name} {errors[provider][name]:.1e} > {limit[name]:.1e}"
            for name in errors[provider]
            if not errors[provider][name] <= limit[name]
        ]
        if wrong:
            failures[provider] = "wrong result: " + ", ".join(wrong)
            continue
        kernels, launches = profiled(captured[provider].call, device, provider, failures) if breakdown else ({}, 0)
        results[provider] = Result(
            us=statistics.median(samples),
            us_min=min(samples),
            us_max=max(samples),
            host_us=host_us[provider],
            peak_bytes=peak_bytes[provider],
            error=errors[provider],
            kernels=kernels,
            launches=launches,
        )
    return Measurement(case, copy_us, results, failures)


def profiled(call: Call, device: Device, provider: str, failures: dict[str, str]) -> tuple[dict[str, float], int]:
    """The kernels of a call and how many it launches; none if the profiler fails, which goes to `failures`."""
    try:
        return device.kernels(call)
    except Exception as error:  # the times are still worth keeping
        failures[provider] = f"its kernels: {describe(error)}"
        return {}, 0


def run(
    cases: Iterable[tuple[Any, Sequence[Case]]],
    measure_case: Callable[..., Sequence[Measurement]],
    providers: Iterable[str],
    make_device: Callable[[], Device],
    *,
    packages: Mapping[str, Sequence[str]] | None = None,
    compile_own_kernels: Callable[[Sequence[Any], Device], None] | None = None,
    pattern: str = "",
    repetitions: int = REPETITIONS,
    breakdown: bool = True,
    time_limit: float | None = None,
    commit: str | None = None,
    outputs: Sequence[Path] = (),
) -> list[Measurement]:
    """Measures the cases whose name matches `pattern`; appends the lines of each to `outputs` as soon as it is done.

    cases: what is measured, and the case of each of its directions
    measure_case: takes what is measured, its directions that match, the providers, the device; repetitions, breakdown
    packages: as of `installed`
    compile_own_kernels: called before a peer is imported, with all that is measured
    time_limit: seconds after which no further case is begun
    A case that raises has failed for every provider and does not stop the others.
    """
    started = time.monotonic()
    providers = installed(dict.fromkeys(providers), packages or {})
    selected = [(what, [case for case in its if re.search(pattern, case.name)]) for what, its in cases]
    selected = [(what, found) for what, found in selected if found]
    console = wide_console()
    measurements: list[Measurement] = []
    with bench_stream():
        device = make_device()
        if compile_own_kernels is not None and "cute_kernels" in providers:
            compile_own_kernels([what for what, _ in selected], device)
            console.print(f"our kernels ready after {time.monotonic() - started:.1f} s", highlight=False)
        about = environment(commit)
        for done, (what, its) in enumerate(selected):
            if time_limit is not None and time.monotonic() - started > time_limit:
                left = f"{len(selected) - done} of {len(selected)} cases left"
                console.print(f"time limit: {left}, from {its[0].name} on")
                break
            directions = [case.direction for case in its]
            try:
                found = measure_case(what, directions, providers, device, repetitions=repetitions, breakdown=breakdown)
            except Exception as error:  # memory ran out, say: the other cases are still worth measuring
                failures = dict.fromkeys(providers, describe(error))
                found = [Measurement(case, math.nan, {}, failures) for case in its]
            measurements += found
            for measurement in found:
                print_progress(measurement, console)
                for path in outputs:
                    append_lines(path, lines(measurement, about))
            gc.collect()  # captured graphs hold outputs of up to 5.6 GB a provider
            if done == 0:
                gc.freeze()  # modules, kernels: looking at them after each case took 0.23 s on a CPU of 2.5 GHz
            torch.cuda.empty_cache()
    console.print(f"{len(measurements)} measurements in {time.monotonic() - started:.0f} s", highlight=False)
    return measurements


def installed(providers: Iterable[str], packages: Mapping[str, Sequence[str]]) -> list[str]:
    """Those of the providers that can be imported; says which cannot.

    packages: what a provider imports, where it is not torch
    """
    found = []
    for provider in providers:
        missing = [package for package in packages.get(provider, ()) if not _is_installed(package)]
        if missing:
            print(f"{provider}: {' and '.join(missing)} not installed, skipped")
        else:
            found.append(provider)
    return found


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a package around the module is missing, or too old
        return False


def exit_status(measurements: Sequence[Measurement]) -> int:
    """1 if nothing was measured, a case has no results or ours failed."""
    return int(not measurements or any("cute_kernels" in m.failures or not m.results for m in measurements))


def replayed_error(
    graph: Captured,
    truth: Mapping[str, Tensor],
    device: Device,
    sample: Callable[[Tensor], Tensor] | None = None,
    start: Mapping[str, Tensor] | None = None,
) -> dict[str, float]:
    """Relative rms error of what a replay writes into outputs that held NaN before; inf for a wrong shape or number.

    An output named in `start` holds that instead: the op adds to it.
    """
    if len(graph.outputs) != len(truth):
        return dict.fromkeys(truth, float("inf"))
    for name, output in zip(truth, graph.outputs, strict=True):
        if start and name in start:
            output.copy_(start[name])
        else:
            output.fill_(float("nan"))
    graph.replay()
    device.synchronize()
    return {
        name: relative_rms(sample(output) if sample else output, truth[name])
        for name, output in zip(truth, graph.outputs, strict=True)
    }


def relative_rms(output: Tensor, truth: Tensor) -> float:
    """rms(output - truth) / rms(truth), in fp64. NaN if the output holds one."""
    if output.shape != truth.shape:
        return float("inf")
    difference = torch.linalg.vector_norm(output.double() - truth)
    return float(difference / torch.linalg.vector_norm(truth))


def error_limits(
    torch_error: Mapping[str, float],
    torch_call: Captured,
    truth: Mapping[str, Tensor],
    least: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """The largest error that still counts as right: a small multiple of torch's, or of the rounding to the dtype."""
    least = least or {}
    rounding = (torch.finfo(output.dtype).eps / 4 for output in torch_call.outputs)
    return {
        name: ERROR_FACTOR * max(torch_error[name], unit, least.get(name, 0.0))
        for name, unit in zip(truth, rounding, strict=True)
    }


class CudaDevice:
    """Measures on the current CUDA device.

    warm_up_seconds: how long the calls take turns before they are timed.
    shuffled: each round in another random order, not only from another call on. A kernel that draws much power slows
        the next one; were that always the same one, it would be at a disadvantage.
    host_batches, calls_per_batch: of the calls whose host time is taken.
    Use inside `bench_stream()`: autograd runs a backward on the stream of its forward.
    """

    name = "cuda"

    def __init__(
        self,
        warm_up_seconds: float = WARM_UP_SECONDS,
        shuffled: bool = False,
        host_batches: int = 10,
        calls_per_batch: int = 10,
    ) -> None:
        self._warm_up_seconds = warm_up_seconds
        self._shuffled = shuffled
        self._host_batches = host_batches
        self._calls_per_batch = calls_per_batch
        self._l2_flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def warm_up(self, call: Call) -> None:
        """Lets the call compile, tune and allocate whatever its first runs need."""
        for _ in range(3):
            call()
        torch.cuda.synchronize()

    def capture(self, call: Call) -> Captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            outputs = call()
        return Captured(call, graph.replay, tuple(output.detach() for output in outputs))

    def copy(self, num_bytes: int) -> Captured:
        """An elementwise kernel (not a memcpy) that reads half of the bytes and writes the other half."""
        numel = num_bytes // (2 * torch.float32.itemsize)
        source = torch.randn(numel, device="cuda")
        target = torch.empty_like(source)
        return self.capture(lambda: (torch.neg(source, out=target),))

    def time_us(self, calls: Sequence[Captured], repetitions: int) -> list[list[float]]:
        """Device time of each repetition of each call, in microseconds; each round starts from another call."""
        warm_until = time.perf_counter() + self._warm_up_seconds
        while time.perf_counter() < warm_until:
            self._round(calls, range(len(calls)))
        shuffle = random.Random(0)
        rounds = []
        for repetition in range(repetitions):
            first = repetition % len(calls)
            order = [*range(first, len(calls)), *range(first)]
            if self._shuffled:
                shuffle.shuffle(order)
            rounds.append(self._round(calls, order))
        return [list(samples) for samples in zip(*rounds, strict=True)]

    def _round(self, calls: Sequence[Captured], order: Iterable[int]) -> list[float]:
        # Zeroing takes about 70 us on an H200, longer than the host needs to enqueue the replay: the GPU never waits
        # for the host in between.
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in calls]
        for index in order:
            start, end = events[index]
            self._l2_flush.zero_()
            start.record()
            calls[index].replay()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in events]

    def host_us(self, calls: Sequence[Call]) -> list[float]:
        """Median time that the caller's thread spends in one call, in microseconds, of each of the calls in turn.

        The queue is emptied often, so no launch waits for room.
        """
        samples: list[list[float]] = [[] for _ in calls]
        for _ in range(self._host_batches):
            for call, taken in zip(calls, samples, strict=True):
                torch.cuda.synchronize()
                for _ in range(self._calls_per_batch):
                    start = time.perf_counter_ns()
                    outputs = call()
                    taken.append((time.perf_counter_ns() - start) / 1e3)
                    del outputs
        torch.cuda.synchronize()
        return [statistics.median(taken) for taken in samples]

    def peak_bytes(self, call: Call) -> int:
        """Most device memory held at once during the call, outputs and saved tensors included, inputs not."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del outputs
        return peak

    def kernels(self, call: Call, calls: int = 5) -> tuple[dict[str, float], int]:
        """Device time of each kernel of one call, in microseconds, longest first; how many kernels the call launches.

        L2 warm, means over a few calls. There are fewer names: they are cut, and a kernel may be launched twice.
        """
        # Else the profiler stays, and from now on each call takes more of the host's time (rms_norm 14.9 us, not 11.9)
        os.environ["TEARDOWN_CUPTI"] = "1"
        times: dict[str, float] = {}
        launches = 0
        for _ in range(PROFILES):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(calls):
                    call()
                torch.cuda.synchronize()
            for event in profile.key_averages():
                if event.device_type == torch.autograd.DeviceType.CUDA and event.self_device_time_total > 0:
                    name = event.key[:100]
                    times[name] = times.get(name, 0.0) + event.self_device_time_total / calls
                    launches += event.count
            if times:
                break
        kernels = {name: round(us, 2) for name, us in sorted(times.items(), key=lambda item: -item[1])}
        return kernels, round(launches / calls)


def bench_stream() -> torch.cuda.StreamContext:
    """The stream on which everything is made, warmed up, captured and timed (the default stream cannot be captured)."""
    torch.cuda.synchronize()
    return torch.cuda.stream(torch.cuda.Stream())


def seed(name: str) -> int:
    """A seed that depends on the case's name only, so that every run of a case sees the same inputs."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1


def environment(commit: str | None) -> dict[str, str]:
    """The fields of a line that say when, where and with what it was measured."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit or current_commit(),
        "gpu": torch.cuda.get_device_name(),
        "driver": env.driver_version() or "unknown",
        "torch": torch.__version__,
        "dsl": env.dsl_version(),
    }


def current_commit() -> str:
    """The checkout's commit ("+" behind it: changed since, results apart); else $COMMIT; else "unknown"."""
    git = ["git", "-C", str(REPOSITORY)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        status = [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")
    return commit + ("+" if changed.strip() else "")


def lines(measurement: Measurement, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """One JSON object for each provider that was right."""
    case = measurement.case
    return [
        {
            **environment,
            "family": case.family,
            "op": case.op,
            "direction": case.direction,
            "shape": case.shape,
            "dtype": case.dtype,
            "variant": case.variant,
            "provider": provider,
            "us": round(result.us, 2),
            "us_min": round(result.us_min, 2),
            "us_max": round(result.us_max, 2),
            "bytes": case.bytes,
            "flops": case.flops,
            "copy_us": round(measurement.copy_us, 2),
            "host_us": round(result.host_us, 2),
            "kernels": result.kernels,
            "launches": result.launches,
            "error": {name: float(f"{error:.3e}") for name, error in result.error.items()},
            "peak_bytes": result.peak_bytes,
        }
        for provider, result in measurement.results.items()
    ]


def results_path(gpu: str) -> Path:
    """ "NVIDIA H200" -> bench/results/h200.jsonl"""
    return RESULTS / (re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-") + ".jsonl")


def append_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    append_whole(path, "".join(json.dumps(record) + "\n" for record in records).encode())


def print_table(measurements: Sequence[Measurement], *, title: str = "", console: Console | None = None) -> None:
    """One row a case: our time, its share of the copy's speed and the goal, the peers' times, our worst error."""
    console = console or wide_console()
    peers = list(
        dict.fromkeys(
            provider for m in measurements for provider in [*m.results, *m.failures] if provider != "cute_kernels"
        )
    )
    table = Table(title=title or None, box=None, pad_edge=False)
    for column in ("op", "dir", "shape", "variant"):
        table.add_column(column, no_wrap=True)
    for column in ("ours us", "copy us", "copy/ours", "goal", *peers, "best peer/ours", "error", "host us"):
        table.add_column(column, justify="right", no_wrap=True)
    for m in measurements:
        ours = m.results.get("cute_kernels")
        peer_us = {peer: m.results[peer].us for peer in peers if peer in m.results}
        variant = m.case.variant if m.case.dtype == "bfloat16" else f"{m.case.variant} {m.case.dtype}"
        share = m.copy_us / ours.us if ours else None
        table.add_row(
            m.case.op,
            m.case.direction,
            m.case.shape,
            variant,
            number(ours and ours.us, ".1f", "FAILED" if "cute_kernels" in m.failures else "-"),
            number(m.copy_us, ".1f"),
            number(share, ".3f"),
            "-"
            if m.case.goal is None
            else f"{m.case.goal:.2f}" + ("" if share is None else " ok" if share >= m.case.goal else " --"),
            *(number(peer_us.get(peer), ".1f", "failed" if peer in m.failures else "-") for peer in peers),
            number(min(peer_us.values()) / ours.us if ours and peer_us else None, ".2f"),
            number(max(ours.error.values()) if ours else None, ".1e"),
            number(ours and ours.host_us, ".1f"),
        )
    console.print(table)


def print_progress(measurement: Measurement, console: Console) -> None:
    """One line with the times, and one for each failure."""
    times = [f"{provider} {result.us:.1f}" for provider, result in measurement.results.items()]
    found = ", ".join([*times, f"copy {measurement.copy_us:.1f}"])
    console.print(f"{measurement.case.name}: {found}", markup=False, highlight=False)
    for provider, reason in measurement.failures.items():
        console.print(f"    {provider} failed: {reason}", markup=False, highlight=False)


def describe(error: Exception) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def wide_console() -> Console:
    """A console that does not fold tables when its output goes to a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def number(value: float | None, form: str, absent: str = "-") -> str:
    """A cell of a table."""
    return absent if value is None else format(value, form)


# Command line


def parse(
    family: str,
    description: str,
    quick: str,
    providers: Sequence[str],
    default_providers: Sequence[str],
    names: Callable[[bool], Iterable[str]],
    arguments: Sequence[str] | None,
) -> argparse.Namespace | int:
    """The options of ``python -m bench.bench_<family>``, or the exit status if there is nothing to measure.

    ``names``: the cases' names, given whether ``--quick`` is. ``options.settings`` are arguments of `run`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.bench_{family}", description=description)
    parser.add_argument(
        "--filter", default="", metavar="REGEX", type=_pattern, help="only the cases whose name matches"
    )
    parser.add_argument(
        "--providers",
        default=",".join(default_providers),
        help=f"separated by commas, of {', '.join(providers)}; default: %(default)s",
    )
    parser.add_argument("--reps", type=_count, help=f"repetitions, default {REPETITIONS}")
    parser.add_argument("--quick", action="store_true", help=f"{quick}, fewer repetitions, no per-kernel times")
    parser.add_argument("--no-kernels", action="store_true", help="no per-kernel times")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin no further case after this time")
    parser.add_argument("--save", action="store_true", help="append the lines to bench/results/<gpu>.jsonl")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    parser.add_argument("--commit", help="commit that the lines name; default: the checkout's, else $COMMIT")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(name for name in names(options.quick) if re.search(options.filter, name)))
        return 0
    options.providers = options.providers.split(",")
    if unknown := set(options.providers) - set(providers):
        parser.error(f"unknown providers: {', '.join(sorted(unknown))}; known: {', '.join(providers)}")
    if not torch.cuda.is_available():
        print(f"bench_{family} measures on a GPU, and torch sees none here", file=sys.stderr)
        return 1
    outputs = [options.out] if options.out else []
    if options.save:
        outputs.append(results_path(torch.cuda.get_device_name()))
    options.settings = {
        "pattern": options.filter,
        "repetitions": options.reps or (QUICK_REPETITIONS if options.quick else REPETITIONS),
        "breakdown": not (options.quick or options.no_kernels),
        "time_limit": options.time_limit,
        "commit": options.commit,
        "outputs": outputs,
    }
    return options


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got {text!r}: {error}") from error
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)
