"""Command line: python -m jit_cache info | list | explain | prewarm | verify | gc | clear | export | import"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import naming
from .store import Damaged, Entry, Store, settings

if TYPE_CHECKING:
    from .prewarm import Job


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 if something failed or is missing (`explain` says what is, and
    returns 0), 2 for wrong usage, 130 at Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
        with naming("standard output"):
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `| head`
        _discard_output()
        return 0
    except KeyboardInterrupt:
        print("jit_cache: interrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError, LookupError, ImportError, Damaged) as error:
        compiler = isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "cutlass"
        print(f"jit_cache: {error}{': pip install nvidia-cutlass-dsl' if compiler else ''}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # it was the error, and would be again at exit
            _discard_output()
        return 1


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jit_cache", description="The cache of compiled CuTe kernels.")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    def filters(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--arch", action="append", default=[], help="architecture, e.g. sm_90a; may be repeated")
        sub.add_argument(
            "--only", action="append", default=[], help="kernels whose module or name contains this; may be repeated"
        )

    command("info", _info, "Where the cache is, how large, and the settings.")
    sub = command("list", _list, "The stored kernels, those of bundles, too.")
    filters(sub)
    sub.add_argument("--json", action="store_true", help="all records, as one JSON list")
    sub = command("explain", _explain, "Why kernels that a package names are not stored.")
    sub.add_argument("package", help="top-level package, e.g. cute_kernels")
    filters(sub)
    sub = command("prewarm", _prewarm, "Compile all kernels that a package names; needs no GPU.")
    sub.add_argument("package", help="top-level package, e.g. cute_kernels")
    filters(sub)
    sub.add_argument("--workers", type=_positive, help="processes; default by processors and memory (1 GB each)")
    sub.add_argument("--check", action="store_true", help="compile nothing, only report what is missing")
    command("verify", _verify, "Check all stored files against their records.")
    sub = command("gc", _gc, "Remove leftovers, what was not used for long, and the oldest beyond a size.")
    sub.add_argument("--max-gb", type=_not_negative, default=2.0, help="keep at most this much (default 2)")
    sub.add_argument("--max-days", type=_not_negative, default=90.0, help="days since the last use (default 90)")
    command("clear", _clear, "Remove all stored kernels.")
    sub = command("export", _export, "Write stored kernels to one archive and print its digest.")
    sub.add_argument("file", type=Path)
    filters(sub)
    sub.add_argument(
        "--shared", action="store_true", help="also as shared libraries, for machines without the compiler"
    )
    sub = command("import", _import, "Unpack an archive of kernels into the cache or a bundle directory.")
    sub.add_argument("file", type=Path)
    sub.add_argument("--digest", required=True, help="the sha256 that export printed")
    sub.add_argument("--into", type=Path, help="directory for JIT_CACHE_BUNDLE; default: the cache")
    return parser


def _info(arguments: argparse.Namespace) -> int:
    now = settings()
    problems: list[str] = []
    entries = list(Store(now.root).entries(problems))
    rows = {
        "directory": f"{now.root}{'' if now.root.exists() else ' (not there yet)'}",
        "kernels": f"{len(entries)}, {_bytes(sum(_entry_size(entry) for entry in entries))}",
        "architectures": ", ".join(sorted({entry.record["key"]["arch"] for entry in entries})) or "none",
        "bundles": ", ".join(map(str, now.bundles)) or "none",
        "mode": now.mode,
    }
    if problems:
        rows["problems"] = f"{len(problems)}: see python -m jit_cache verify"
    for name, value in rows.items():
        print(f"{name:15}{value}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    problems: list[str] = []
    entries = [entry for store in _stores() for entry in _selected(store.entries(problems), arguments)]
    if arguments.json:
        rows = [{"directory": str(entry.store.root), "name": entry.name, **entry.record} for entry in entries]
        with naming("standard output"):
            print(json.dumps(rows, indent=1))
    else:
        for entry in entries:
            place = "" if entry.store.writable else f"; in {entry.store.root}"
            print(f"{entry.name}  {_facts(entry.record)}{place}\n    {_plain(entry.record['key']['arguments'])}")
    _report(problems)
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from .prewarm import Result

    missing = 0
    for builder, args in _jobs(arguments):
        lines = builder.explain(*args)
        if lines:
            missing += 1
            print(Result(builder.kernel, args, "missing", 0.0))
            print("".join(f"    {line}\n" for line in lines), end="")
    print(f"{missing} not stored")
    return 0


def _prewarm(arguments: argparse.Namespace) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .prewarm import Result, prewarm

    jobs = _jobs(arguments)

    def progress(result: Result, done: int, total: int) -> None:
        facts = f"{_facts(result.record)}  " if result.record else ""
        print(f"{result.status:9}{result.seconds:6.1f} s  {facts}{result.message}", flush=True)  # above the bar
        bar.update(task, completed=done, total=total)

    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("", total=len(jobs))
        report = prewarm(jobs, workers=arguments.workers, progress=progress, check=arguments.check)
    counts: dict[str, int] = {}
    for result in report.results:
        counts[result.status] = counts.get(result.status, 0) + 1
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    print(f"{len(report.results)} kernels: {summary}; {report.seconds:.1f} s")
    return 0 if report.ok else 1


def _verify(arguments: argparse.Namespace) -> int:
    problems: list[str] = []
    count = 0
    for store in _stores():
        for entry in store.entries(problems):
            count += 1
            for suffix in entry.record["files"]:
                try:
                    entry.read(suffix)
                except Damaged as error:
                    problems.append(str(error))
    for problem in dict.fromkeys(problems):
        print(problem)
    print(f"{count} kernels, {len(problems)} problems")
    return 1 if problems else 0


def _not_negative(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) >= 0.0:  # nan is not
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")


def _positive(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")


def _gc(arguments: argparse.Namespace) -> int:
    removed = Store(settings().root).gc(arguments.max_gb * 10**9, arguments.max_days * 86400)
    for name, size in removed:
        print(f"removed {name}  {_bytes(size)}")
    print(f"{len(removed)} removed, {_bytes(sum(size for _, size in removed))}")
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    print(f"{Store(settings().root).clear()} kernels removed")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from .bundle import export_bundle

    problems: list[str] = []
    entries = _selected(Store(settings().root).entries(problems), arguments)
    _report(problems)
    digest, count = export_bundle(arguments.file, entries, shared=arguments.shared)
    print(f"{count} kernels, {_bytes(arguments.file.stat().st_size)}\n{digest}")
    return 1 if problems else 0


def _import(arguments: argparse.Namespace) -> int:
    from .bundle import import_bundle
    from .key import stack

    root = (arguments.into or settings().root).absolute()
    entries = import_bundle(arguments.file, arguments.digest, Store(root, for_all=arguments.into is not None))
    print(f"{len(entries)} kernels in {root}")
    others = sum(entry.record["key"]["stack"] != stack() for entry in entries)
    if others and not arguments.into:
        print(f"{others} are of other wheels or another processor: for these use --into DIR and JIT_CACHE_BUNDLE=DIR")
    return 0


# -------------------------------------------------------------------------------------------------------------- helpers


def _jobs(arguments: argparse.Namespace) -> list[Job]:
    """The package's kernels for --arch, else this machine's GPUs, else JIT_CACHE_ARCH.

    Of the architectures of several GPUs, for those that it has kernels for; one that was named must be among them.
    """
    from .prewarm import discover

    of_gpus = [] if arguments.arch else _gpu_archs()
    archs, jobs, refused = arguments.arch or of_gpus or list(settings().archs), [], 0
    if not archs:
        raise ValueError("no GPU here: say --arch sm_90a (or set JIT_CACHE_ARCH)")
    for arch in archs:
        try:
            jobs += discover(arguments.package, [arch], arguments.only)
        except ValueError as error:
            refused += 1
            if not of_gpus or refused == len(archs):
                raise
            print(f"jit_cache: left out: {error}", file=sys.stderr)
    if not jobs:
        every = {builder.kernel for arch in archs for builder, _ in discover(arguments.package, [arch])}
        raise LookupError(f"no kernel matches {' or '.join(arguments.only)}; there are: {', '.join(sorted(every))}")
    return jobs


def _gpu_archs() -> list[str]:
    """The architectures of the GPUs at hand, without initialising CUDA in this process."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    capabilities = re.findall(r"^(\d+)\.(\d)$", text, re.MULTILINE)
    return sorted({f"sm_{major}{minor}a" for major, minor in capabilities if int(major) >= 9})


