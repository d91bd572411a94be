"""Command line: python -m jit_cache info | list | explain | prewarm | verify | gc | clear | export | import"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import command
from .command import Outcome, UsageError
from .stale import stale_fields
from .store import Damaged, Entry, Store, settings

if TYPE_CHECKING:
    from .prewarm import Job, Result

_ERRORS = (OSError, ValueError, LookupError, ImportError, Damaged)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status, see `command.EXIT_STATUS`."""
    arguments = _parser().parse_args(argv)

    def run() -> Outcome:
        command.check_settings()
        return arguments.run(arguments)

    return command.run("jit_cache", lambda: command.reported(run, arguments.json), _ERRORS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jit-cache", description="The cache of compiled CuTe kernels.", epilog=command.EXIT_STATUS
    )
    command.add_version(parser, _version())
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, run: Callable[[argparse.Namespace], Outcome], text: str, shape: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        command.add_json(sub, shape)
        return sub

    def filters(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--arch", action="append", default=[], help="architecture, e.g. sm_90a; may be repeated")
        sub.add_argument(
            "--only", action="append", default=[], help="kernels whose module or name contains this; may be repeated"
        )

    def of_package(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("package", help="top-level package, e.g. cute_kernels")
        filters(sub)
        sub.add_argument("--config", type=Path, help="JSON file of a model's sizes: the kernels of that model alone")

    add(
        "info",
        _info,
        "Where the cache is, how large, and the settings.",
        "{directory, exists, kernels, bytes, architectures, bundles, mode, problems}",
    )
    sub = add(
        "list",
        _list,
        "The stored kernels, those of bundles, too. Marked stale: no call finds it any more, its source or the "
        "installed wheels (stack) are others now.",
        "a list of records, each with directory, name and stale: [source, stack], [] or, where its module is not "
        "found, null",
    )
    filters(sub)
    sub = add(
        "explain",
        _explain,
        "Why kernels that a package names are not stored; status 1 if one is not.",
        "a list of {kernel, arch, call, stored, reasons}",
    )
    of_package(sub)
    sub = add(
        "prewarm",
        _prewarm,
        "Compile all kernels that a package names; needs no GPU.",
        "{ok, seconds, kernels: [{kernel, arch, call, status, seconds, error, record}]}; status: compiled, disk, "
        "bundle, failed or missing",
    )
    of_package(sub)
    sub.add_argument("--workers", type=_positive, help="processes; default by processors and memory (1 GB each)")
    sub.add_argument("--check", action="store_true", help="compile nothing, only report what is missing")
    add("verify", _verify, "Check all stored files against their records.", "{kernels, problems}")
    sub = add(
        "gc",
        _gc,
        "Remove leftovers, what was not used for long, and the oldest beyond a size.",
        "{bytes, removed: [{name, bytes}]}",
    )
    sub.add_argument("--max-gb", type=_not_negative, default=2.0, help="keep at most this much (default 2)")
    sub.add_argument("--max-days", type=_not_negative, default=90.0, help="days since the last use (default 90)")
    sub = add("clear", _clear, "Remove stored kernels, by default all of the cache.", "{removed: [name]}")
    filters(sub)
    sub.add_argument("--yes", action="store_true", help="do not ask; needed where the input is no terminal")
    sub = add(
        "export",
        _export,
        "Write stored kernels to one archive and print its digest.",
        "{file, kernels, bytes, sha256, problems}",
    )
    sub.add_argument("file", type=Path)
    filters(sub)
    sub.add_argument(
        "--shared", action="store_true", help="also as shared libraries, for machines without the compiler"
    )
    sub = add(
        "import",
        _import,
        "Unpack an archive of kernels into the cache or a bundle directory.",
        "{directory, kernels: [name], problems: [text]}; problems: in which fields kernels differ from this machine",
    )
    sub.add_argument("file", type=Path)
    sub.add_argument("--digest", required=True, help="the sha256 that export printed")
    sub.add_argument("--into", type=Path, help="directory for JIT_CACHE_BUNDLE; default: the cache")
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("cute-kernels")  # the distribution of both packages
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _info(arguments: argparse.Namespace) -> Outcome:
    now = settings()
    problems: list[str] = []
    entries = list(Store(now.root).entries(problems))
    found: dict[str, Any] = {
        "directory": str(now.root),
        "exists": now.root.exists(),
        "kernels": len(entries),
        "bytes": sum(map(_entry_size, entries)),
        "architectures": sorted({entry.record["key"]["arch"] for entry in entries}),
        "bundles": list(map(str, now.bundles)),
        "mode": now.mode,
        "problems": problems,
    }
    rows = {
        "directory": f"{now.root}{'' if found['exists'] else ' (not there yet)'}",
        "kernels": f"{len(entries)}, {_bytes(found['bytes'])}",
        "architectures": ", ".join(found["architectures"]) or "none",
        "bundles": ", ".join(found["bundles"]) or "none",
        "mode": now.mode,
    }
    if problems:
        rows["problems"] = f"{len(problems)}: see python -m jit_cache verify"
    for name, value in rows.items():
        print(f"{name:15}{value}")
    return 0, found


def _list(arguments: argparse.Namespace) -> Outcome:
    problems: list[str] = []
    found = []
    for store in _stores():
        for entry in _selected(store.entries(problems), arguments):
            stale = stale_fields(entry)
            found.append({"directory": str(store.root), "name": entry.name, "stale": stale, **entry.record})
            parts = [_facts(entry.record)]
            if stale is None:
                parts.append("its module is not found here")
            elif stale:
                parts.append(f"stale: another {' and another '.join(stale)}")
            if not store.writable:
                parts.append(f"in {store.root}")
            key = entry.record["key"]
            print(f"{entry.name}  {'; '.join(parts)}\n    {key['kernel']}({_plain(key['arguments'])})")
    _report(problems)
    return 0, found


def _explain(arguments: argparse.Namespace) -> Outcome:
    from .compile import format_arguments

    found, missing = [], 0
    for builder, args in _jobs(arguments):
        call, reasons = f"{builder.kernel}{format_arguments(args)}", builder.explain(*args)
        names = {"kernel": builder.kernel, "arch": args[0], "call": call}
        found.append({**names, "stored": not reasons, "reasons": reasons})
        if reasons:
            missing += 1
            print(call)
            print("".join(f"    {line}\n" for line in reasons), end="")
    print(f"{missing} not stored")
    return int(missing > 0), found


def _prewarm(arguments: argparse.Namespace) -> Outcome:
    from .prewarm import prewarm

    jobs = _jobs(arguments)
    with command.progress("compiling", len(jobs)) as update:

        def show(result: Result, done: int, total: int) -> None:
            facts = f"{_facts(result.record)}  " if result.record else ""
            print(f"{result.status:9}{result.seconds:6.1f} s  {facts}{result.message}", flush=True)
            update(done, "")

        report = prewarm(jobs, workers=arguments.workers, progress=show, check=arguments.check)
    counts: dict[str, int] = {}
    for result in report.results:
        counts[result.status] = counts.get(result.status, 0) + 1
    summary = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    print(f"{len(report.results)} kernels: {summary}; {report.seconds:.1f} s")
    return int(not report.ok), report.as_json()


def _verify(arguments: argparse.Namespace) -> Outcome:
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
    return int(bool(problems)), {"kernels": count, "problems": problems}


def _not_negative(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) >= 0.0:  # nan is not
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")


def _positive(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")


def _gc(arguments: argparse.Namespace) -> Outcome:
    removed = Store(settings().root).gc(arguments.max_gb * 10**9, arguments.max_days * 86400)
    for name, size in removed:
        print(f"removed {name}  {_bytes(size)}")
    total = sum(size for _, size in removed)
    print(f"{len(removed)} removed, {_bytes(total)}")
    return 0, {"bytes": total, "removed": [{"name": name, "bytes": size} for name, size in removed]}


def _clear(arguments: argparse.Namespace) -> Outcome:
    store = Store(settings().root)
    names = None
    what = f"all kernels in {store.root}"
    if arguments.arch or arguments.only:
        names = [entry.name for entry in _selected(store.entries(), arguments)]
        what = f"{len(names)} kernels in {store.root}"
    removed = store.clear(names) if arguments.yes or _agrees(what) else None
    print("nothing removed" if removed is None else f"{len(removed)} kernels removed")
    return int(removed is None), {"removed": removed or []}


def _agrees(what: str) -> bool:
    """Asks on the terminal whether to remove this."""
    if not sys.stdin.isatty():
        raise UsageError(f"clear would remove {what}: say --yes (there is no terminal to ask on)")
    print(f"remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _export(arguments: argparse.Namespace) -> Outcome:
    from .bundle import export_bundle

    problems: list[str] = []
    entries = _selected(Store(settings().root).entries(problems), arguments)
    _report(problems)
    digest, count = export_bundle(arguments.file, entries, shared=arguments.shared)
    size = arguments.file.stat().st_size
    print(f"{count} kernels, {_bytes(size)}\n{digest}")
    found = {"file": str(arguments.file), "kernels": count, "bytes": size, "sha256": digest, "problems": problems}
    return int(bool(problems)), found


def _import(arguments: argparse.Namespace) -> Outcome:
    from .bundle import BundleError, misfits, read_bundle, write_bundle

    root = (arguments.into or settings().root).absolute()
    kernels = read_bundle(arguments.file, arguments.digest)
    problems = misfits(kernels, as_bundle=arguments.into is not None)
    if problems and not arguments.into:
        advice = "nothing is imported"
        if not misfits(kernels, as_bundle=True):
            advice += ": as a bundle they serve, with --into DIR and JIT_CACHE_BUNDLE=DIR"
        raise BundleError(f"{'; '.join(problems)}; {advice}")
    here, archs = _gpu_archs(), {record["key"]["arch"] for _, record, _ in kernels}
    if here and not archs.intersection(here):
        problems.append(f"the kernels are of {', '.join(sorted(archs))}, the GPUs here of {', '.join(here)}")
    _report(problems)
    write_bundle(kernels, Store(root, for_all=arguments.into is not None))
    print(f"{len(kernels)} kernels in {root}")
    return 0, {"directory": str(root), "kernels": [name for name, _, _ in kernels], "problems": problems}


# -------------------------------------------------------------------------------------------------------------- helpers


def _jobs(arguments: argparse.Namespace) -> list[Job]:
    """The package's kernels for --arch, else this machine's GPUs, else JIT_CACHE_ARCH.

    Of the architectures of several GPUs, for those that it has kernels for; one that was named must be among them.
    """
    from .prewarm import discover, read_config

    config = None if arguments.config is None else read_config(arguments.config)
    of_gpus = [] if arguments.arch else _gpu_archs()
    archs, jobs, refused = arguments.arch or of_gpus or list(settings().archs), [], 0
    if not archs:
        raise UsageError("no GPU here: say --arch sm_90a (or set JIT_CACHE_ARCH)")
    for arch in archs:
        try:
            jobs += discover(arguments.package, [arch], arguments.only, config)
        except ValueError as error:
            refused += 1
            if not of_gpus or refused == len(archs):
                raise UsageError(str(error)) from None
            print(f"jit_cache: left out: {error}", file=sys.stderr)
        except ImportError as error:
            if (error.name or "").partition(".")[0] == "cutlass":
                raise ImportError(f"{error}: pip install nvidia-cutlass-dsl") from None
            raise
    if not jobs:
        every = {builder.kernel for arch in archs for builder, _ in discover(arguments.package, [arch], config=config)}
        raise UsageError(f"no kernel matches {' or '.join(arguments.only)}; there are: {', '.join(sorted(every))}")
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
