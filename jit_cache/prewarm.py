"""Compile many kernels ahead of time: in parallel, bounded by memory, without a GPU.

A package says what it needs in modules named `prewarm` (`<package>.<family>.prewarm`), or in the top-level module
itself, by `specializations(arch) -> Iterable[tuple[builder, arguments]]`; the arguments include arch. What a model
needs it says in the same places by `for_config(config, arch)`, where config is what a JSON file holds.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .compile import Compiled, format_arguments
from .key import compiler_variables, environment
from .store import settings

Job = tuple[Compiled, tuple[Any, ...]]
Status = Literal["compiled", "disk", "bundle", "failed", "missing"]
_WORKER_BYTES = 2**30  # 0.7 GB measured for a worker that has compiled a GEMM


@dataclass(frozen=True)
class Result:
    """The outcome of one job.

    `status` is `compiled` (now, and stored), `disk` or `bundle` (was there), `failed` (see `error`; one that cannot be
    stored, too) or `missing` (with check=True);
    `seconds` is what the job took; `record` is the kernel's record (see `Kernel`), None if failed or missing.
    """

    builder: str
    arguments: tuple[Any, ...]
    status: Status
    seconds: float
    record: dict[str, Any] | None = None
    error: str | None = None

    @property
    def arch(self) -> str:
        return self.arguments[0]

    @property
    def ok(self) -> bool:
        return self.status not in ("failed", "missing")

    @property
    def message(self) -> str:
        """The kernel and, if there is one, the error."""
        if self.error is None:
            return str(self)
        return self.error if self.error.startswith(str(self)) else f"{self}: {self.error}"

    def as_json(self) -> dict[str, Any]:
        """The entry of a kernel in the output of --json."""
        names = {"kernel": self.builder, "arch": self.arch, "call": str(self), "status": self.status}
        return {**names, "seconds": self.seconds, "error": self.error, "record": self.record}

    def __str__(self) -> str:
        return self.builder + format_arguments(self.arguments)


@dataclass(frozen=True)
class Report:
    """The results in the order of the jobs, and the seconds that all took."""

    results: tuple[Result, ...]
    seconds: float

    @property
    def failed(self) -> tuple[Result, ...]:
        """The jobs that failed or, with check=True, are missing."""
        return tuple(result for result in self.results if not result.ok)

    @property
    def ok(self) -> bool:
        return not self.failed

    def as_json(self) -> dict[str, Any]:
        """The whole output of --json."""
        return {"ok": self.ok, "seconds": self.seconds, "kernels": [result.as_json() for result in self.results]}


def prewarm(
    jobs: Iterable[Job],
    workers: int | None = None,
    progress: Callable[[Result, int, int], None] | None = None,
    check: bool = False,
) -> Report:
    """Makes sure that kernels are stored. A script calls this under ``if __name__ == "__main__"``: workers import it.

    Args:
        jobs: (builder, arguments) pairs; equal ones are done once.
        workers: processes; default JIT_CACHE_WORKERS, or the number that processors and memory (1 GB each) allow. With
            1, or one missing kernel, this process compiles.
        progress: called in this process after each job with (result, number done, number of jobs).
        check: compile nothing, only say which kernels are missing.

    Returns:
        The report; a kernel that fails does not stop the others.

    Raises:
        TypeError, ValueError: the arguments of a job cannot be a key.

    Example:
        >>> from jit_cache import Program, compiled, prewarm
        >>> @compiled
        ... def scale_forward(arch: str, factor: float) -> Program:
        ...     raise NotImplementedError("imports cutlass, makes fake tensors, returns Program(kernel, *tensors)")
        >>> report = prewarm([(scale_forward, ("sm_90a", 2.0))], check=True)
        >>> report.ok, report.failed[0].status
        (False, 'missing')
    """
    start = time.perf_counter()
    unique = {builder.key(*arguments).digest: (builder, arguments) for builder, arguments in jobs}
    done: dict[str, Result] = {}

    def finish(digest: str, result: Result) -> None:
        done[digest] = result
        if progress is not None:
            progress(result, len(done), len(unique))

    missing: dict[str, Job] = {}
    for digest, (builder, arguments) in unique.items():
        begin = time.perf_counter()
        if kernel := builder.find(*arguments):
            seconds = time.perf_counter() - begin
            finish(digest, Result(builder.kernel, arguments, kernel.origin, seconds, kernel.record))
        elif check:
            finish(digest, Result(builder.kernel, arguments, "missing", 0.0))
        else:
            missing[digest] = builder, arguments
    workers = min(workers or settings().workers or default_workers(), len(missing))
    if workers <= 1:
        for digest, job in missing.items():
            finish(digest, _obtain(job))
    else:
        left = _run_pool(missing, workers, finish)
        # A worker died and took the pool with it: a process for each kernel that is left finds out whose fault it was.
        for digest, job in left.items():
            if _run_pool({digest: job}, 1, finish):
                error = "the process that compiled it died (crash, or out of memory)"
                finish(digest, Result(job[0].kernel, job[1], "failed", 0.0, error=error))
    return Report(tuple(done[digest] for digest in unique), time.perf_counter() - start)


def _run_pool(jobs: dict[str, Job], workers: int, finish: Callable[[str, Result], None]) -> dict[str, Job]:
    """Runs jobs in worker processes; returns those left over when a worker died."""
    left = dict(jobs)
    # Not fork: this process may have threads and CUDA. Not forkserver: its compiler may have read other variables.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_end_with_parent) as pool:
        futures: dict[Future[Result], str] = {}
        before = compiler_variables(os.environ)
        _exchange(before, environment())  # for the processes that `submit` starts: what this one's compiler has read
        # They inherit that Ctrl-C is blocked: it would be a traceback until `_end_with_parent` runs.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for digest, job in jobs.items():
                futures[pool.submit(_obtain, job)] = digest
        except BrokenProcessPool:  # a worker has died already
            pass
        finally:
            _exchange(environment(), before)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            for future in as_completed(futures):
                digest = futures[future]
                try:
                    result = future.result()
                except BrokenProcessPool:
                    continue
                except Exception as error:  # it could not be sent to a worker
                    builder, arguments = jobs[digest]
                    result = Result(builder.kernel, arguments, "failed", 0.0, error=f"{type(error).__name__}: {error}")
                del left[digest]
                finish(digest, result)
        except BaseException:  # Ctrl-C: what no worker has begun is left
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return left


def _end_with_parent() -> None:
    """In a worker: it ends at Ctrl-C, and with a parent that was killed, instead of waiting for more to do."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a job in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _exchange(old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """Replaces variables of the environment."""
    for name in old.keys() - new.keys():
        os.environ.pop(name, None)
    os.environ.update(new)


def _obtain(job: Job) -> Result:
    """Compiles one kernel; runs in a worker."""
    builder, arguments = job
    start = time.perf_counter()
    try:
        kernel = builder.obtain(*arguments)
        error = kernel.problem
    except Exception as failure:
        error = str(failure)
    seconds = time.perf_counter() - start
    if error is not None:
        return Result(builder.kernel, arguments, "failed", seconds, error=error)
    return Result(builder.kernel, arguments, kernel.origin, seconds, kernel.record)


def discover(
    package: str, archs: Iterable[str], only: Sequence[str] = (), config: dict[str, Any] | None = None
) -> list[Job]:
    """Returns the jobs that a package names.

    Args:
        package: top-level module or package, e.g. `cute_kernels`.
        archs: e.g. `("sm_90a", "sm_100a")`.
        only: keep the builders whose `module.name` contains one of these.
        config: a model's sizes, for the package's `for_config`: the jobs are then what that model needs.

    Raises:
        ValueError: package is no module's name.
        ImportError: there is no such package, or a part of it does not import.
        LookupError: it names no kernels: no module `prewarm`, no `specializations`, or no `for_config`.
    """
    if not all(part.isidentifier() for part in package.split(".")):
        raise ValueError(f"package must be a module's name, such as cute_kernels, got {package!r}")
    root = importlib.import_module(package)
    sources = [root]
    for module in pkgutil.walk_packages(getattr(root, "__path__", ()), f"{package}.", onerror=importlib.import_module):
        if module.name.endswith(".prewarm"):
            sources.append(importlib.import_module(module.name))
    name, given = ("specializations", ()) if config is None else ("for_config", (config,))
    hooks = [getattr(source, name) for source in sources if hasattr(source, name)]
    if not hooks:
        signature = "specializations(arch)" if config is None else "for_config(config, arch)"
        raise LookupError(f"{package} has no function `{signature}`, in itself or in a module named `prewarm`")
    jobs = [(builder, tuple(args)) for arch in archs for hook in hooks for builder, args in hook(*given, arch)]
    return [job for job in jobs if not only or any(word in job[0].kernel for word in only)]


def read_config(path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds. Raises OSError, or ValueError that names the file."""
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def default_workers() -> int:
    """As many as there are processors, if each finds 1 GB of memory; at least 1."""
    return max(1, min(len(os.sched_getaffinity(0)), available_memory() // _WORKER_BYTES))


def available_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that this process may still use: the machine's, or what its control groups leave of them."""
    available = _number(root / "proc/meminfo", r"MemAvailable:\s+(\d+)", 0) * 1024
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif controllers == "memory":
            mount, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        group = mount / path.lstrip("/")  # in a container this may be the host's path: only the mount point exists then
        for directory in (group, *group.parents):
            if directory.is_relative_to(mount) and (allowed := _number(directory / limit, r"(\d+)$", -1)) >= 0:
                reclaimable = _number(directory / "memory.stat", rf"{cache} (\d+)", 0)
                available = min(available, allowed - _number(directory / usage, r"(\d+)$", 0) + reclaimable)
    return max(available, 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path, pattern: str, default: int) -> int:
    match = re.search(f"^{pattern}", _text(path), re.MULTILINE)
    return int(match[1]) if match else default