def _stores() -> list[Store]:
    """The cache, then the bundles."""
    return [Store(settings().root), *(Store(path, writable=False) for path in settings().bundles)]


def _report(problems: list[str]) -> None:
    for problem in dict.fromkeys(problems):
        print(f"jit_cache: {problem}", file=sys.stderr)


def _selected(entries: Iterable[Entry], arguments: argparse.Namespace) -> list[Entry]:
    return [
        entry
        for entry in entries
        if (not arguments.arch or entry.record["key"]["arch"] in arguments.arch)
        and (not arguments.only or any(word in entry.record["key"]["kernel"] for word in arguments.only))
    ]


def _facts(record: dict[str, Any]) -> str:
    """Size, registers, local and shared memory of a kernel, in one line."""
    texts = [_bytes(record["files"][".o"]["size"])]
    for kernel in record["kernels"]:
        shared = kernel["static_smem_bytes"] + kernel.get("dynamic_smem_bytes", 0)
        texts.append(f"{kernel['registers']} registers, {kernel['stack_bytes']} B stack, {_bytes(shared)} shared")
    return "; ".join(texts)


def _plain(value: Any) -> str:
    """Encoded arguments as a person writes them."""
    if isinstance(value, list):
        return f"({', '.join(map(_plain, value))})"
    if not isinstance(value, dict):
        return repr(value)
    if "dataclass" in value:
        return f"{value['dataclass'].rpartition('.')[2]}({_plain(value['fields'])})"
    if "enum" in value:
        return f"{value['enum'].rpartition('.')[2]}.{value['member']}"
    if value.keys() <= {"dtype", "float"}:
        return str(next(iter(value.values()), ""))
    return ", ".join(f"{name}={_plain(item)}" for name, item in value.items())


def _entry_size(entry: Entry) -> int:
    return sum(file["size"] for file in entry.record["files"].values())


def _bytes(size: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


if __name__ == "__main__":
    sys.exit(main())
